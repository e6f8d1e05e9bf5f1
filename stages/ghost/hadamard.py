"""Hadamard matrices: Paley's two constructions over finite fields, and Kronecker products of them (doubling is one)."""

from __future__ import annotations

import itertools
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from pipeline.errors import PalimpsestError

_KERNEL = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)


def hadamard(order: int) -> Float[Tensor, "order order"]:
    """An orthonormal Hadamard matrix H / √order of float64: all entries of one size, HᵀH = I.

    Built from orders 1 and 2, q + 1 for a prime power q ≡ 3 (mod 4), 2(q + 1) for q ≡ 1 (mod 4) (R. E. A. C. Paley, 1933),
    and products of these.

    Raises PalimpsestError if no such matrix exists, or none of this form.
    """
    factors = _factors(order)
    if factors is None:
        why = (
            "its order must be 1, 2 or a multiple of 4"
            if order > 2 and order % 4
            else "Paley's constructions and their products do not reach this order"
        )
        raise PalimpsestError(
            f"ghost.method: there is no Hadamard matrix for a stream of {order} channels here ({why}); "
            "use linearpatch_diag, least_squares_diag or ghost"
        )
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for factor in factors:
        matrix = torch.kron(matrix, _base(factor))
    return matrix / order**0.5


@lru_cache(maxsize=4096)
def _factors(order: int) -> tuple[int, ...] | None:
    """Orders that a single construction reaches and whose product is `order`; None if there are none."""
    if order == 1:
        return ()
    if order < 1 or (order > 2 and order % 4):
        return None
    if order & (order - 1) == 0:
        return (2,) * (order.bit_length() - 1)
    if _paley_field(order) is not None:
        return (order,)
    for first in itertools.chain((2,), range(4, order // 2 + 1, 4)):  # the smallest factor first: mostly doubling
        if order % first == 0 and (first == 2 or _paley_field(first) is not None):
            rest = _factors(order // first)
            if rest is not None:
                return (first, *rest)
    return None


def _paley_field(order: int) -> int | None:
    """The size q of the field from which a construction makes a matrix of `order`: q + 1, or 2(q + 1)."""
    if _prime_power(order - 1) and (order - 1) % 4 == 3:
        return order - 1
    half = order // 2 - 1
    return half if order % 2 == 0 and half % 4 == 1 and _prime_power(half) else None


def _base(order: int) -> Float[Tensor, "order order"]:
    if order == 2:
        return _KERNEL
    field = _paley_field(order)
    assert field is not None
    jacobsthal = _jacobsthal(field)
    bordered = torch.ones(field + 1, field + 1, dtype=torch.float64)
    bordered[0, 0] = 0
    bordered[1:, 1:] = jacobsthal
    identity = torch.eye(field + 1, dtype=torch.float64)
    if field % 4 == 3:  # a skew matrix
        bordered[1:, 0] = -1
        return bordered + identity
    return torch.kron(bordered, _KERNEL) + torch.kron(identity, _KERNEL @ torch.tensor([[0.0, 1.0], [-1.0, 0.0]]).double())


def _jacobsthal(size: int) -> Float[Tensor, "size size"]:
    """Q with Q_ij = 1, -1 or 0 as the difference of field elements i and j is a square, no square, or zero."""
    prime, degree = _prime_power(size) or (size, 1)
    digits = torch.tensor(list(itertools.product(range(prime), repeat=degree)))  # elements: polynomials, highest power first
    places = prime ** torch.arange(degree - 1, -1, -1)
    squares = torch.zeros(size, dtype=torch.bool)
    modulus = _irreducible(prime, degree)
    for element in digits[1:].tolist():
        squares[sum(c * int(p) for c, p in zip(_multiply(element, element, modulus, prime), places, strict=True))] = True
    character = torch.where(squares, 1.0, -1.0).double()
    character[0] = 0
    return character[((digits[:, None] - digits[None]) % prime * places).sum(-1)]


def _multiply(a: list[int], b: list[int], modulus: list[int], prime: int) -> list[int]:
    """Product of two polynomials modulo a monic one given without its leading 1; coefficients, highest power first."""
    degree = len(modulus)
    product = [0] * (2 * degree - 1)
    for i, one in enumerate(a):
        for j, other in enumerate(b):
            product[i + j] = (product[i + j] + one * other) % prime
    for i in range(degree - 1):
        for j, coefficient in enumerate(modulus, start=1):
            product[i + j] = (product[i + j] - product[i] * coefficient) % prime
    return product[degree - 1 :]


def _irreducible(prime: int, degree: int) -> list[int]:
    """A monic polynomial of `degree` that no polynomial of a lower degree divides, without its leading 1."""
    if degree == 1:
        return [0]
    reducible = set()
    for low in range(1, degree // 2 + 1):
        for a in itertools.product(range(prime), repeat=low):
            for b in itertools.product(range(prime), repeat=degree - low):
                product = [0] * (degree + 1)
                for i, one in enumerate((1, *a)):
                    for j, other in enumerate((1, *b)):
                        product[i + j] = (product[i + j] + one * other) % prime
                reducible.add(tuple(product[1:]))
    return list(next(one for one in itertools.product(range(prime), repeat=degree) if one not in reducible))


@lru_cache(maxsize=4096)
def _prime_power(size: int) -> tuple[int, int] | None:
    """(prime, exponent) of an odd prime power; None for everything else."""
    if size < 3 or size % 2 == 0:
        return None
    prime = next((p for p in range(3, int(size**0.5) + 1, 2) if size % p == 0), size)
    exponent, rest = 0, size
    while rest % prime == 0:
        rest, exponent = rest // prime, exponent + 1
    return (prime, exponent) if rest == 1 else None

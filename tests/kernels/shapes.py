"""Kernels under test with their shape annotations checked at every call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from beartype import beartype
from jaxtyping import jaxtyped

Kernel = TypeVar("Kernel", bound=Callable[..., object])


def checked(kernel: Kernel) -> Kernel:
    """`kernel`, raising TypeError where an argument or the result has not the annotated type and shape."""
    return jaxtyped(typechecker=beartype)(kernel)

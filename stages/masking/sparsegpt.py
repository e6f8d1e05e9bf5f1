"""SparseGPT: weights are removed column by column, and what each removal breaks is mended in the columns behind it.

arXiv 2301.00774, algorithm 1, as github.com/IST-DASLab/sparsegpt runs it. H = 2 XᵀX / windows; R is the upper Cholesky factor of
H⁻¹. Of each block of columns the lowest W² / diag(R)² go, compared over all rows and the block's columns. Everything here lies
transposed, [in, out], so that a column of weights is contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from scipy.linalg import get_lapack_funcs
from torch import Tensor

from pipeline.errors import PalimpsestError
from stages.decoder.selection import keep_groups
from stages.masking.budget import Budget, Pruned, keep_pooled

LARGEST_DAMPING = 1.0  # of the mean diagonal
CHUNK = 1 << 20  # entries moved at once
INNER = 16  # columns whose updates are applied one by one; the rest of a block gets theirs as one product


class HopelessHessian(PalimpsestError):
    """No damping within the limit makes the Hessian positive definite."""


def sparsegpt(
    weights: Sequence[Float[Tensor, "_ in"]],
    gram: Float[Tensor, "in in"],
    windows: int,
    budgets: Sequence[Budget],
    damping: float,
    block: int,
    what: str,
) -> list[Pruned]:
    """Prune matrices that share their inputs, and so their Hessian.

    Args:
        weights: the matrices, [out, in] each.
        gram: XᵀX over the calibration tokens, float64; left as it is.
        windows: calibration windows, over which the published code averages.
        budgets: one per matrix.
        damping: added to H's diagonal, relative to its mean; raised tenfold, up to 1, while the factorisation fails.
        block: columns that are compared with each other and updated together.
        what: named in the error.

    Raises:
        HopelessHessian: no damping up to 1 makes H positive definite; names `what` and the condition number.
    """
    diagonal = gram.diagonal()
    dead = diagonal == 0
    diagonal[dead] = windows / 2  # what is 1 in the published H = 2 XᵀX / windows; H's scale cancels in all that follows
    factor, used = inverse_factor(gram, damping, what)
    diagonal[dead] = 0
    factor = factor.float()
    stacked = torch.cat([weight.float() for weight in weights]).T.contiguous()
    stacked[dead] = 0
    keep = torch.ones_like(stacked, dtype=torch.bool)
    ends = torch.tensor([0, *(len(weight) for weight in weights)]).cumsum(0).tolist()
    spans = list(zip(ends, ends[1:], strict=False))
    kept = torch.zeros(len(weights), 2, dtype=torch.float64)  # kept and total score

    for start in range(0, len(stacked), block):
        stop = min(start + block, len(stacked))
        part, inner = stacked[start:stop], factor[start:stop, start:stop]
        scores = part.square() / inner.diagonal().square()[:, None]
        group = budgets[0].group
        if group is None:
            for (low, high), budget in zip(spans, budgets, strict=True):
                rows = high - low
                count = round(budget.share * rows * stop) - round(budget.share * rows * start)
                keep[start:stop, low:high] = keep_pooled(scores[:, low:high].T, budget.share, budget.exact, count).T
        errors = eliminate(part, inner, keep[start:stop], group)
        stacked[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1)
        for index, (low, high) in enumerate(spans):
            some = scores[:, low:high]
            kept[index, 0] += (some * keep[start:stop, low:high]).sum()
            kept[index, 1] += some.sum()
    shares = [float(a / b) if b > 0 else 1.0 for a, b in kept]
    return [
        Pruned(keep[:, low:high].T.contiguous(), share, stacked[:, low:high].T, used, int(dead.sum()))
        for (low, high), share in zip(spans, shares, strict=True)
    ]


def eliminate(
    part: Float[Tensor, "block out"],
    factor: Float[Tensor, "block block"],
    keep: Bool[Tensor, "block out"],
    group: tuple[int, int] | None,
) -> Float[Tensor, "block out"]:
    """Remove the dropped weights of a block of columns, in place, and mend the columns behind each within the block.

    With `group` (n, m), `keep` is decided here too, m columns at a time, from weights that are mended up to there.
    Returns the errors (w - q) / d, by which the columns behind the block are still to be mended.
    """
    errors = torch.empty_like(part)
    step = INNER if group is None else group[1] * max(1, INNER // group[1])
    diagonal = factor.diagonal()
    drop = (~keep).to(part.dtype) / diagonal[:, None]
    for start in range(0, len(part), step):
        stop = min(start + step, len(part))
        for column in range(start, stop):
            if group is not None and column % group[1] == 0:
                span = slice(column, column + group[1])
                scores = part[span].square() / diagonal[span].square()[:, None]
                keep[span] = keep_groups(scores.T, *group).T
                drop[span] = (~keep[span]).to(part.dtype) / diagonal[span, None]
            torch.mul(part[column], drop[column], out=errors[column])
            part[column + 1 : stop].addr_(factor[column, column + 1 : stop], errors[column], alpha=-1)
        part[stop:].addmm_(factor[start:stop, stop:].T, errors[start:stop], alpha=-1)
    part.mul_(keep)
    return errors


def inverse_factor(hessian: Float[Tensor, "in in"], damping: float, what: str) -> tuple[Float[Tensor, "in in"], float]:
    """Upper triangular R with RᵀR = (H + λ mean(diag H) I)⁻¹, and the λ used.

    Factored from the last row up, H = U Uᵀ with U upper triangular, R is U⁻¹: one factorisation and one triangular inverse of H
    turned round, in the memory that R is returned in. H itself is left as it is, for another try with more damping.

    Raises:
        HopelessHessian: no λ up to 1 makes it positive definite; names `what` and the condition number.
    """
    if not torch.isfinite(hessian.sum()):
        raise HopelessHessian(f"{what}: NaN or infinite inputs, of which no Hessian can be made")
    mean = float(hessian.diagonal().mean())
    used = damping
    while True:
        damped = hessian.flip(0, 1)
        damped.diagonal().add_(used * mean)
        if _to_inverse_factor(damped):
            _reverse(damped.view(-1))
            return damped, used
        del damped
        if used * 10 > LARGEST_DAMPING * (1 + 1e-9):
            values = torch.linalg.eigvalsh(hessian)
            low, high = float(values[0]), float(values[-1])
            condition = high / low if low > 0 else float("inf")
            raise HopelessHessian(
                f"{what}: the Hessian is not positive definite (eigenvalues {low:.1e} to {high:.1e}, condition {condition:.1e}) "
                f"even with damping {used:g}; raise tokens.calibration_windows or masking.sparsegpt.damping, or check the model"
            )
        used *= 10


def _to_inverse_factor(matrix: Float[Tensor, "in in"]) -> bool:
    """L Lᵀ becomes L⁻¹ in place; False if it is not positive definite. On the CPU without a second matrix of that size."""
    if matrix.device.type == "cpu":
        array = matrix.numpy().T  # LAPACK's view of the same memory, in which lower is upper
        potrf, trtri = get_lapack_funcs(("potrf", "trtri"), (array,))
        _, info = potrf(array, lower=False, clean=True, overwrite_a=True)
        if info or not torch.isfinite(matrix.sum()):
            return False
        trtri(array, lower=False, overwrite_c=True)
        return True
    lower, info = torch.linalg.cholesky_ex(matrix)
    if int(info) or not torch.isfinite(lower.sum()):
        return False
    identity = torch.eye(len(lower), dtype=lower.dtype, device=lower.device)
    matrix.copy_(torch.linalg.solve_triangular(lower, identity, upper=False))
    return True


def _reverse(flat: Float[Tensor, " entry"]) -> None:
    """Turn a tensor round in place: of a matrix laid out in rows, both axes."""
    for start in range(0, len(flat) // 2, CHUNK):
        stop = min(start + CHUNK, len(flat) // 2)
        front, back = flat[start:stop], flat[len(flat) - stop : len(flat) - start]
        kept = front.flip(0)
        front.copy_(back.flip(0))
        back.copy_(kept)

"""What masking says in words: before the work what will not go as asked, after it what did not."""

from __future__ import annotations

import pandas as pd

from pipeline.console import say
from stages.masking import Masking
from stages.masking.budget import Budget
from stages.masking.methods import NEEDS_GRAMS
from stages.masking.shares import Key, Shares, rounding_note
from stages.masking.wanda_variant import TOLERANCE as VARIANT_TOLERANCE


def _few_tokens_note(sizes: dict[Key, tuple[int, int]], tokens: int, wanted: Masking) -> str | None:
    """In words, that the calibration tokens cannot fill the largest Hessian; None if they can, or none is made."""
    widest = max(sizes, key=lambda key: sizes[key][1])
    width = sizes[widest][1]
    if wanted.method not in NEEDS_GRAMS or tokens >= width:
        return None
    return (
        f"{tokens} calibration tokens are fewer than the {width} inputs of {widest[1]}: its Hessian is singular, and damping "
        f"alone ({wanted.sparsegpt.damping:g}) carries it; tokens.calibration_windows or tokens.length would mend that"
    )


def say_before(
    shares: Shares, wishes: dict[Key, Budget], sizes: dict[Key, tuple[int, int]], tokens: int, wanted: Masking
) -> None:
    """Say what will not be quite as asked.

    Args:
        wishes: (block, matrix) -> its budget.
        sizes: (block, matrix) -> (out, in).
        tokens: calibration tokens.
    """
    for note in (rounding_note(shares, wishes, wanted), _few_tokens_note(sizes, tokens, wanted)):
        if note:
            say(note)


def say_after(
    table: pd.DataFrame, wishes: dict[Key, Budget], sizes: dict[Key, tuple[int, int]], tokens: int, wanted: Masking
) -> None:
    """Say what was done, and whatever was not done as asked.

    Arguments as for `say_before`, and with the head in block -1: `table` (masks.csv), `wishes`, `sizes`.
    """
    keys: list[Key] = list(zip(table.block, table.matrix, strict=True))
    fallen = table[(table.method == "magnitude") & (wanted.method != "magnitude")]
    if len(fallen):
        blocks = ", ".join(str(block) for block in sorted(set(fallen.block)) if block >= 0)
        places = [f"blocks {blocks}"] * bool(blocks) + ["the output head"] * bool((fallen.block < 0).any())
        say(
            f"{len(fallen)} of {len(table)} matrices saw fewer than masking.expert_tokens = {wanted.expert_tokens} tokens and "
            f"were masked by magnitude, in {' and '.join(places)}; masks.csv names them"
        )
    widths = pd.Series([sizes[key][1] for key in keys])
    thin = table[table.method.isin(NEEDS_GRAMS) & (table.tokens < widths) & (table.tokens < tokens)]
    if len(thin):
        names = [_spell(*key) for key in zip(thin.block, thin.matrix, strict=True)]
        some = ", ".join([*names[:3], *(["…"] if len(names) > 3 else [])])
        say(
            f"{len(thin)} of {len(table)} matrices saw fewer tokens than they have inputs ({some}): damping alone "
            "carries their Hessians; masking.expert_tokens sets from how many on they are trusted"
        )
    asked = pd.Series([wishes[key].share for key in keys])
    off = (table.sparsity - asked).abs()
    missed = off[(table.method == "wanda_variant") & (off > VARIANT_TOLERANCE)]
    if wanted.rounding == "published" and len(missed):
        worst = int(missed.idxmax())  # type: ignore[arg-type]
        say(
            f"{len(missed)} of {len(table)} matrices miss their share by more than {VARIANT_TOLERANCE:g}, most of all "
            f"{_spell(*keys[worst])} ({table.sparsity[worst]:.4f} instead of {asked[worst]:.4f}): "
            "the published search of wanda_variant ends there; masking.rounding: exact meets the share"
        )
    raised = table[table.damping > wanted.sparsegpt.damping]
    for block, name, used in zip(raised.block, raised.matrix, raised.damping, strict=True):
        say(f"{_spell(block, name)}: damping raised from {wanted.sparsegpt.damping:g} to {used:g}")
    dead = table[table.dead_inputs > 0]
    if len(dead):
        say(f"{int(dead.dead_inputs.sum())} inputs of {len(dead)} matrices are zero for every token; their weights become zero")
    for what, part in (("", table[table.block >= 0]), ("of the output head, ", table[table.block < 0])):
        if len(part):
            target = float((part.sparsity_asked * part.parameters).sum() / part.parameters.sum())
            found = float((part.sparsity * part.parameters).sum() / part.parameters.sum())
            say(f"{wanted.method}: {what}{found:.6f} of {int(part.parameters.sum()):,} weights masked, target {target:.6f}")


def _spell(block: int, matrix: str) -> str:
    return f"{matrix} of block {block}" if block >= 0 else "the output head"

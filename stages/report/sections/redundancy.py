"""How alike the stream is at any two boundaries, and how much each block changes it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.drawing.axes import fitting
from pipeline.drawing.notation import blocks, fixed, listing, number
from stages.report.columns import Floats
from stages.report.heatmap import heatmap
from stages.report.results import Results
from stages.report.sections import Part, block_panel, calibration

MOST_RUNS = 4  # removed runs that get a sentence each


def redundancy(results: Results, params: dict[str, Any]) -> Part:
    """The cosine map with the removed runs outlined, and block influence."""
    cosines = cosine_map(results)
    description = (
        f"cosine of every pair of boundaries; {f'removed: {blocks(results.removed)}' if results.removed else 'nothing removed'}"
    )
    caption = (
        f"Boundary i is the stream that enters block i; boundary {results.blocks} leaves the last block. Cosine: between the "
        f"stream at both boundaries, averaged over the tokens of {calibration(params)}, dense model. Influence of a block: one "
        "minus the cosine of its input and its output; bars reach one standard error over windows."
    )
    title = "Cosine between boundaries i (down) and j (across)"
    panels = (heatmap(title, cosines, results.gaps, description), _influence(results))
    return Part(
        "redundancy", "Which blocks change the stream least", caption, panels, (_least(results), *_choice(results, cosines))
    )


def cosine_map(results: Results) -> Floats:
    """[boundary, boundary] cosines; NaN where the table has none."""
    i, j = results.pairs.whole("i"), results.pairs.whole("j")
    size = max(results.blocks, *i, *j) + 1
    cosines = np.full((size, size), np.nan)
    cosines[i, j] = results.pairs.numbers("cosine")
    return cosines


def _influence(results: Results) -> str:
    table = results.influence.ordered("block")
    at, values, spread = table.whole("block"), table.numbers("influence"), np.nan_to_num(table.numbers("influence_error"))
    lows, highs = values - spread, values + spread
    visible = np.where(lows > 0, lows, values)
    y = fitting(np.concatenate([visible, highs]))
    panel = block_panel(results, "Block influence", y, height=230)
    panel.whiskers(at, (visible if y.log else lows).tolist(), highs.tolist(), "blue")
    tips = [
        f"block {block}: {number(value, 3)} ± {number(error, 2)}" for block, value, error in zip(at, values, spread, strict=True)
    ]
    panel.points(at, values.tolist(), "blue", "dot", tips)
    return panel.svg(f"influence of each block, from {number(values.min(), 3)} to {number(values.max(), 3)}")


def _least(results: Results) -> str:
    table = results.influence.ordered("influence", "block")
    order, values = table.whole("block"), table.numbers("influence")
    if len(order) == 1:
        return f"The only block has influence {number(values[0], 3)}."
    text = f"Block {order[0]} changes the stream least (influence {number(values[0], 3)}), "
    text += f"block {order[-1]} most ({number(values[-1], 3)})"
    if not results.removed:
        return text + "."
    ranks, of = [order.index(block) + 1 for block in results.removed], f"of {len(order)}, counted from the least"
    if len(ranks) > 6:
        return f"{text}; the {len(ranks)} removed blocks have ranks from {min(ranks)} to {max(ranks)} {of}."
    have = "has rank" if len(ranks) == 1 else "have ranks"
    return f"{text}; the removed {blocks(results.removed)} {have} {listing([str(rank) for rank in ranks])} {of}."


def _choice(results: Results, cosines: Floats) -> list[str]:
    """For each removed run: where its cosine stands among all stretches of as many blocks."""
    sentences = []
    for start, stop in results.gaps:
        length, cosine = stop - start, cosines[start, stop]
        rivals = np.diagonal(cosines, length)
        if not np.isfinite(cosine) or len(rivals) < 2:
            continue
        text = f"Across the removed {blocks(range(start, stop))} the stream keeps a cosine of {fixed(float(cosine), 4)}"
        sentences.append(f"{text}{_standing(np.flatnonzero(rivals > cosine), len(rivals), length)}.")
    if len(sentences) > MOST_RUNS:
        return [
            *sentences[:MOST_RUNS],
            f"So for the first {MOST_RUNS} of {len(results.gaps)} removed runs; the map outlines them all.",
        ]
    return sentences


def _standing(better: NDArray[np.intp], count: int, length: int) -> str:
    every = f"{count} {'single blocks' if length == 1 else f'stretches of {length} blocks'}"
    if not len(better):
        return f", the highest of all {every}"
    which = f" (starting at {blocks(better.tolist())})" if len(better) <= 8 else ""
    return f"; {len(better)} of {every} keep{'s' if len(better) == 1 else ''} a higher one{which}"

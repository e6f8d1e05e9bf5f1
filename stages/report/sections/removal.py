"""What deleting and swapping blocks does to the output, whether the protocols agree, and what each criterion would remove."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.drawing.axes import fitting, indices, names
from pipeline.drawing.chart import Key, Panel
from pipeline.drawing.notation import MISSING, blocks, counted, fixed, listing, number
from stages.report.columns import Columns, Floats
from stages.report.naming import method
from stages.report.results import Results
from stages.report.sections import Part, Table, block_panel

TONES = (("rust", "square"), ("blue", "dot"), ("ink", "ring"), ("green", "diamond"))  # by count, the smallest first

CAVEAT = (
    "A regime says how the two protocols relate; it does not predict which criterion removes blocks at the least cost: "
    "compare them by what their removals really cost."
)


def removal(results: Results, params: dict[str, Any]) -> Part:
    """Curves of the KLs, the choices of all criteria, and the regime in words."""
    regime, wanted = results.regime, params["redundancy"]
    measured = np.isfinite(results.influence.numbers("deletion")).any()
    heading = "What goes by each criterion"
    caption = (
        "Left: KL of the dense model's next-token distribution from the changed model's, in nats, averaged over "
        f"{'the last position' if wanted['positions'] == 'last' else 'all positions'} of "
        f"{counted(int(regime.get('prompts', wanted['prompts'])), 'prompt')} of "
        f"{regime.get('length', wanted['length'])} tokens. Replaced: a block and its right neighbour, the worse direction. "
        "Right: the blocks that each criterion removes when it may remove so many; nothing is measured here of what that costs."
    )
    panels = [*([_curves(results)] if measured else []), *([_choices(results)] if len(results.choices) else [])]
    readings = _readings(results, measured)
    return Part(
        "removal", heading, caption if panels else "", tuple(panels), readings, _sink_table(results, params["removal"]["count"])
    )


def _curves(results: Results) -> str:
    table, pairs = results.influence.ordered("block"), results.pairs
    i, j = np.array(pairs.whole("i")), np.array(pairs.whole("j"))
    near = pairs.pick((j - i == 1) & np.isfinite(pairs.numbers("interchange"))).ordered("i")
    series = [
        ("deleted", "rust", "square", table.whole("block"), table.numbers("deletion")),
        ("replaced", "blue", "dot", near.whole("i"), near.numbers("replacement")),
        ("interchanged", "green", "diamond", near.whole("i"), near.numbers("interchange")),
    ]
    y = fitting([float(value) for *_, values in series for value in values if np.isfinite(value) and value > 0])
    keys = [Key(name, tone, mark) for name, tone, mark, _, _ in series]
    panel = block_panel(results, "KL in nats, by block", y, keys, height=230)
    for name, tone, mark, at, values in series:
        panel.line(at, values.tolist(), tone)
        panel.points(
            at, values.tolist(), tone, mark, [f"block {b} {name}: {number(v, 3)}" for b, v in zip(at, values, strict=True)]
        )
    return panel.svg("KL of the output with blocks deleted, replaced and interchanged")


def _choices(results: Results) -> str:
    """Blocks across, criteria down; a mark where a block goes, by the fewest removals at which it does."""
    table = results.choices
    criteria = list(dict.fromkeys(table.words("criterion")))
    counts = sorted(set(table.whole("count")))[: len(TONES)]
    keys = [Key(f"of {count}", *tone) for count, tone in zip(counts, TONES, strict=False)]
    panel = Panel(
        "Blocks that go",
        indices(results.blocks),
        names([method(one) for one in criteria]),
        x_label="block",
        height=26 * len(criteria),
        keys=keys,
        rows=True,
    )
    first: dict[tuple[int, int], int] = {}
    for name, count, block in zip(table.words("criterion"), table.whole("count"), table.whole("block"), strict=True):
        place = criteria.index(name), block
        first[place] = min(count, first.get(place, count))
    for count, (tone, mark) in zip(counts, TONES, strict=False):
        here = [(row, block) for (row, block), least in first.items() if least == count]
        tips = [f"{method(criteria[row])}: block {block}, from {count} removals on" for row, block in here]
        panel.points([block for _, block in here], [row for row, _ in here], tone, mark, tips)
    return panel.svg("; ".join(f"{method(one)}: {_chosen(table, one, counts)}" for one in criteria))


def _chosen(table: Columns, criterion: str, counts: Sequence[int]) -> str:
    rows = list(zip(table.words("criterion"), table.whole("count"), table.whole("block"), strict=True))
    sets = [[block for name, n, block in rows if (name, n) == (criterion, count)] for count in counts]
    return ", ".join(blocks(one) for one in sets if one)


def _readings(results: Results, measured: Any) -> tuple[str, ...]:
    regime = results.regime
    if not measured:
        return ("Blocks were not deleted or swapped (redundancy.swaps: false), so nothing is known of what that does.",)
    lines = []
    if regime["regime"] != "unknown":
        lines.append(
            f"Regime: {regime['regime']}. Over {counted(int(regime['pairs']), 'pair')} of adjacent inner blocks the median "
            f"replacement costs {number(regime['replacement'], 3)} nats, the median interchange "
            f"{number(regime['interchange'], 3)}; "
            f"their ratio has median {fixed(regime['ratio'], 2)}. {CAVEAT}"
        )
    halves = regime.get("half_against_all", {})
    if halves:
        lines.append(
            "Ranks from half of the prompts against all, Spearman: "
            + listing([f"{name.replace('_', ' ')} {fixed(value, 2)}" for name, value in sorted(halves.items())])
            + ("." if min(halves.values()) >= 0.9 else ": more prompts (redundancy.prompts) would still move them.")
        )
    left_out = regime.get("unlike_pairs", [])
    if left_out:
        lines.append(f"{counted(len(left_out), 'pair')} of blocks of unlike types cannot stand in for each other: left out.")
    table = results.influence.ordered("block")
    for block in regime.get("sink_made_by", []):
        place = table.whole("block").index(block)
        lines.append(
            f"Block {block} makes the sink token: {_rank(table.numbers('influence'), place)} by influence, "
            f"{_rank(table.numbers('deletion'), place)} by the KL of its deletion. A cosine averaged over tokens does not see it."
        )
    return tuple(lines)


def _rank(values: Floats, place: int) -> str:
    """`rank 3 of 30 (0.12)`, counted from the least of those that have a value."""
    if not np.isfinite(values[place]):
        return MISSING
    return f"rank {1 + int((values < values[place]).sum())} of {int(np.isfinite(values).sum())} ({number(values[place], 3)})"


def _sink_table(results: Results, count: int) -> Table | None:
    """What each criterion says of the blocks that make and end the sink: rank of all it may remove, 1 = the first to go."""
    table = results.influence.ordered("block")
    marked = [(place, word) for place, word in enumerate(table.words("sink")) if word in ("makes", "ends")]
    plain = {"influence": "Influence", "influence_sinkless": "Without sinks", "angular": "Angle"}
    there = {name: values for name in plain if np.isfinite(values := table.numbers(name)).any()}
    if not marked or not (there or results.orders):
        return None
    rows = []
    for place, word in marked:
        block = table.whole("block")[place]
        ranks = [_rank(values, place) for values in there.values()]
        ranks += [_place(order, block) for order in results.orders.values()]
        rows.append((f"{block}, {word} the sink", *ranks))
    windows = {"streamline", "recoverable"} & set(results.orders)
    criteria = [_capital(method(name)) + (f" of {count}" if name in windows else "") for name in results.orders]
    return Table(("Block", *(plain[name] for name in there), *criteria), tuple(rows)).tall()


def _place(order: Sequence[tuple[int, float]], block: int) -> str:
    """`rank 3 of 28 (0.12)` in a criterion's order; a dash if it may not remove the block."""
    found = [place for place, (one, _) in enumerate(order) if one == block]
    return f"rank {found[0] + 1} of {len(order)} ({number(order[found[0]][1], 3)})" if found else MISSING


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]

"""The page of a study: its pictures, its table and the contract behind the numbers, in one file."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from pipeline.drawing.axes import Axis, finite, fitting, linear, names
from pipeline.drawing.chart import Key, Panel
from pipeline.drawing.notation import between, fixed, number
from pipeline.drawing.style import PAGE, THEME
from pipeline.study.cells import Outcome
from pipeline.study.compare import CONFIDENCE, Comparison, by_contract
from pipeline.study.plan import Study
from pipeline.study.results import UNLIKE, contracts, label, remarks, rows
from pipeline.table import describe

HERE = Path(__file__).parent
ROW = 22  # pixels


def page(study: Study, outcomes: Sequence[Outcome], compared: Sequence[Comparison]) -> str:
    """The whole page as HTML; it loads nothing from elsewhere."""
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    groups = by_contract(compared)
    return environment.get_template("page.html.j2").render(
        study=study,
        styles=Markup(THEME + PAGE),
        panels=[Markup(panel) for panel in pictures(study, outcomes, compared)],
        tables=[rows(study, group) for group in groups],
        unlike=UNLIKE if len(groups) > 1 else "",
        remarks=remarks(study, compared),
        fixed=[f"{key} = {value}" for key, value in study.plan.fixed.items()],
        contracts=[(describe(one["contract"]), len(one["cells"])) for one in contracts(outcomes)],
        failed=[(one.cell.name, one.error) for one in outcomes if one.error],
        cells=len(outcomes),
    )


def pictures(study: Study, outcomes: Sequence[Outcome], compared: Sequence[Comparison]) -> list[str]:
    """The page's charts, an `<svg>` each, with those of unlike contracts apart; none if no cell ran."""
    return [panel for group in by_contract(compared) for panel in _pictures(study, outcomes, group)]


def _pictures(study: Study, outcomes: Sequence[Outcome], compared: Sequence[Comparison]) -> list[str]:
    """Charts of what was measured under one contract."""
    drawn = [one for one in compared if one.values]
    panels = (_curves(study, compared) if study.plan.curve else [_values(study, outcomes, drawn)]) if drawn else []
    if any(one.difference_low is not None for one in drawn):
        panels.append(_differences(study, outcomes, drawn))
    return panels


def _values(study: Study, outcomes: Sequence[Outcome], drawn: Sequence[Comparison]) -> str:
    """The first measure of every setting: its seeds and their mean, or its own interval."""
    measure = study.plan.measures[0]
    found = {
        label(one.varied): [o.result[measure] for o in outcomes if o.cell.varied == one.varied and o.result] for one in drawn
    }
    ends = [end for one in drawn for end in (one.low, one.high) if end is not None]
    x = fitting([*(value for values in found.values() for value in values), *ends])
    keys = [Key("a seed", "blue", "tick"), Key("mean", "blue", "dot")] if any(one.n > 1 for one in drawn) else []
    means = [one.values[measure] for one in drawn]
    panel = Panel(
        (measure if "." in measure else measure.capitalize()) + (", logarithmic scale" if x.log else ""), x, names(list(found)),
        x_label=measure + (", lower is better" if measure == "perplexity" else ""), height=ROW * len(drawn), rows=True, keys=keys,
        notes=[number(mean) for mean in means],
    )  # fmt: skip
    for place, one in enumerate(drawn):
        if one.n > 1:
            panel.ticks(place, found[label(one.varied)], "blue")
        elif one.low is not None and one.high is not None:
            panel.whiskers([place], [one.low], [one.high], "blue")
    tips = [f"{name}: {number(mean)}" for name, mean in zip(found, means, strict=True)]
    panel.points(means, list(range(len(drawn))), "blue", "dot", tips)
    return panel.svg("; ".join(tips))


def _curves(study: Study, compared: Sequence[Comparison]) -> list[str]:
    """Every measure along the last key varied; a panel for each setting of the other keys, all on one scale."""
    key = list(study.plan.vary)[-1] if study.plan.vary else ""
    panels: dict[str, list[Comparison]] = {}
    for one in compared:
        others = {name: value for name, value in one.varied.items() if key not in ("", name)}
        panels.setdefault(label(others), []).append(one)
    values = [value for one in compared for value in one.values.values()]
    near_zero = min(values) < (max(values) - min(values)) / 2
    y = linear(values, include=[0.0] if near_zero else [])
    title = "Along " + (key or ", ".join(compared[0].varied))
    return [_curve(study, along, f"{title}: {name}" if name else title, y, key) for name, along in panels.items()]


def _curve(study: Study, along: Sequence[Comparison], title: str, y: Axis, key: str) -> str:
    """Every measure along the cells; a hole where a cell failed; dashed, the least so far of those that ask for it."""
    looks = list(
        zip(study.plan.measures, itertools.cycle([("blue", "dot"), ("rust", "square"), ("green", "diamond"), ("plum", "ring")]))
    )
    keys = [Key(measure, *look) for measure, look in looks] + [Key("least so far", "", "dash")] * bool(study.plan.least)
    labels = [label({key: one.varied[key]} if key in one.varied else one.varied) for one in along]
    panel = Panel(title, _places(labels), y, x_label=key or "cell, in the table's order", keys=keys)
    places = list(range(len(along)))
    for measure, (tone, mark) in looks:
        ys = [one.values.get(measure, math.nan) for one in along]
        if measure in study.plan.least:
            panel.line(places, [min(finite(ys[: place + 1]), default=math.nan) for place in places], tone, dashed=True)
        panel.line(places, ys, tone)
        tips = [f"{name}: {measure} {number(value)}" for name, value in zip(labels, ys, strict=True)]
        panel.points(places, ys, tone, mark, tips)
    first = [one.values.get(study.plan.measures[0], math.nan) for one in along]
    return panel.svg("; ".join(f"{name}: {number(value)}" for name, value in zip(labels, first, strict=True)))


def _places(labels: Sequence[str]) -> Axis:
    """A place per cell, named by as many of the labels as there is room for; of a long path by its end."""
    short = [text if len(text) <= 16 else f"…{text[-15:]}" for text in labels]
    step = math.ceil(sum(len(text) + 2 for text in short) / 55)
    axis = names(short)
    return replace(axis, ticks=axis.ticks[::step])


def _differences(study: Study, outcomes: Sequence[Outcome], drawn: Sequence[Comparison]) -> str:
    paired = [one for one in drawn if one.difference_low is not None]
    means = [one.difference or 0.0 for one in paired]
    lows, highs = [one.difference_low or 0.0 for one in paired], [one.difference_high or 0.0 for one in paired]
    panel = Panel(
        "Loss minus the baseline's, window by window", linear([*means, *lows, *highs], include=[0.0]),
        names([label(one.varied) for one in paired]), x_label=f"nats per token, 0 = baseline; {CONFIDENCE:.0%} intervals",
        height=ROW * len(paired), rows=True, notes=[fixed(mean, sign=True) for mean in means],
    )  # fmt: skip
    panel.level(0.0, vertical=True)
    places = list(range(len(paired)))
    panel.whiskers(places, lows, highs, "rust", strong=True)
    tips = [
        f"{label(one.varied)}: {fixed(mean, 4, sign=True)} ({between(low, high, 3)})"
        for one, mean, low, high in zip(paired, means, lows, highs, strict=True)
    ]
    panel.points(means, places, "rust", "diamond", tips)
    return panel.svg("; ".join(tips))

"""How good the layers could have been: fitted references beside the model, and what they say of each layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pipeline.drawing.axes import linear, names
from pipeline.drawing.chart import Key, Panel
from pipeline.drawing.notation import blocks as spelled_blocks
from pipeline.drawing.notation import counted, fixed, number, percent
from stages.report.columns import Columns
from stages.report.results import Results
from stages.report.sections import Part, block_panel

MOST_ROWS = 14
PROVES = {
    "red": "red: even the reference that sends every block to the last boundary (YES0) is better. That proves, on these tokens, "
    "that training left the layers far below what they can do.",
    "amber": "amber: YES0 is no better, but another map (YES*) is. That proves, on these tokens, that a better net of the "
    "model's class exists which training did not find.",
    "green": "green: no map that was tried is better. That proves nothing more; other maps, longer fits or other tokens may be.",
    "amber, YES0 untried": "amber: a map (YES*) is better. That proves, on these tokens, that a better net of the model's class "
    "exists which training did not find. The map that sends every block to the last boundary (YES0) was not tried, so red "
    "cannot be told.",
    "none": "none: no reference of the model's class was fitted, and a net of fewer blocks, or on another grid, is no bound on "
    "it.",
    "none, one window": "none: losses of a single window of the fit have no standard error to hold a difference against.",
}


def yes(results: Results, params: dict[str, Any]) -> Part:
    """Losses of all nets on the same windows, the gap that each layer leaves, and the verdict in words."""
    verdict, nets = results.verdict, results.yes
    wanted = params["yes"]
    caption = (
        "Each reference is a net of the model's own blocks, fitted one after another to streams of the model itself, frozen as "
        "they are done, with a light head by cross-entropy at the end. Its map says to which boundary each block is fitted. All "
        "losses are on the same windows: those of the fit, and others. Bars reach one standard error over windows. What counts "
        "is the gain over the control, the model's own last stream with the same head fitted to it (dashed line): only that "
        "says anything of the layers. Nets of fewer blocks, or on another grid than the model's, are references, not bounds."
    )
    panels = [_losses(nets)]
    table = results.yes_layers.ordered("block")
    if np.isfinite(table.numbers("gap")).any():
        panels.append(_gaps(results, table, wanted["tolerance"]))
    if np.isfinite(table.numbers("skipped_best")).any():
        panels.append(_skipped(results, table))
    readings = [_verdict(verdict, wanted["tolerance"]), *_shares(verdict), *_others(verdict, nets, wanted), *_stones(table)]
    return Part("yes", "How good the layers could have been", caption, tuple(panels), tuple(readings))


def _losses(nets: Columns) -> str:
    shown = _most_telling(nets)
    ends = {part: (shown.numbers(part), np.nan_to_num(shown.numbers(f"{part}_error"))) for part in ("train", "test")}
    labels = [_label(net, role) for net, role in zip(shown.words("net"), shown.words("role"), strict=True)]
    cut = f", {len(shown)} of {len(nets)} nets" if len(shown) < len(nets) else ""
    panel = Panel(
        f"Loss of each net{cut}",
        linear([end for values, spread in ends.values() for end in (*(values - spread), *(values + spread))]),
        names(labels),
        x_label="nats per token",
        height=22 * len(shown),
        rows=True,
        keys=[Key("windows of the fit", "blue", "dot"), Key("others", "rust", "ring")],
    )
    control = nets.words("role").index("control")
    panel.level(float(nets.numbers("train")[control]), vertical=True)
    places = list(range(len(shown)))
    for part, tone, mark, words in (("train", "blue", "dot", "windows of the fit"), ("test", "rust", "ring", "others")):
        values, spread = ends[part]
        panel.whiskers(places, (values - spread).tolist(), (values + spread).tolist(), tone)
        tips = [f"{label}, {words}: {number(value)}" for label, value in zip(labels, values, strict=True)]
        panel.points(values.tolist(), places, tone, mark, tips)
    return panel.svg("; ".join(f"{label}: {number(value)}" for label, value in zip(labels, ends["train"][0], strict=True)))


def _most_telling(nets: Columns) -> Columns:
    """The model, the controls, YES0, and of the other maps those with the lowest losses."""
    roles, train = nets.words("role"), nets.numbers("train")
    zero = [len(set(targets.split("-"))) == 1 for targets in nets.words("targets")]
    beside = [place for place, role in enumerate(roles) if role in ("model", "control")]
    maps = sorted((place for place in range(len(nets)) if place not in beside), key=lambda place: train[place])
    shown = maps[: MOST_ROWS - len(beside)]
    shown += [place for place in maps if place not in shown and zero[place] and roles[place] == "bound"]
    return nets.pick(np.array([*beside, *shown]))


def _label(net: str, role: str) -> str:
    return f"{net.replace('_', ' ')} (reference)" if role == "reference" else net.replace("_", " ")


def _gaps(results: Results, table: Columns, tolerance: float) -> str:
    at, gap, error = table.whole("block"), table.numbers("gap"), np.nan_to_num(table.numbers("gap_error"))
    y = linear([*(gap - error), *(gap + error)], include=[0.0])
    panel = block_panel(results, "What the direct map loses by each target", y)
    panel.level(0.0)
    panel.whiskers(at, (gap - error).tolist(), (gap + error).tolist(), "blue")
    tips = [
        f"output of block {block}: {fixed(value, 4, sign=True)} nats against {other}"
        for block, value, other in zip(at, gap, table.words("alternative"), strict=True)
    ]
    panel.points(at, gap.tolist(), "blue", "dot", tips)
    return panel.svg("loss of the direct map less the lowest loss of a map that skips the output of each block")


def _skipped(results: Results, table: Columns) -> str:
    at, every, best = table.whole("block"), table.numbers("skipped"), table.numbers("skipped_best")
    keys = [Key("of the best tenth", "blue", "dot"), Key("of all", "rust", "ring")]
    panel = block_panel(results, "Share of maps that skip each block's output", linear([0.0, 1.0], include=[0.0, 1.0]), keys)
    for values, tone, mark, words in ((every, "rust", "ring", "of all maps"), (best, "blue", "dot", "of the best tenth")):
        panel.line(at, values.tolist(), tone)
        tips = [f"output of block {block}: skipped by {percent(v, 0)} {words}" for block, v in zip(at, values, strict=True)]
        panel.points(at, values.tolist(), tone, mark, tips)
    return panel.svg("share of all maps, and of the best tenth, that fit no block to the output of each block")


def _verdict(verdict: Mapping[str, Any], tolerance: float) -> str:
    proved = str(verdict["verdict"])
    if proved == "amber" and "yes0_train" not in verdict:
        proved = "amber, YES0 untried"
    if proved == "none" and "best" in verdict:
        proved = "none, one window"
    text = f"Verdict on the layers, head refitted on both sides: {PROVES[proved]}"
    if verdict["verdict"] == "none":
        return text
    best, words = str(verdict["best"]).replace("_", " "), []
    for key, where in (("gain", "on the windows of the fit"), ("gain_test", "on others")):
        words.append(f"{fixed(verdict[key], 4, sign=True)} ± {fixed(verdict[f'{key}_error'], 4)} nats {where}")
    close = f"differences within {number(tolerance, 2)} standard errors count as none"
    return f"{text} Over the control the best map ({best}) gains {words[0]}, {words[1]}; {close}."


def _shares(verdict: Mapping[str, Any]) -> list[str]:
    """How much of what is gained over the model is the head's doing."""
    if "gain" not in verdict:
        return []
    head = verdict["share_of_head"]
    apart, own = (fixed(value, 4, sign=True) for value in (head + verdict["gain"], head))
    text = f"Of {apart} nats between the model as it is and that map, {own} are the head's alone"
    with_head, other = verdict["verdict_with_head"], verdict["verdict_test"]
    return [f"{text}; with them the light would be {with_head}, on other windows it is {other}."]


def _others(verdict: Mapping[str, Any], nets: Columns, wanted: Mapping[str, Any]) -> list[str]:
    said, rate = [], wanted["continued_learning_rate"] or wanted["learning_rate"]
    steps = dict(zip(nets.words("net"), nets.numbers("head_steps"), strict=True)).get("model, trained on", 0)
    for key, words in (
        ("reference", "The best net of another class than the model's"),
        ("model_trained_on", f"The model, trained on for {steps:.0f} steps at a learning rate of {rate:g},"),
        ("shuffled_targets", "The same map with targets of other windows"),
    ):
        if f"{key}_train" in verdict:
            name = f" ({str(verdict[key]).replace('_', ' ')}, not a bound)" if key in verdict else ""
            train, test = number(verdict[f"{key}_train"]), number(verdict[f"{key}_test"])
            said.append(f"{words}{name} has a loss of {train} on the windows of the fit and {test} on others.")
    return said


def _stones(table: Columns) -> list[str]:
    stones = table.words("stepping_stone")
    tried = sum(stone != "" for stone in stones)
    if not tried:
        return []
    poor = [block for block, stone in zip(table.whole("block"), stones, strict=True) if stone == "poor"]
    if not poor:
        inner = counted(tried, "inner boundary", "inner boundaries")
        rest = f"; {len(stones) - tried} were not tried" if tried < len(stones) else ""
        return [f"None of {inner} that maps skip is a poor stepping stone: skipping it gains nothing{rest}."]
    return [f"Poor stepping stones, better skipped than aimed at: the output of {spelled_blocks(poor)}."]

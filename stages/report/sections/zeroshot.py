"""Accuracy on tasks, variant by variant, and what the compressed model answers otherwise than the dense one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipeline.drawing.axes import linear, names
from pipeline.drawing.chart import Key, Panel
from pipeline.drawing.notation import counted, fixed, listing, number, percent
from stages.report.answers import MEASURES, Score
from stages.report.comparison import digest
from stages.report.sections import Part, Table

LOOKS = {"dense": ("ink", "dot"), "masked": ("blue", "square"), "removed": ("green", "ring"), "compressed": ("rust", "diamond")}
ROW = 60  # pixels a task
TITLES = {"accuracy": "Accuracy", "normalised": "Accuracy, answers normalised by their length"}
TERMS = {"data": "{}", "shots": "{}-shot", "special_tokens": "special tokens: {}", "dtype": "{}", "harness": "{}"}


def zeroshot(scores: Sequence[Score], confidence: float) -> Part:
    """`scores`: at least one."""
    caption = (
        f"Share of examples answered rightly, by lm-eval's definitions of the tasks, with {percent(confidence, 0)} Wilson "
        "intervals. The likeliest answer counts; normalised: the likeliest per character. In the table: ± one standard error; "
        "p: exact McNemar test against the dense model on the same examples, two-sided, not corrected for the number of tests."
    )
    drawn = [one for one in scores if one.variant == "dense" or one.p is not None]
    panels = [_panel(measure, [one for one in drawn if one.measure == measure]) for measure in MEASURES]
    return Part(
        "zeroshot", "Accuracy on tasks", caption, tuple(one for one in panels if one), tuple(_readings(scores)), _table(scores)
    )


def _panel(measure: str, scores: Sequence[Score]) -> str:
    if not scores:
        return ""
    tasks, variants = _order(one.task for one in scores), _order(one.variant for one in scores)
    panel = Panel(
        TITLES[measure],
        linear([end for one in scores for end in (one.low, one.high)], as_percent=True),
        names(tasks),
        x_label="answered rightly, higher is better",
        height=ROW * len(tasks),
        rows=True,
        keys=[Key(name, *LOOKS[name]) for name in variants],
    )
    tips = []
    for one in scores:
        place = tasks.index(one.task) + (variants.index(one.variant) - (len(variants) - 1) / 2) * 0.17
        tips.append(f"{one.task}, {one.variant}: {percent(one.share)} ({percent(one.low)} to {percent(one.high)})")
        panel.whiskers([place], [one.low], [one.high], LOOKS[one.variant][0])
        panel.points([one.share], [place], *LOOKS[one.variant], [tips[-1]])
    return panel.svg("; ".join(tips))


def _table(scores: Sequence[Score]) -> Table:
    """A row per task, measure and contract: numbers of unlike contracts never stand side by side."""
    variants = _order(one.variant for one in scores)
    rows: dict[tuple[str, str, str], dict[str, Score]] = {}
    for one in scores:
        rows.setdefault((one.task, one.measure, digest(one.contract)), {})[one.variant] = one
    lines = []
    for (task, measure, _), found in rows.items():
        count = next(iter(found.values())).examples
        lines.append((f"{task}, {count:,}", measure, *(_cell(found.get(variant)) for variant in variants)))
    return Table(("Task, examples", "% right", *variants), tuple(lines))


def _cell(score: Score | None) -> str:
    if score is None:
        return "–"
    text = f"{fixed(100 * score.share, 1)} ± {fixed(100 * score.error, 1)}"
    return text if score.p is None else f"{text}, p {number(score.p, 1)}"


def _readings(scores: Sequence[Score]) -> list[str]:
    lines = []
    last = [one for one in scores if one.variant == "compressed" and one.measure == "accuracy" and one.p is not None]
    for one in last:
        lines.append(
            f"{one.task}: of {counted(one.examples, 'example')} compressed loses {one.lost} that dense has right and gains "
            f"{one.gained} that it has wrong (p = {number(one.p, 2)})."
        )
    dense = {one.task: one for one in scores if one.variant == "dense"}
    lines += [f"{task}: {_terms(one)}." for task, one in dense.items()]
    apart = _order(
        f"{one.task} of {one.variant}" for one in scores if one.variant != "dense" and one.p is None and one.task in dense
    )
    if apart:
        lines.append(f"Measured under another contract than dense, so not drawn and in rows of their own: {listing(apart)}.")
    return lines


def _terms(score: Score) -> str:
    stated = [form.format(score.contract[key]) for key, form in TERMS.items() if key in score.contract]
    return ", ".join([counted(score.examples, "example"), *stated])


def _order(words: Iterable[str]) -> list[str]:
    """Each once, in order of first appearance."""
    return list(dict.fromkeys(words))

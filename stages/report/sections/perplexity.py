"""Perplexity of every variant, and the loss of each window against the dense model's."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.drawing.axes import fitting, linear, names
from pipeline.drawing.chart import Key, Panel
from pipeline.drawing.notation import between, counted, fixed, listing, number, sentence
from stages.report.comparison import Difference, Variant
from stages.report.sections import Part, with_scale

CAPTION = (
    "Perplexity with its interval; and for each evaluation window the mean loss per token minus the dense model's on the same "
    "window, with the mean of these differences and its interval. Pairing takes out what makes some windows hard for all of them."
)


def perplexity(
    variants: Sequence[Variant], differences: dict[str, Difference], recovery: Difference | None, left_out: Sequence[str]
) -> Part:
    """
    Args:
        variants: those that share the dense model's protocol, dense first.
        differences: variant -> its paired difference from dense, for all of them but dense.
        recovery: compressed minus removed, where blocks were removed and the two can be compared.
        left_out: variants scored under another protocol; they are not drawn.
    """
    readings = [_cost(name, one) for name, one in differences.items()]
    if recovery is not None:
        readings.append(_recovered(recovery, masked=variants[-1].sparsity > 0))
    if left_out:
        readings.append(f"Not drawn, because scored under another protocol: {listing(left_out)}.")
    panels = [_perplexities(variants)]
    if any(one.windows.any() for one in differences.values()):
        panels.append(_windows(differences))
    return Part("perplexity", "What it costs, window by window", CAPTION, tuple(panels), tuple(readings))


def _perplexities(variants: Sequence[Variant]) -> str:
    lows, highs, means = [one.low for one in variants], [one.high for one in variants], [one.perplexity for one in variants]
    x = fitting([*lows, *highs, *means])
    panel = Panel(
        with_scale("Perplexity", x),
        x,
        names([one.name for one in variants]),
        x_label="perplexity, lower is better",
        height=38 * len(variants),
        rows=True,
        notes=[number(mean) for mean in means],
    )
    places = list(range(len(variants)))
    tips = [f"{one.name}: {number(one.perplexity)} ({between(one.low, one.high)})" for one in variants]
    panel.level(means[0], vertical=True)
    panel.whiskers(places, lows, highs, "blue", strong=True)
    panel.points(means, places, "blue", "dot", tips)
    return panel.svg("; ".join(tips))


def _windows(differences: dict[str, Difference]) -> str:
    panel = Panel(
        "Loss of each window minus dense",
        linear([float(value) for one in differences.values() for value in one.windows], include=[0.0]),
        names(list(differences)),
        x_label="nats per token, 0 = dense",
        height=38 * (len(differences) + 1),
        rows=True,
        notes=[fixed(one.mean, sign=True) for one in differences.values()],
        keys=[Key("a window", "blue", "tick"), Key("mean", "rust", "diamond")],
    )
    panel.level(0.0, vertical=True)
    tips = [f"{name}: mean {fixed(one.mean, 4, sign=True)} nats per token" for name, one in differences.items()]
    for place, one in enumerate(differences.values()):
        panel.ticks(place, one.windows.tolist(), "blue")
        if one.low is not None and one.high is not None:
            panel.whiskers([place], [one.low], [one.high], "rust", strong=True)
        panel.points([one.mean], [place], "rust", "diamond", [tips[place]])
    return panel.svg("; ".join(tips))


def _cost(name: str, one: Difference) -> str:
    windows, ties = counted(len(one.windows), "window"), int((one.windows == 0).sum())
    if ties == len(one.windows):
        return sentence(f"{name} has the same loss as dense in every one of {windows}")
    same = f" and the same in {ties}" if ties else ""
    text = f"{name} has a higher loss than dense in {one.worse} of {windows}{same}"
    if one.low is None or one.high is None:
        return sentence(f"{text}; a single window does not say how sure that is")
    if one.low <= 0 <= one.high:
        return sentence(f"{text}; the interval of the mean difference holds zero, so these windows do not tell the two apart")
    how = "higher" if one.mean > 0 else "lower"
    return sentence(f"{text}; on average it is {how} by {fixed(abs(one.mean))} nats per token")


def _recovered(one: Difference, masked: bool) -> str:
    if not one.windows.any():
        return "Compressed and removed lose exactly the same: what compressed adds to the missing blocks changed nothing."
    better, interval = int((one.windows < 0).sum()), f" (interval {between(one.low, one.high, 3)})" if one.low is not None else ""
    lacks = f"lacks the same blocks{', is not masked' if masked else ''} and has nothing in their place"
    return (
        f"Compressed minus removed, which {lacks}: {fixed(one.mean, sign=True)} nats per token{interval}, "
        f"lower in {better} of {counted(len(one.windows), 'window')}."
    )

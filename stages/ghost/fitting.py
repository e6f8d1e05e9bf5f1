"""One operator from rows: sums over the fitting windows, the ridge, and the treatment of sinks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from stages.decoder.operators import Operator, Sinks
from stages.ghost import Ghost
from stages.ghost.rows import Rows
from stages.ghost.sums import Fitted, Sums, add_windows, empty_sums, relative_error

Method = Callable[..., Fitted]  # of sums, relative ridge and a name for errors


@dataclass(frozen=True)
class Apart:
    """Which tokens are sinks, and what is to happen to them when the model runs."""

    found: Bool[Tensor, "window token"]  # by their norm before or behind the gap
    rule: Sinks | None  # none where they are kept or weighted
    kinds: Int[Tensor, "window token"]  # by the rule, -1 for none

    @property
    def tokens(self) -> Bool[Tensor, "window token"]:
        """All that are not like the rest: found, or told by the rule."""
        return self.found | (self.kinds >= 0)

    def told(self, ids: Int[Tensor, "window token"]) -> str:
        """The rule in words, which sinks it does not tell, and how many of the tokens it tells are none."""
        assert self.rule is not None
        untold, wrong = self.found & (self.kinds < 0), ~self.found & (self.kinds >= 0)
        text = f", {int(untold.sum())} that no rule tells"
        if int(untold.sum()):
            found = ids[untold].unique().tolist()
            shown = [f"{one} ({int(untold[ids == one].sum())} of {int((ids == one).sum())} places)" for one in found[:3]]
            text += f": tokens {', '.join(shown)}{', …' if len(found) > 3 else ''}"
        kinds = ["first position"] * self.rule.first + [str(list(self.rule.ids))] * bool(self.rule.ids)
        text += f"; rule: {' '.join(kinds) or 'none'}"
        return text + (f", which also tells {int(wrong.sum())} tokens that are no sinks" if int(wrong.sum()) else "")

    def weights(self, sinks: str, weight: float) -> Float[Tensor, "window token"]:
        """The weight of each token in the fit."""
        if sinks == "keep":
            return torch.ones(self.found.shape, dtype=torch.float64)
        return torch.where(self.tokens, weight if sinks == "weight" else 0.0, 1.0).double()


def fit_operator(
    method: Method,
    rows: Rows,
    apart: Apart,
    split: int,
    wanted: Ghost,
    rotation: Tensor | None,
    width: int,
    device: str,
    what: str,
) -> tuple[Fitted, dict[str, float]]:
    """Fit on the windows below `split`, judge on the others.

    Returns the fit and its `ridge` (relative), `ridge_absolute`, `train_error` and `heldout_error`, and the relative
    `ridge_asked`. The errors are over the tokens that the operator is for: all, or where sinks are bypassed or restored those
    that are none.
    """
    weights = apart.weights(wanted.sinks, wanted.sink_weight)
    train = sums_of(rows, 0, split, weights, width, device, rotation)
    judged = torch.ones_like(weights) if wanted.sinks == "weight" else weights
    held_out = sums_of(rows, split, len(weights), judged, width, device, rotation)
    per_unit = float(train.grams.xx.diagonal().mean())
    if wanted.ridge_rule == "held_out":
        fits = [(method(train, ridge, what), ridge) for ridge in wanted.ridge_grid]
        fitted, asked = min(fits, key=lambda one: relative_error(held_out, one[0].operator))
    else:
        absolute = wanted.ridge_rule == "absolute"
        asked = wanted.ridge / per_unit if absolute and per_unit else wanted.ridge
        fitted = method(train, asked, what)
    figures = {
        "ridge": fitted.ridge,
        "ridge_asked": asked,
        "ridge_absolute": fitted.ridge * per_unit,
        "train_error": relative_error(train, fitted.operator),
        "heldout_error": relative_error(held_out, fitted.operator),
    }
    if apart.rule is not None and len(apart.rule):
        targets = sink_targets(rows, apart, split, width) if apart.rule.action == "restore" else None
        fitted = replace(fitted, operator=replace(fitted.operator, sinks=apart.rule, targets=targets))
    return fitted, figures


def sums_of(
    rows: Rows, first: int, last: int, weights: Float[Tensor, "window token"], width: int, device: str, rotation: Tensor | None
) -> Sums:
    """Sums over the windows [first, last)."""
    sums = empty_sums(width, device, rotation)
    for start, x, d in rows(first, last):
        add_windows(sums, x, d, weights[start : start + len(x)].to(device))
    return sums


def sink_targets(rows: Rows, apart: Apart, split: int, width: int) -> Float[Tensor, "kind channel"]:
    """The mean of the dense target over the sinks of each kind, in the fitting windows (float64).

    Tokens that the rule tells but that were found to be no sinks take no part: their targets are of another size altogether.
    """
    assert apart.rule is not None
    total = torch.zeros(len(apart.rule), width, dtype=torch.float64)
    count = torch.zeros(len(apart.rule), dtype=torch.float64)
    for start, x, d in rows(0, split):
        kinds = apart.kinds[start : start + len(x)]
        here = (kinds >= 0) & apart.found[start : start + len(x)]
        total.index_add_(0, kinds[here], (x + d).double().cpu()[here])
        count.index_add_(0, kinds[here], torch.ones(int(here.sum()), dtype=torch.float64))
    return total / count[:, None]  # the rule is made from these windows: none is without a sink


def identity(sums: Sums, ridge: float, what: str) -> Fitted:
    """No operator: what `method: none` stands for where sinks are restored all the same."""
    return Fitted(Operator(), 0.0, sums.grams.xx)


def with_options(method: Method, wanted: Ghost, width: int) -> Method:
    """The method with what it needs beyond sums and ridge."""
    return partial(method, rank=wanted.rank or -(-width // 3)) if wanted.method == "ghost_lowrank" else method

"""A study's cells side by side: spread over seeds, and paired differences from the baseline."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from scipy import stats

from pipeline.study.cells import Outcome
from pipeline.study.plan import Settings, Study

RESAMPLES = 2000
CONFIDENCE = 0.95
SAME = 1e-9  # differences over seeds that vary by less, relative to themselves, are rounding


@dataclass(frozen=True)
class Comparison:
    """One setting over all its seeds. Differences, cell minus baseline, are of losses in nats per token; where the result has
    no windows, of the first measure."""

    varied: Settings
    n: int  # seeds that ran
    values: Mapping[str, float]  # mean of each measure over seeds; empty if none ran
    deviation: float | None = None  # sample standard deviation of the first over seeds; None for one seed
    low: float | None = None  # the only seed's own interval, if it has one; None for more seeds
    high: float | None = None
    difference: float | None = None  # mean over scored tokens (and seeds)
    difference_low: float | None = None  # bootstrap over windows; None without windows
    difference_high: float | None = None
    windows_worse: float | None = None  # share of windows with a higher loss
    t_test: float | None = None  # two-sided p over seeds, Holm-corrected over the study
    wilcoxon: float | None = None
    effect: float | None = None  # mean difference over its deviation, over seeds
    note: str = ""
    contract: str = ""  # a word that is equal for equal contracts; empty where nothing was measured or no contract is stated
    shown: Mapping[str, str] = field(default_factory=dict)  # as text; where seeds differ, that of each


def compare(study: Study, outcomes: Sequence[Outcome], seed: int = 0) -> list[Comparison]:
    """One Comparison per setting, in the study's order."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(_key(outcome.cell.varied), []).append(outcome)
    made = []
    for group in groups.values():
        base = study.baseline_of(group[0].cell)
        made.append(_compare(study.plan.measures, group, groups.get(_key(base), []) if base is not None else [], seed))
    return _holm(made)


def by_contract(compared: Sequence[Comparison]) -> list[list[Comparison]]:
    """In groups of equal contract, in order of first appearance: only within a group may numbers stand in one column.

    What has no numbers stays with the first.
    """
    groups: dict[str, list[Comparison]] = {one.contract: [] for one in compared if one.values} or {"": []}
    for one in compared:
        groups[one.contract if one.values else next(iter(groups))].append(one)
    return list(groups.values())


def word(result: Mapping[str, Any] | None) -> str:
    """The word of a result's contract; empty where it states none."""
    contract = (result or {}).get("contract")
    return hashlib.sha256(_key(contract).encode()).hexdigest()[:8] if contract else ""


def smallest_wilcoxon(n: int) -> float:
    """The least two-sided p that n pairs can give: 2 / 2ⁿ."""
    return 2.0 ** (1 - n)


def _compare(measures: Sequence[str], group: list[Outcome], base: list[Outcome], seed: int) -> Comparison:
    ran = [one for one in group if one.result is not None]
    notes = []
    if len(ran) < len(group):
        notes.append(f"{len(group) - len(ran)} of {len(group)} failed: {next(one.error for one in group if one.error)}")
    if not ran:
        return Comparison(group[0].cell.varied, 0, {}, note=notes[0])
    contracts = {_key(one.result.get("contract", {})) for one in ran if one.result}
    if len(contracts) > 1:
        return Comparison(
            group[0].cell.varied, len(ran), {}, note="; ".join([*notes, "its seeds were not measured alike: no mean"])
        )
    values = {key: [float(one.result[key]) for one in ran if one.result] for key in measures}
    low, high = ran[0].result.get("interval", (None, None)) if len(ran) == 1 and ran[0].result else (None, None)
    deviation = float(np.std(values[measures[0]], ddof=1)) if len(ran) > 1 else None
    means = {key: float(np.mean(some)) for key, some in values.items()}
    shown = {key: _shown([one.shown.get(key) for one in ran]) for key in ran[0].shown}
    head = Comparison(group[0].cell.varied, len(ran), means, deviation, low, high, shown=shown, contract=word(ran[0].result))
    partners = {one.cell.seed: one for one in base if one.result is not None}
    pairs = [(one.result, partners[one.cell.seed].result) for one in ran if one.cell.seed in partners]
    alike = [(a, b) for a, b in pairs if a and b and a.get("contract") == b.get("contract")]
    if base and len(alike) < len(ran):
        notes.append(f"{len(ran) - len(alike)} without a baseline measured alike")
    if not alike:
        return replace(head, note="; ".join(notes))
    if not isinstance(alike[0][0].get("windows"), list):
        by_seed = np.array([a[measures[0]] - b[measures[0]] for a, b in alike])
        return _tested(replace(head, difference=float(by_seed.mean())), by_seed, notes)
    table = np.array([np.subtract(a["windows"], b["windows"]) for a, b in alike])  # [seed, window], nats
    scored = np.asarray(alike[0][0].get("scored", np.ones(table.shape[1])), dtype=np.float64)  # tokens of each window
    by_window, by_seed = table.mean(0), table @ scored / scored.sum()
    drawn = np.random.default_rng(seed).integers(0, len(by_window), (RESAMPLES, len(by_window)))
    means = (by_window * scored)[drawn].sum(1) / scored[drawn].sum(1)
    spread = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    apart = replace(
        head,
        difference=float(by_seed.mean()),
        difference_low=float(spread[0]),
        difference_high=float(spread[1]),
        windows_worse=float((by_window > 0).mean()),
    )
    return _tested(apart, by_seed, notes)


def _tested(one: Comparison, by_seed: np.ndarray, notes: list[str]) -> Comparison:
    """`one` with its tests, and with what there is to note."""
    tests = _tests(by_seed)
    same = ["its seeds gave the same result: no test"] if len(by_seed) > 1 and tests["effect"] is None else []
    return replace(one, note="; ".join([*notes, *same]), **tests)


def _shown(values: Sequence[Any]) -> str:
    texts = [_text(value) for value in values]
    return " / ".join(texts if len(set(texts)) > 1 else texts[:1])


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:.4f}"
    return "" if value is None else str(value)


def _tests(differences: np.ndarray) -> dict[str, Any]:
    """Paired tests over seeds; None where there are too few seeds or no differences at all."""
    n, deviation = len(differences), float(np.std(differences, ddof=1)) if len(differences) > 1 else 0.0
    if n < 2 or deviation <= SAME * np.abs(differences).max():
        return {"t_test": None, "wilcoxon": None, "effect": None}
    return {
        "t_test": _p(stats.ttest_1samp(differences, 0.0)),
        "wilcoxon": _p(stats.wilcoxon(differences)),
        "effect": float(differences.mean()) / deviation,
    }


def _p(test: Any) -> float:
    return float(test.pvalue)


def _holm(made: list[Comparison]) -> list[Comparison]:
    """The p-values of each test, corrected for the number of settings that were tested (Holm 1979)."""
    for test in ("t_test", "wilcoxon"):
        order = sorted((getattr(one, test), index) for index, one in enumerate(made) if getattr(one, test) is not None)
        largest = 0.0
        for rank, (p, index) in enumerate(order):
            largest = max(largest, min(1.0, p * (len(order) - rank)))
            made[index] = replace(made[index], **{test: largest})
    return made


def _key(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, default=str)

"""allocation.csv: what each block gives up, from what the statistics say of it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pandas as pd
import pytest
from safetensors.torch import load_file, save_file

from pipeline.errors import PalimpsestError
from tests.kernels.test_spectra import eigenvalues_of, exponent, peak_by_scan
from tests.plain import blocks_of, matrix_of, read_masks
from tests.stages.conftest import Finished
from tests.stages.test_importance import plain_scores

TARGET = 0.4


def test_uniform_is_the_target_everywhere(copied: Finished) -> None:
    project = copied("llama")
    table = pd.read_csv(project.run("allocation", allocation={"method": "uniform", "sparsity": TARGET}))
    assert list(table.columns) == ["block", "matrix", "parameters", "score", "sparsity"]
    assert table.matrix.isna().all() and (table.sparsity == TARGET).all() and (table.score == 0).all()
    inside = [sum(p.numel() for p in block.parameters() if p.ndim == 2) for block in project.model.model.layers]
    assert table.parameters.tolist() == inside


@pytest.mark.parametrize("source", ["block_input", "block_output", "linear_inputs"])
@pytest.mark.parametrize("normalisation", ["zscore", "minmax", "rank"])
def test_pals_meets_the_budget_and_spares_what_scores_high(source: str, normalisation: str, copied: Finished) -> None:
    project = copied("gpt2")
    pals = {"source": source, "percentile": 90.0, "normalisation": normalisation, "bound": 0.1, "slope": 0.1}
    table = pd.read_csv(project.run("allocation", allocation={"method": "pals", "sparsity": TARGET, "pals": pals}))
    assert np.average(table.sparsity, weights=table.parameters) == pytest.approx(TARGET, abs=1e-12)
    assert (abs(table.sparsity - TARGET) <= 0.1 + 1e-12).all() and table.sparsity.std() > 0.01
    assert (np.diff(table.sort_values("score").sparsity) <= 1e-12).all()
    statistics = pd.read_csv(project.data / "statistics.csv")
    place = "linears" if source == "linear_inputs" else source.removeprefix("block_")
    assert table.score.tolist() == statistics[statistics.place == place].p90.tolist()


def ratios_as_published(scores: list[np.ndarray], method: str, target: float) -> np.ndarray:
    """OWL's and DLP's sparsities from each layer's scores, step by step as their code goes."""
    if method == "owl":
        each = np.array([100 * (one > 5 * one.mean()).mean() for one in scores])
    else:
        reduced = np.array([one.mean() if method == "mean" else np.sort(one)[-(-one.size // 2) - 1] for one in scores])
        each = 1 - reduced / reduced.sum()
    keep = (each - each.min()) / (each.max() - each.min()) * 2 * (0.08 if method == "owl" else 0.15)
    keep = keep - keep.mean() + (1 - target)
    return np.where(1 - keep <= 0, 0.01, 1 - keep)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
def test_ratios_are_those_of_the_published_formulas_on_the_model_run_in_full(family: str, copied: Finished) -> None:
    project = copied(family)
    each = [plain_scores(project, block) for block in range(4)]
    pooled = [np.concatenate([one.reshape(-1) for one in block.values()]) for block in each]
    order = pd.read_csv(project.data / "importance.csv").dropna(subset="matrix")
    linear = [each[block][name].reshape(-1) for block, name in zip(order.block, order.matrix, strict=True)]
    rules: dict[str, dict[str, Any]] = {
        "owl": {"method": "owl"},
        "mean": {"method": "dlp", "dlp": {"reducer": "mean"}},
        "median": {"method": "dlp", "dlp": {"reducer": "median"}},
    }
    for name, rule in rules.items():
        for granularity, scores in (("block", pooled), ("linear", linear)):
            wanted = {**rule, "sparsity": 0.7, "granularity": granularity, "projection": "faithful"}
            table = pd.read_csv(project.run("allocation", allocation=wanted))
            np.testing.assert_allclose(table.sparsity, ratios_as_published(scores, name, 0.7), rtol=0, atol=1e-6)
        exact = pd.read_csv(project.run("allocation", allocation={**rule, "granularity": "block", "projection": "projected"}))
        np.testing.assert_allclose(
            exact.sparsity, ratios_as_published(pooled, name, 0.7), rtol=0, atol=1e-6
        )  # blocks of one size


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
@pytest.mark.parametrize(("fit", "window"), [("peak", "faithful"), ("peak", "corrected"), ("mid", "faithful")])
def test_alphaprunings_ratios_are_those_of_the_published_formulas(family: str, fit: str, window: str, copied: Finished) -> None:
    project = copied(family)
    fitted = {
        "peak": lambda values: peak_by_scan(values, window == "corrected"),
        "mid": lambda values: exponent(values, len(values) // 2),
    }[fit]
    names = [name for block, name in read_masks(project.data / "masks.safetensors", project.model) if block == 0]
    weights = [[matrix_of(block, name) for name in names] for block in blocks_of(project.model)]
    alphas = [[fitted(eigenvalues_of(weight)) for weight in block] for block in weights]
    sizes = np.array([[weight.numel() for weight in block] for block in weights], dtype=float)
    layers = {
        "block": (np.array([np.mean(block) for block in alphas]), sizes.sum(1)),
        "linear": (np.array(alphas).reshape(-1), sizes.reshape(-1)),
    }
    for granularity, (alpha, size) in layers.items():
        factor = (alpha - alpha.min()) / (alpha.max() - alpha.min()) * 0.6 + 0.7
        expected = factor * 0.5 * size.sum() / (size * factor).sum()
        rule = {"method": "alphapruning", "alphapruning": {"fit": fit, "window": window}, "sparsity": 0.5}
        table = pd.read_csv(project.run("allocation", allocation={**rule, "granularity": granularity}))
        by_name = [f"{block}.{name}" for block in range(4) for name in names] if granularity == "linear" else range(4)
        found = table.block.astype(str) + "." + table.matrix if granularity == "linear" else table.block
        values = pd.Series(table.sparsity.to_numpy(), index=found).reindex(by_name)
        np.testing.assert_allclose(values, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", ["uniform", "pals", "owl", "dlp", "alphapruning", "gradient", "random", "measured"])
def test_a_sparsity_for_every_matrix_meets_the_target_and_reaches_the_masks(method: str, copied: Finished) -> None:
    project = copied("mixtral")
    wanted = {"method": method, "sparsity": 0.4, "granularity": "linear", "pals": {"source": "linear_inputs"}}
    table = pd.read_csv(project.run("allocation", allocation=wanted))
    masks = read_masks(project.data / "masks.safetensors", project.model)
    assert len(table) == len(masks) and set(zip(table.block, table.matrix, strict=True)) == set(masks)
    assert table.parameters.tolist() == [masks[key].numel() for key in zip(table.block, table.matrix, strict=True)]
    assert np.average(table.sparsity, weights=table.parameters) == pytest.approx(0.4, abs=1e-12)
    project.run("masking", masking={"method": "magnitude"})
    shares = table.set_index(["block", "matrix"]).sparsity
    for key, keep in read_masks(project.data / "masks.safetensors", project.model).items():
        gone = keep.numel() - int(keep.sum())
        assert abs(gone - shares[key] * keep.numel()) <= len(keep), key


def test_clipping_alone_says_what_it_really_gives(copied: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    project = copied("llama")
    wanted = {"method": "pals", "sparsity": TARGET, "projection": "faithful", "pals": {"slope": 0.2}}
    table = pd.read_csv(project.run("allocation", allocation=wanted))
    realised = np.average(table.sparsity, weights=table.parameters)
    assert (
        abs(realised - TARGET) > 1e-4
        and f"{realised:.6f} over all, target {TARGET}, {realised - TARGET:+.6f} off" in capsys.readouterr().out
    )


def test_an_expert_that_is_never_routed_to_has_no_gradient_rather_than_none_of_it(
    copied: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    """A router that always chooses the same two: the others get the mean of the shares of all that have a gradient."""
    project = copied("qwen3_moe")
    path = project.data / "model" / "model.safetensors"
    state = load_file(path)
    for name in [name for name in state if name.endswith("mlp.gate.weight")]:
        state[name].zero_()
    save_file(state, path, metadata={"format": "pt"})
    project.run("capture")
    project.run("statistics", statistics={"gradient_windows": 2, "spectra": False})
    table = pd.read_csv(project.data / "importance.csv").dropna(subset="matrix")
    places = pd.read_csv(project.data / "statistics.csv").set_index(["block", "place"]).tokens
    keys = pd.MultiIndex.from_arrays([table["block"], table["matrix"]])
    unseen = places.reindex(keys).to_numpy() == 0
    assert table[unseen].gradient.isna().all() and (table[~unseen].gradient > 0).all() and unseen.sum() == 16
    wanted = {"method": "gradient", "granularity": "linear", "gradient": {"bound": 0.4, "slope": 0.1, "normalisation": "minmax"}}
    shares = pd.read_csv(project.run("allocation", allocation=wanted)).sparsity.to_numpy()
    assert (
        f"16 of {len(table)} layers have no score (none of the windows that gradients were taken over reached them)"
        in capsys.readouterr().out
    )
    np.testing.assert_allclose(shares[unseen], shares[~unseen].mean(), atol=1e-12)


def test_blocks_measured_at_another_sparsity_are_said_to_be(copied: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    project = copied("llama")
    assert (pd.read_csv(project.data / "sensitivity.csv").sparsity == 0.5).all()
    for sparsity, said in ((0.5, False), (0.6, True)):
        capsys.readouterr()
        project.run("allocation", allocation={"method": "measured", "sparsity": sparsity})
        note = "measured at sensitivity.sparsity = 0.5, used for allocation.sparsity = 0.6"
        assert (note in capsys.readouterr().out) == said


def test_a_percentile_that_was_not_measured_names_the_key(copied: Finished) -> None:
    with pytest.raises(
        PalimpsestError, match=r"allocation\.pals\.percentile = 42.*statistics\.percentiles has 50, 90, 99, 99\.9"
    ):
        copied("llama").run("allocation", allocation={"method": "pals", "pals": {"percentile": 42.0}})


def test_the_masks_follow_the_allocation(copied: Finished) -> None:
    project = copied("llama")
    project.run("allocation", allocation={"method": "pals", "sparsity": 0.5, "pals": {"bound": 0.3, "slope": 0.3}})
    project.run("masking")
    project.run("evaluation@masked")
    masks = read_masks(project.data / "masks.safetensors", project.model)
    shares = pd.read_csv(project.data / "allocation.csv").sparsity
    for (block, _), keep in masks.items():
        assert int((~keep).sum()) == round(keep.numel() * shares[block])
    zeros = sum(int((~keep).sum()) for keep in masks.values())
    result = json.loads((project.data / "evaluation" / "masked.json").read_text())
    assert result["zeros"] == zeros and result["sparsity"] == zeros / result["prunable"]

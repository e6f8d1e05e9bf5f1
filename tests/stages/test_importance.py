"""importance.csv: scores, outliers, spectra and gradients, against the plain model of `transformers` run in full."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from pipeline.errors import PalimpsestError
from tests.kernels.test_spectra import eigenvalues_of, exponent, peak_by_scan
from tests.plain import blocks_of, matrix_inputs, matrix_of, read_masks
from tests.project import Project
from tests.stages.conftest import Finished, copy_project

FAMILIES = ["llama", "gpt2", "mistral_sliding", "qwen3_moe"]


def table_of(project: Project) -> pd.DataFrame:
    table = pd.read_csv(project.data / "importance.csv")
    return table.assign(matrix=table.matrix.fillna("")).set_index(["block", "matrix"])


def plain_scores(project: Project, block: int) -> dict[str, np.ndarray]:
    """|W| · sqrt(mean over windows of Σ_t x²) of every matrix, by hooks on the whole model, float64."""
    ids = load_file(project.data / "tokens.safetensors")["calibration"]
    names = [name for index, name in read_masks(project.data / "masks.safetensors", project.model) if index == block]
    inputs = matrix_inputs(project.model, block, ids, names)
    weights = {name: matrix_of(blocks_of(project.model)[block], name).double() for name in inputs}
    return {name: (weights[name].abs() * (x.double().square().sum(0) / len(ids)).sqrt()).numpy() for name, x in inputs.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_the_model_run_in_full(family: str, finished: Finished) -> None:
    project = finished(family)
    table = table_of(project)
    for block in range(4):
        each = plain_scores(project, block)
        pooled = np.concatenate([one.reshape(-1) for one in each.values()])
        for name, scores in {"": pooled, **each}.items():
            found: Any = table.loc[(block, name)]
            assert found.parameters == scores.size
            assert found.score_mean == pytest.approx(scores.mean(), rel=2e-6)
            assert found.score_median == pytest.approx(np.sort(scores, axis=None)[-(-scores.size // 2) - 1], rel=2e-6)
            for multiple in (3, 5, 7, 10):
                expected = (scores > multiple * scores.mean()).mean()
                assert found[f"score_outliers_{multiple}"] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
def test_tail_exponents_are_those_of_each_matrix_and_their_mean(family: str, finished: Finished) -> None:
    project = finished(family)
    table, block = table_of(project), 1
    each = {name: eigenvalues_of(matrix_of(blocks_of(project.model)[block], name)) for name in table.loc[block].index if name}
    fits = {
        "alpha_mid": lambda values: exponent(values, len(values) // 2),
        "alpha_peak": peak_by_scan,
        "alpha_peak_corrected": lambda values: peak_by_scan(values, corrected=True),
    }
    for column, fit in fits.items():
        expected = {name: fit(values) for name, values in each.items()}
        for name, alpha in {"": np.mean(list(expected.values())), **expected}.items():
            assert table.loc[(block, name), column] == pytest.approx(alpha, rel=1e-6), (name, column)


def plain_gradients(project: Project, windows: int) -> Any:
    """The model after a backward pass through all of it at once."""
    ids = load_file(project.data / "tokens.safetensors")["calibration"][:windows].long()
    model = project.model
    model.requires_grad_(True)
    model.zero_grad()
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    return model


class _Gradients:
    """`matrix_of` asked for gradients instead of weights."""

    def __init__(self, block: nn.Module):
        self.block = block

    def of(self, name: str) -> torch.Tensor:
        weights = {parameter: parameter.data for parameter in self.block.parameters()}
        try:
            for parameter in weights:
                parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            return matrix_of(self.block, name).clone()
        finally:
            for parameter, data in weights.items():
                parameter.data = data


@pytest.mark.parametrize("family", [*FAMILIES, "gemma2", "falcon"])
def test_gradients_are_autograds_on_the_whole_model(family: str, finished: Finished, tmp_path: Any) -> None:
    project = finished(family)
    table, model = table_of(project), plain_gradients(project, 4)
    for block in range(4):
        inner, sums, size = blocks_of(model)[block], np.zeros(2), 0
        gradients = _Gradients(inner)
        for name in [name for name in table.loc[block].index if name]:
            gradient, weight = gradients.of(name).double(), matrix_of(inner, name).double()
            both = np.array([float(gradient.abs().sum()), float((gradient * weight).abs().sum())])
            found = table.loc[(block, name), ["gradient", "weighted_gradient"]].to_numpy(dtype=float)
            np.testing.assert_allclose(found, both / gradient.numel(), rtol=1e-5)
            sums, size = sums + both, size + gradient.numel()
        found = table.loc[(block, ""), ["gradient", "weighted_gradient"]].to_numpy(dtype=float)
        np.testing.assert_allclose(found, sums / size, rtol=1e-5)
    model.requires_grad_(False)
    model.zero_grad()


def test_gradients_of_fewer_windows_and_of_none(copied: Finished) -> None:
    project = copied("llama")
    before = table_of(project)
    project.run("statistics", statistics={"gradient_windows": 2, "spectra": False})
    after = table_of(project)
    assert (after.gradient != before.gradient).all() and after.alpha_mid.isna().all()
    model = plain_gradients(project, 2)
    expected = float(_Gradients(blocks_of(model)[2]).of("mlp.up_proj").abs().mean())
    model.requires_grad_(False)
    model.zero_grad()
    assert after.loc[(2, "mlp.up_proj"), "gradient"] == pytest.approx(expected, rel=1e-5)
    project.run("statistics", statistics={"gradient_windows": 0})
    assert table_of(project).gradient.isna().all()


@pytest.mark.parametrize(("family", "part"), [("qwen3_moe", "experts.1.up_proj.weight"), ("llama", "up_proj.weight")])
def test_a_weight_that_is_no_number_is_named_at_once(family: str, part: str, finished: Finished, tmp_path: Any) -> None:
    project = copy_project(finished(family), tmp_path / "broken")
    file = project.data / "model" / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in sorted(weights) if f"layers.2.mlp.{part}" in name)
    weights[name][0, 1] = float("nan")
    save_file(weights, file, {"format": "pt"})
    named = r"block 2, weights of mlp\.experts\.gate_up_proj\.1" if "experts" in part else r"block 2, weights of mlp\.up_proj"
    project.params["statistics"] = {"gradient_windows": 0}
    with pytest.raises(PalimpsestError, match=named):
        project.run("statistics")


def test_tokens_of_another_run_than_the_tapes_are_refused(copied: Finished) -> None:
    project = copied("llama")
    ids = load_file(project.data / "tokens.safetensors")
    save_file(
        {"calibration": ids["calibration"][:, :8].contiguous(), "evaluation": ids["evaluation"]},
        project.data / "tokens.safetensors",
    )
    with pytest.raises(PalimpsestError, match=r"6 calibration windows of 8 tokens, but the tape has 6 of 16"):
        project.run("statistics")

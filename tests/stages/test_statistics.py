"""Statistics are what hooks on the plain model see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from pipeline.errors import PalimpsestError
from stages.statistics import run as stage
from tests.models import FAMILIES, _config
from tests.plain import matrix_inputs, plain_boundaries, read_masks
from tests.project import Project
from tests.stages.conftest import Finished

PERCENTILES = [50.0, 90.0, 99.0, 99.9]
COLUMNS = [
    "block",
    "place",
    "tokens",
    "width",
    "parameters",
    "p50",
    "p90",
    "p99",
    "p99.9",
    "mean",
    "norm",
    "max",
    "outlier_ratio",
]


def expected_row(x: torch.Tensor) -> dict[str, float]:
    """By numpy, from all activations [token, channel] at once."""
    values = np.sort(x.double().abs().reshape(-1).numpy())
    row = {f"p{q:g}": float(np.quantile(values, q / 100, method="inverted_cdf")) for q in PERCENTILES}
    return row | {
        "tokens": len(x), "width": x.shape[1], "mean": float(values.mean()), "norm": float(np.sqrt((values**2).mean())),
        "max": float(values[-1]), "outlier_ratio": float((values > 5 * values.mean()).mean()),
    }  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "qwen3_moe", "falcon", "opt"])
def test_every_place_is_what_hooks_see(family: str, finished: Finished) -> None:
    project = finished(family)
    ids = load_file(project.data / "tokens.safetensors")["calibration"]
    table = pd.read_csv(project.data / "statistics.csv")
    assert list(table.columns) == COLUMNS
    assert (table.place == "linears").sum() == 4
    table = table.loc[table.place != "linears"]
    tensors = load_file(project.data / "statistics.safetensors")
    names = [name for block, name in read_masks(project.data / "masks.safetensors", project.model) if block == 0]
    boundaries = plain_boundaries(project.model, ids)
    checked = 0
    for block in range(4):
        inputs = matrix_inputs(project.model, block, ids, names)
        inputs |= {"input": boundaries[block].flatten(0, 1), "output": boundaries[block + 1].flatten(0, 1)}
        rows = table[table.block == block].set_index("place")
        assert set(rows.index) == {*names, "input", "output"}
        for place, x in inputs.items():
            found: Any = rows.loc[place].to_dict()
            for key, value in expected_row(x).items():
                assert found[key] == pytest.approx(value, rel=2e-5, abs=1e-7), (block, place, key)
            squares = tensors[f"blocks.{block}.{place}.squares"]
            np.testing.assert_allclose(squares.numpy(), x.double().square().sum(0).numpy(), rtol=2e-5)
            assert tensors[f"blocks.{block}.{place}.tokens"].tolist() == [len(x)]
            checked += 1
    assert checked == len(table)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("batch_tokens", [1, 32, 10**6])
def test_inputs_too_many_to_keep_are_computed_again(
    family: str, batch_tokens: int, copied: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = copied(family)
    files = [project.data / "statistics.csv", project.data / "statistics.safetensors"]
    project.run("statistics", compute={"batch_tokens": batch_tokens})
    kept = [file.read_bytes() for file in files]
    monkeypatch.setattr(stage, "KEEP_BYTES", 0)
    project.run("statistics")
    assert [file.read_bytes() for file in files] == kept


@pytest.mark.parametrize("family", ["llama", "falcon", "mixtral"])
def test_the_inputs_of_all_matrices_are_pooled(family: str, finished: Finished) -> None:
    """As often as matrices are fed them: query, key and value count thrice."""
    project = finished(family)
    ids = load_file(project.data / "tokens.safetensors")["calibration"]
    table = pd.read_csv(project.data / "statistics.csv")
    names = [name for block, name in read_masks(project.data / "masks.safetensors", project.model) if block == 2]
    inputs = matrix_inputs(project.model, 2, ids, names)
    found: Any = table[(table.block == 2) & (table.place == "linears")].iloc[0].to_dict()
    expected = expected_row(torch.cat([x.reshape(-1, 1) for x in inputs.values()]))
    for key in ("p50", "p90", "p99", "p99.9", "mean", "norm", "max", "outlier_ratio"):
        assert found[key] == pytest.approx(expected[key], rel=2e-5, abs=1e-7), key
    assert found["tokens"] == ids.numel() and found["parameters"] == 0


def test_each_windows_own_percentiles(copied: Finished) -> None:
    """By numpy, window by window, averaged; experts see picked tokens and have none."""
    project = copied("qwen3_moe")
    project.run("statistics", statistics={"per_sequence": True, "percentiles": [50.0, 99.0], "gradient_windows": 0})
    ids = load_file(project.data / "tokens.safetensors")["calibration"]
    table = pd.read_csv(project.data / "statistics.csv").set_index(["block", "place"])
    q_input = matrix_inputs(project.model, 1, ids, ["self_attn.q_proj"])["self_attn.q_proj"].view(len(ids), -1)
    for place, x in {"input": plain_boundaries(project.model, ids)[1].flatten(1), "self_attn.q_proj": q_input}.items():
        for q in (50, 99):
            own = np.quantile(x.double().abs().numpy(), q / 100, axis=1, method="inverted_cdf")
            assert table.loc[(1, place), f"p{q}_per_sequence"] == pytest.approx(own.mean(), rel=2e-5)
    experts = table.loc[["experts" in place for _, place in table.index], "p50_per_sequence"]
    assert len(experts) and np.isnan(experts).all()


def test_the_size_of_batches_changes_nothing_but_rounding(copied: Finished) -> None:
    project = copied("gpt2")
    before = pd.read_csv(project.data / "statistics.csv")
    project.run("statistics", compute={"batch_tokens": 80})
    after = pd.read_csv(project.data / "statistics.csv")
    pd.testing.assert_frame_equal(after, before, rtol=1e-5)
    weighed = pd.read_csv(project.data / "importance.csv")
    project.run("statistics", compute={"batch_tokens": 16})
    pd.testing.assert_frame_equal(pd.read_csv(project.data / "importance.csv"), weighed, rtol=1e-5)


def test_percentiles_and_outliers_asked_for(copied: Finished) -> None:
    project = copied("llama")
    project.run("statistics", statistics={"percentiles": [10.0, 99.99, 100.0], "outlier": 2.0})
    table = pd.read_csv(project.data / "statistics.csv")
    assert [name for name in table if name[0] == "p" and name[1].isdigit()] == ["p10", "p99.99", "p100"]
    assert (table.p100 == table["max"]).all()
    x = load_file(project.data / "tape.safetensors")["boundary.0000"].double().abs()
    found = table[(table.block == 0) & (table.place == "input")].outlier_ratio.item()
    assert found == pytest.approx(float((x > 2 * x.mean()).double().mean()))


@pytest.fixture
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """Four tokens for 24 experts, two each: most see none."""
    config = _config(
        "Qwen3MoeConfig", num_key_value_heads=2, head_dim=8, num_experts=24, num_experts_per_tok=2, moe_intermediate_size=8
    )
    monkeypatch.setitem(FAMILIES, "cold", config)
    return Project(tmp_path, "cold", blocks=1, windows=2, length=2)


@pytest.mark.parametrize("activations", ["tape", "pruned"])
def test_experts_that_see_no_token_are_left_empty_and_masked_by_magnitude(
    activations: str, cold: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    cold.run_until("masking", masking={"activations": activations})
    table = pd.read_csv(cold.data / "statistics.csv")
    unseen = table[table.tokens == 0]
    weighed = pd.read_csv(cold.data / "importance.csv")
    assert weighed[weighed.matrix.isin(set(unseen.place))].score_mean.isna().all() and weighed.alpha_peak.notna().all()
    assert weighed[weighed.matrix.isin(set(unseen.place))].gradient.isna().all()
    assert len(unseen) >= 2 * (24 - 8) and unseen.place.str.contains("experts").all()
    assert np.isnan(np.asarray(unseen[["p50", "p99", "mean", "max"]])).all() and (np.asarray(unseen.parameters) > 0).all()
    masks = read_masks(cold.data / "masks.safetensors", cold.model)
    block, name = int(unseen.block.iloc[0]), unseen.place.iloc[0]
    weight = cold.model.model.layers[block].get_parameter(name.rpartition(".")[0])[int(name.rpartition(".")[2])]
    lowest = weight.abs().argsort(dim=1)[:, : weight.shape[1] // 2]
    assert not masks[block, name].gather(1, lowest).any()
    assert "were masked by magnitude" in capsys.readouterr().out


def test_experts_multiplied_all_at_once_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama 4 multiplies a batch of all experts in one product, and nothing here could say which saw what."""
    config = _config(
        "Llama4TextConfig",
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=1,
        intermediate_size_mlp=48,
    )
    monkeypatch.setitem(FAMILIES, "llama4", config)
    project = Project(tmp_path, "llama4", blocks=2)
    project.run("capture")
    with pytest.raises(PalimpsestError, match=r"experts\.\w+: experts that are not multiplied one by one"):
        project.run("statistics")

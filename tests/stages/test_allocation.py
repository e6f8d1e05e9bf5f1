"""allocation.csv: what each block gives up, from what the statistics say of it."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from pipeline.errors import PalimpsestError
from tests.plain import read_masks
from tests.stages.conftest import Finished

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
    if source != "linear_inputs":
        rows = statistics[statistics.place == source.removeprefix("block_")]
    else:
        rows = statistics[statistics.parameters > 0]
    expected = [float(np.average(one.p90, weights=one.width)) for _, one in rows.groupby("block")]
    np.testing.assert_allclose(table.score, expected, rtol=1e-12)


def test_clipping_alone_says_what_it_really_gives(copied: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    project = copied("llama")
    pals = {"projection": "none", "slope": 0.2}
    table = pd.read_csv(project.run("allocation", allocation={"method": "pals", "sparsity": TARGET, "pals": pals}))
    realised = np.average(table.sparsity, weights=table.parameters)
    assert abs(realised - TARGET) > 1e-4 and f"{realised:.6f} over all, target {TARGET}" in capsys.readouterr().out


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

"""Linear references of every block, against lstsq on the tape."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from pipeline.tensors import TensorFile, write_tensors
from tests.plain import relative_gap
from tests.project import Project
from tests.stages.conftest import Finished
from tests.stages.test_ghost import oracle, rows_of

COLUMNS = ["block", "target", "train_error", "heldout_error", "own_error", "ridge"]


def peel(project: Project, **peeling: Any) -> pd.DataFrame:
    project.run("peeling", peeling=peeling)
    return pd.read_csv(project.data / "peeling.csv")


@pytest.mark.parametrize("family", ["llama", "neox"])
def test_every_block_and_target_is_the_least_squares_fit(family: str, copied: Finished) -> None:
    project = copied(family)
    table = peel(project, reach=[1, 3], ridge=1e-2, held_out=0.34, keep=True)
    assert list(table.columns) == COLUMNS
    assert list(zip(table.block, table.target, strict=True)) == [(0, 1), (0, 3), (1, 2), (1, 4), (2, 3), (3, 4)]
    stored = load_file(project.data / "peeling.safetensors")
    for _, row in table.iterrows():
        block, target = int(row.block), int(row.target)
        m = oracle(rows_of(project, block, 0, 4), rows_of(project, target, 0, 4), 1e-2)
        assert relative_gap(stored[f"maps.{block}.{target}"].double(), m) < 1e-4
        for found, first, last in ((row.train_error, 0, 4), (row.heldout_error, 4, 6)):
            x, y = rows_of(project, block, first, last), rows_of(project, target, first, last)
            assert found == pytest.approx(float((x + x @ m - y).norm() / (y - x).norm()), rel=1e-4)
        own = rows_of(project, block + 1, 4, 6)
        assert row.own_error == pytest.approx(float((y - own).norm() / (y - x).norm()), rel=1e-5, abs=1e-7)
        column = 0 if target == block + 1 else 1
        assert float(stored["own"][block, column]) == pytest.approx(row.own_error, rel=1e-6)
        assert float(stored["heldout"][block, column]) == pytest.approx(row.heldout_error, rel=1e-6)
    assert stored["own"][2:, 1].tolist() == stored["heldout"][2:, 1].tolist() == [-1, -1], "behind the last block"
    assert TensorFile(project.data / "peeling.safetensors").metadata["reach"] == [1, 3]


def test_a_blocks_own_output_explains_its_own_target(copied: Finished) -> None:
    table = peel(copied("llama"), reach=[1, 2])
    assert (table[table.target == table.block + 1].own_error == 0).all()
    assert (table[table.target == table.block + 2].own_error > 0.01).all()


def test_maps_are_not_kept_unless_asked_for(copied: Finished) -> None:
    project = copied("llama")
    peel(project, reach=[2, 1])
    assert set(load_file(project.data / "peeling.safetensors")) == {"own", "heldout"}


def test_a_planted_linear_block_is_wholly_explained(copied: Finished) -> None:
    project = copied("llama")
    tape = load_file(project.data / "tape.safetensors")
    w = torch.randn(32, 32, generator=torch.Generator().manual_seed(0)) / 32**0.5
    tape["boundary.0002"] = tape["boundary.0001"] @ w
    write_tensors(project.data / "tape.safetensors", tape)
    table = peel(project, reach=[1], ridge=1e-8).set_index("block")
    assert table.heldout_error[1] < 1e-2 < 0.1 < table.heldout_error.drop(1).min()


def test_a_block_that_does_nothing_leaves_nothing_to_explain(copied: Finished) -> None:
    project = copied("llama")
    tape = load_file(project.data / "tape.safetensors")
    tape["boundary.0002"] = tape["boundary.0001"].clone()
    write_tensors(project.data / "tape.safetensors", tape)
    row = peel(project, reach=[1]).set_index("block").loc[1]
    assert (row.train_error, row.heldout_error, row.own_error) == (0, 0, 0)


@pytest.mark.parametrize(("reach", "rows"), [([9], 0), ([4], 1), ([9, 3], 2)])
def test_a_reach_beyond_the_model_gives_fewer_rows_and_a_report(reach: list[int], rows: int, copied: Finished) -> None:
    project = copied("llama")
    table = peel(project, reach=reach)
    assert list(table.columns) == COLUMNS and len(table) == rows
    stored = load_file(project.data / "peeling.safetensors")
    assert stored["own"].shape == (4, len(reach)) and int((stored["own"] >= 0).sum()) == rows
    page = project.run("report").read_text()
    assert ("No reference was fitted: every target (peeling.reach: [9]) lies behind the last block." in page) == (rows == 0)


def test_the_size_of_batches_changes_nothing_but_rounding(copied: Finished) -> None:
    project = copied("gpt2")
    before = pd.read_csv(project.data / "peeling.csv")
    project.run("peeling", compute={"batch_tokens": 1})
    np.testing.assert_allclose(pd.read_csv(project.data / "peeling.csv"), before, rtol=1e-3, atol=1e-5)


def test_a_raised_ridge_is_said(copied: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    project = copied("llama")
    tape = load_file(project.data / "tape.safetensors")
    tape["boundary.0001"][..., 7] = 0  # a channel that is always zero
    write_tensors(project.data / "tape.safetensors", tape)
    table = peel(project, reach=[1], ridge=0.0).set_index("block")
    assert table.ridge[1] > 0 and table.ridge[0] == 0
    assert f"block 1: ridge raised from 0 to {table.ridge[1]:g}" in capsys.readouterr().out

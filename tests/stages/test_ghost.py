"""Operators are the least-squares maps of the tape, judged on the windows they have not seen."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from pipeline.errors import PalimpsestError
from pipeline.tensors import TensorFile, write_tensors
from tests.plain import read_operators
from tests.project import Project
from tests.stages.conftest import Finished

COLUMNS = ["start", "stop", "operator", "ridge", "train_error", "heldout_error", "condition", "antisymmetric_share", "norm"]
COLUMNS += ["ridge_absolute", "sinks", "sink_error", "rest_error"]


def fit(project: Project, removed: list[int], **ghost: Any) -> tuple[dict[tuple[int, int], Tensor], pd.DataFrame]:
    project.run("removal", removal={"method": "list", "blocks": removed} if removed else {"method": "none"})
    project.run("ghost", ghost=ghost)
    return read_operators(project.data / "ghost.safetensors"), pd.read_csv(project.data / "ghost.csv")


def rows_of(project: Project, boundary: int, first: int, last: int) -> Tensor:
    """All tokens of some windows at one boundary, float64."""
    return load_file(project.data / "tape.safetensors")[f"boundary.{boundary:04d}"][first:last].flatten(0, 1).double()


def oracle(x: Tensor, y: Tensor, ridge: float) -> Tensor:
    """M by lstsq, the ridge as C more rows."""
    weight = math.sqrt(ridge * float(x.square().sum()) / x.shape[1])
    longer = torch.cat([x, weight * torch.eye(x.shape[1], dtype=torch.float64)])
    return torch.linalg.lstsq(longer, torch.cat([y - x, torch.zeros(x.shape[1], x.shape[1], dtype=torch.float64)])).solution


RUNS = [
    ([1, 2], [(1, 3)]),
    ([0], [(0, 1)]),
    ([3], [(3, 4)]),
    ([0, 3], [(0, 1), (3, 4)]),
    ([0, 2], [(0, 1), (2, 3)]),
    ([1, 2, 3], [(1, 4)]),
]


@pytest.mark.parametrize(("removed", "runs"), RUNS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_each_run_has_the_least_squares_operator(
    family: str, removed: list[int], runs: list[tuple[int, int]], copied: Finished
) -> None:
    """Six windows, an eighth held out: at least one, so five and one."""
    project = copied(family)
    operators, table = fit(project, removed, ridge=1e-3)
    assert list(table.columns) == COLUMNS and list(operators) == runs == list(zip(table.start, table.stop, strict=True))
    for (_, row), ((start, stop), m) in zip(table.iterrows(), operators.items(), strict=True):
        x, y = rows_of(project, start, 0, 5), rows_of(project, stop, 0, 5)
        exact = oracle(x, y, 1e-3)
        torch.testing.assert_close(m.double(), exact, rtol=1e-5, atol=1e-6)
        assert row.train_error == pytest.approx(float((x + x @ exact - y).norm() / (y - x).norm()), rel=1e-6)
        assert row.train_error <= 1
        x, y = rows_of(project, start, 5, 6), rows_of(project, stop, 5, 6)
        assert row.heldout_error == pytest.approx(float((x + x @ exact - y).norm() / (y - x).norm()), rel=1e-6)
        assert row.operator == "ghost" and row.ridge == 1e-3
        assert row.norm == pytest.approx(float(exact.norm()), rel=1e-6)
        assert row.antisymmetric_share == pytest.approx(float((exact - exact.T).norm() / exact.norm() / 2), rel=1e-6)
        assert row.condition > 1


@pytest.mark.parametrize(("share", "held_out"), [(0.01, 1), (0.34, 2), (0.5, 3), (0.999, 5)])
def test_the_last_windows_are_held_out(share: float, held_out: int, copied: Finished) -> None:
    """At least one window on either side."""
    project = copied("llama")
    operators, _ = fit(project, [1], held_out=share, ridge=1e-2)
    x, y = rows_of(project, 1, 0, 6 - held_out), rows_of(project, 2, 0, 6 - held_out)
    torch.testing.assert_close(operators[1, 2].double(), oracle(x, y, 1e-2), rtol=1e-5, atol=1e-6)


def test_a_planted_linear_block_is_replaced_without_loss(copied: Finished) -> None:
    """Blocks 1 and 2 turn the stream x into x W on the tape: the operator is W, also on windows never seen."""
    project = copied("llama")
    tape = load_file(project.data / "tape.safetensors")
    w = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    tape["boundary.0003"] = tape["boundary.0001"] @ w
    write_tensors(project.data / "tape.safetensors", tape)
    operators, table = fit(project, [1, 2], ridge=0.0)
    assert float((torch.eye(32) + operators[1, 3] - w).abs().max()) < 1e-4
    assert table.train_error.item() < 1e-5 and table.heldout_error.item() < 1e-5


def test_a_block_that_does_nothing_gets_no_operator(copied: Finished) -> None:
    project = copied("llama")
    tape = load_file(project.data / "tape.safetensors")
    tape["boundary.0002"] = tape["boundary.0001"].clone()
    write_tensors(project.data / "tape.safetensors", tape)
    operators, table = fit(project, [1])
    assert not operators[1, 2].any()
    assert (table.train_error.item(), table.heldout_error.item(), table.norm.item(), table.antisymmetric_share.item()) == (
        0,
        0,
        0,
        0,
    )


@pytest.mark.parametrize(("removed", "method"), [([], "ghost"), ([], "none"), ([1, 2], "none")])
def test_nothing_to_restore(removed: list[int], method: str, copied: Finished) -> None:
    project = copied("llama")
    operators, table = fit(project, removed, method=method)
    assert operators == {} and list(table.columns) == COLUMNS and len(table) == 0
    assert TensorFile(project.data / "ghost.safetensors").metadata["runs"] == []
    project.run("compress")
    assert not list((project.data / "compressed").glob("*.py"))
    project.run("evaluation@compressed")
    result = json.loads((project.data / "evaluation" / "compressed.json").read_text())
    assert result["blocks"] == 4 - len(removed)


def test_too_few_tokens_raise_the_ridge_and_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sixteen tokens for 32 channels have many exact solutions."""
    project = Project(tmp_path, blocks=3, windows=2)
    project.run_until("masking")
    capsys.readouterr()
    _, table = fit(project, [1], ridge=0.0)
    assert 0 < table.ridge.item() <= 1e-5
    assert f"ridge raised from 0 to {table.ridge.item():g}" in capsys.readouterr().out


def test_a_dead_stream_stops_with_the_run(copied: Finished) -> None:
    project = copied("llama")
    tape = load_file(project.data / "tape.safetensors")
    tape["boundary.0001"].zero_()
    write_tensors(project.data / "tape.safetensors", tape)
    with pytest.raises(PalimpsestError, match=r"ghost of blocks 1 to 2: .*80 tokens x 32 channels is singular \(condition inf\)"):
        fit(project, [1, 2])


@pytest.mark.parametrize("stage", ["ghost", "peeling"])
def test_one_window_cannot_be_held_out(stage: str, tmp_path: Path) -> None:
    project = Project(tmp_path, blocks=3, windows=1)
    project.run("capture")
    project.run("redundancy")
    project.run("search")
    project.run("removal", removal={"method": "list", "blocks": [1]})
    with pytest.raises(
        PalimpsestError, match=rf"{stage}\.held_out needs at least two windows; raise tokens\.calibration_windows"
    ):
        project.run(stage)


def test_a_tape_with_holes_stops_with_its_place(copied: Finished) -> None:
    project = copied("llama")
    tape = load_file(project.data / "tape.safetensors")
    tape["boundary.0002"][4, 3, 2] = float("inf")
    write_tensors(project.data / "tape.safetensors", tape)
    for stage in ("statistics", "redundancy", "peeling"):
        with pytest.raises(PalimpsestError, match=r"tape\.safetensors: boundary 2, windows 4-\d: NaN or infinite"):
            project.run(stage)
    with pytest.raises(PalimpsestError, match=r"tape\.safetensors: boundary 2, windows 4-5: NaN or infinite"):
        fit(project, [2])

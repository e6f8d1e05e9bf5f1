"""Measured removals against the plain model: the greedy order, and the window that its ghost restores best."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.errors import PalimpsestError
from stages.search import run as search_run
from stages.search.iterative import greedy
from stages.search.run import WINDOWS, _steps, _tell
from tests.plain import plain_variant
from tests.project import Project
from tests.stages.test_wavefront import plain_kl

SEARCH = {"prompts": 3, "length": 10, "ridge": 1e-3}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = Project(tmp_path_factory.mktemp("search"), blocks=6, windows=12)
    project.run("capture")
    return project


def prompts(project: Project) -> torch.Tensor:
    return load_file(project.data / "tokens.safetensors")["calibration"][:3, :10]


def test_nothing_by_default(project: Project) -> None:
    project.run("search")
    for name in ("search_steps.csv", "search_windows.csv"):
        assert not len(pd.read_csv(project.data / name))


def test_each_step_is_measured_on_what_is_left(project: Project) -> None:
    project.run("search", search={**SEARCH, "steps": 3, "windows": []})
    steps = pd.read_csv(project.data / "search_steps.csv")
    gone: list[int] = []
    for step in (1, 2, 3):
        rows = steps[steps.step == step]
        assert set(rows.block) == set(range(1, 5)) - set(gone)
        costs = {
            block: float(plain_kl(project.model, plain_variant(project.model, removed=[*gone, block]), prompts(project)).mean())
            for block in rows.block
        }
        assert dict(zip(rows.block, rows.divergence, strict=True)) == pytest.approx(costs, rel=1e-3, abs=1e-5)
        (chosen,) = rows.block[rows.removed == 1]
        assert chosen == min(costs, key=lambda block: costs[block])
        gone.append(chosen)


def test_windows_are_compared_by_what_their_ghosts_give(project: Project) -> None:
    project.run("search", search={**SEARCH, "steps": 0, "windows": [3, 2]})
    found = pd.read_csv(project.data / "search_windows.csv")
    assert list(zip(found.start, found.stop, strict=True)) == [(1, 3), (2, 4), (3, 5), (1, 4), (2, 5)]
    tape = [value for _, value in sorted(load_file(project.data / "tape.safetensors").items())]
    for row in found.to_dict("records"):
        x, y = (tape[one][3:].flatten(0, 1).double() for one in (row["start"], row["stop"]))
        scale = float((x.T @ x).diagonal().mean())
        m = torch.linalg.solve(x.T @ x + 1e-3 * scale * torch.eye(32, dtype=torch.float64), x.T @ (y - x)).float()
        bare = plain_variant(project.model, removed=range(row["start"], row["stop"]))
        ghost = plain_variant(project.model, removed=range(row["start"], row["stop"]), operators={(row["start"], row["stop"]): m})
        kl = [float(plain_kl(project.model, one, prompts(project)).mean()) for one in (ghost, bare)]
        assert [row["divergence"], row["divergence_bare"]] == pytest.approx(kl, rel=1e-3)
        assert row["error"] == pytest.approx(float((x @ m.double() - (y - x)).norm() / (y - x).norm()), rel=1e-4)
        after = torch.cosine_similarity(x + x @ m.double(), y, dim=-1).mean()
        assert row["cosine"] == pytest.approx(float(after), abs=1e-5)


def test_a_sink_is_kept_out_of_the_fit_and_restored(project: Project, tmp_path: Path) -> None:
    """The first token is blown up by block 2: with it in the fit it would rule the operator."""
    other = Project(tmp_path, blocks=5, windows=12)
    path = other.data / "model" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][95, 7] = 60.0  # a token of its own at the first position
    tensors["model.layers.2.mlp.gate_proj.weight"][0, :] = 0
    tensors["model.layers.2.mlp.up_proj.weight"][0, :] = 0
    tensors["model.layers.2.mlp.gate_proj.weight"][0, 7] = tensors["model.layers.2.mlp.up_proj.weight"][0, 7] = 3.0
    tensors["model.layers.2.mlp.down_proj.weight"][9, 0] = 40.0
    save_file(tensors, path, metadata={"format": "pt"})
    ids = load_file(other.data / "tokens.safetensors")
    ids["calibration"][ids["calibration"] == 95] = 94
    ids["calibration"][:, 0] = 95
    save_file(ids, other.data / "tokens.safetensors")
    other.run("capture")
    tape = [value for _, value in sorted(load_file(other.data / "tape.safetensors").items())]
    norms = tape[3].norm(dim=-1)
    assert float(norms[:, 0].min()) > 10 * float(norms[:, 1:].median()), "it is a sink behind block 2"
    other.run("search", search={**SEARCH, "windows": [1]})
    row = pd.read_csv(other.data / "search_windows.csv").set_index("start").loc[2]
    assert row.divergence < row.divergence_bare / 2
    x, y = (tape[one][3:, 1:].flatten(0, 1).double() for one in (2, 3))
    m = torch.linalg.lstsq(x, y - x).solution
    assert row.error == pytest.approx(float((x @ m - (y - x)).norm() / (y - x).norm()), rel=0.1), "of the other tokens alone"


def test_spaced_steps_stay_apart() -> None:
    cost = lambda variants: [float(len(variants) - place) for place in range(len(variants))]  # noqa: E731  the last is least
    assert [best for _, best in greedy([1, 2, 3, 4, 5], 3, cost, spacing=1)] == [5, 3, 1]
    with pytest.raises(
        PalimpsestError, match=r"search\.steps = 4: with search\.spacing = 1 none is left at step 4; allowed: 0 to 3"
    ):
        greedy([1, 2, 3, 4, 5], 4, cost, spacing=1)


def test_what_is_not_finite_is_said_and_never_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    nan, inf = float("nan"), float("inf")
    costs = iter([[nan, 0.5, inf], [0.7, nan], [nan]])
    assert [best for _, best in greedy([1, 2, 3], 2, lambda _: next(costs))] == [2, 1]
    with pytest.raises(PalimpsestError, match=r"search\.steps = 3: at step 2 .*allowed: 0 to 1, or try compute\.dtype: float32"):
        greedy([1, 2, 3], 3, lambda variants: [0.1, 0.2, 0.3] if len(variants) == 3 else [nan] * len(variants))
    _steps([({1: nan, 2: 0.5, 3: inf}, 2)])
    assert "block 2 goes, KL 0.5000; not finite without block 1, 3" in capsys.readouterr().out
    rows = [
        [1, 2, nan, 1.0, 0.1, 0.9, 0],
        [2, 3, nan, nan, 0.1, 0.9, 0],
        [1, 3, nan, 2.0, 0.1, 0.9, 0],
        [2, 4, 0.5, 2.0, 0.1, 0.9, 0],
    ]
    _tell(pd.DataFrame(rows, columns=WINDOWS))
    said = capsys.readouterr().out
    assert "windows of 1: KL not finite for 2 of 2" in said and "windows of 2: KL not finite for 1 of 2" in said
    assert "windows of 2: best 2 to 3, KL 0.5000" in said and "windows of 1: best" not in said


def test_prompts_that_the_tape_lacks_are_said(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    project.run("search", search={**SEARCH, "steps": 1, "windows": [], "prompts": 500, "length": 4000})
    assert "12 prompts of 16 tokens: the tape has no more" in capsys.readouterr().out


def test_the_plan_counts_the_variants_of_the_windows(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two per window, of which there may be more than blocks; and none of the steps that are not made."""
    planned: list[int] = []
    real = search_run.sweep_memory

    def noted(decoder: Any, variants: Any, *rest: Any) -> int:
        planned.append(len(variants))
        return real(decoder, variants, *rest)

    monkeypatch.setattr(search_run, "sweep_memory", noted)
    project.run("search", search={**SEARCH, "steps": 0, "windows": [1, 2]})
    assert planned == [2 * (4 + 3)]


@pytest.mark.parametrize(
    ("search", "message"),
    [
        ({"steps": 5}, r"search\.steps = 5: allowed: 0 to 4"),
        ({"windows": [5]}, r"search\.windows = 5: no 5 adjacent blocks are free of search\.protect"),
        ({"windows": [1], "prompts": 12}, r"search\.prompts = 12: no calibration window is left.*1 to 11"),
        ({"steps": 1, "protect": [6]}, r"search\.protect = 6: the model has 6 blocks"),
    ],
)
def test_what_cannot_be_measured_says_so(search: dict[str, Any], message: str, project: Project) -> None:
    with pytest.raises(PalimpsestError, match=message):
        project.run("search", search={**SEARCH, "steps": 0, "windows": [], "protect": [0, -1], **search})

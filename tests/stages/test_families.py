"""Every family through every stage, against the plain model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.models import FAMILIES
from tests.plain import (
    blocks_of,
    matrix_of,
    plain_boundaries,
    plain_logits,
    plain_losses,
    plain_variant,
    read_masks,
    read_operators,
    relative_gap,
)
from tests.project import REPOSITORY, Project
from tests.stages.conftest import Finished, copy_project

PROMPT = torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(5))


@pytest.fixture(params=FAMILIES)
def project(request: pytest.FixtureRequest, finished: Finished) -> Project:
    return finished(request.param)


def variant(project: Project, masked: bool, removed: bool, ghost: bool) -> Any:
    """The plain model with what the project's files say."""
    return plain_variant(
        project.model,
        read_masks(project.data / "masks.safetensors", project.model) if masked else None,
        json.loads((project.data / "removal.json").read_text())["removed"] if removed else (),
        read_operators(project.data / "ghost.safetensors") if ghost else None,
    )


def reload(folder: Path, **more: Any) -> Any:
    """As a stranger would load it. Nothing may be missing from the files, and nothing too much in them."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **more)
    model, info = loaded
    assert not any(info.values()), info
    return model.eval()


def test_the_tape_is_what_the_model_does(project: Project) -> None:
    ids = load_file(project.data / "tokens.safetensors")["calibration"]
    tape = load_file(project.data / "tape.safetensors")
    for index, expected in enumerate(plain_boundaries(project.model, ids)):
        assert relative_gap(tape[f"boundary.{index:04d}"], expected) < 1e-6
    assert len(tape) == len(blocks_of(project.model)) + 1


def test_masks_cover_the_blocks_and_meet_the_budget(project: Project) -> None:
    masks = read_masks(project.data / "masks.safetensors", project.model)
    for (_, name), keep in masks.items():
        assert (keep.sum(1) == keep.shape[1] - keep.shape[1] // 2).all(), name
    inside = sum(p.numel() for block in blocks_of(project.model) for name, p in block.named_parameters() if is_matrix(name, p))
    assert sum(keep.numel() for keep in masks.values()) == inside
    table = pd.read_csv(project.data / "allocation.csv")
    assert table.parameters.sum() == inside and list(table.block) == [0, 1, 2, 3]


def is_matrix(name: str, parameter: torch.Tensor) -> bool:
    """All matrices of these families are prunable but a router's."""
    return parameter.ndim >= 2 and "gate.weight" not in name and "router" not in name


def test_statistics_have_a_row_for_every_place(project: Project) -> None:
    table = pd.read_csv(project.data / "statistics.csv")
    names = {name for block, name in read_masks(project.data / "masks.safetensors", project.model) if block == 0}
    for _, rows in table.groupby("block"):
        assert list(rows.place[:3]) == ["input", "output", "linears"] and set(rows.place[3:]) == names
        sizes = dict(zip(rows.place, rows.parameters, strict=True))
        assert all(sizes[name] == matrix_of(blocks_of(project.model)[0], name).numel() for name in names)
    seen = np.asarray(table.loc[table.tokens > 0, ["p50", "p90", "p99", "p99.9", "max"]])
    assert len(seen) and (np.diff(seen) >= 0).all()


@pytest.mark.parametrize(
    ("name", "parts"),
    [("dense", (0, 0, 0)), ("masked", (1, 0, 0)), ("removed", (0, 1, 0)), ("compressed", (1, 1, 1))],
)
def test_evaluation_is_what_the_plain_variant_gives(project: Project, name: str, parts: tuple[int, int, int]) -> None:
    ids = load_file(project.data / "tokens.safetensors")["evaluation"]
    plain = variant(project, *map(bool, parts))
    expected = plain_losses(plain, ids)
    result = json.loads((project.data / "evaluation" / f"{name}.json").read_text())
    np.testing.assert_allclose(result["windows"], expected, rtol=1e-5)
    assert result["perplexity"] == pytest.approx(np.exp(expected.mean()), rel=1e-4)
    assert result["tokens"] == ids.shape[0] * (ids.shape[1] - 1)


def test_the_export_is_the_plain_variant(project: Project) -> None:
    folder = project.data / "compressed"
    model = reload(folder, trust_remote_code=True)
    assert type(model).__name__ == "GhostForCausalLM" and model.config.get_text_config().num_hidden_layers == 2
    logits = plain_logits(model, PROMPT)
    assert relative_gap(logits, plain_logits(variant(project, True, True, True), PROMPT)) < 1e-5
    assert relative_gap(logits, plain_logits(variant(project, True, True, False), PROMPT)) > 1e-3, "the operators count"


def test_the_export_generates_the_same_with_a_cache_and_without(project: Project) -> None:
    model = reload(project.data / "compressed", trust_remote_code=True)
    more: dict[str, Any] = {
        "attention_mask": torch.ones_like(PROMPT),
        "max_new_tokens": 8,
        "min_new_tokens": 8,
        "do_sample": False,
    }
    cached = model.generate(PROMPT, use_cache=True, **more)
    assert cached.shape == (2, PROMPT.shape[1] + 8)
    assert torch.equal(cached, model.generate(PROMPT, use_cache=False, **more))


def test_the_export_saved_again_loses_nothing(project: Project, tmp_path: Path) -> None:
    model = reload(project.data / "compressed", trust_remote_code=True)
    model.save_pretrained(tmp_path / "again")
    again = reload(tmp_path / "again", trust_remote_code=True)
    assert torch.equal(plain_logits(again, PROMPT), plain_logits(model, PROMPT))


def test_the_export_without_the_code_stops(project: Project) -> None:
    with pytest.raises((ValueError, KeyError), match="trust_remote_code|ghost_"):
        AutoModelForCausalLM.from_pretrained(project.data / "compressed", trust_remote_code=False)


def test_without_ghosts_the_export_needs_no_code(project: Project, tmp_path: Path) -> None:
    plain = copy_project(project, tmp_path / "copy")
    plain.run("ghost", ghost={"method": "none"})
    folder = plain.run("compress")
    assert not list(folder.glob("*.py"))
    model = reload(folder, trust_remote_code=False)
    assert type(model) is type(project.model)
    assert relative_gap(plain_logits(model, PROMPT), plain_logits(variant(plain, True, True, False), PROMPT)) < 1e-5


def test_zeros_on_disk_are_the_masked_weights(project: Project) -> None:
    masks = read_masks(project.data / "masks.safetensors", project.model)
    expected = sum(int((~keep).sum()) for (block, _), keep in masks.items() if block in (0, 3))
    stored = load_file(project.data / "compressed" / "model.safetensors")
    matrices = {name: value for name, value in stored.items() if value.ndim >= 2 and ".ghost_" not in name}
    assert sum(int((value == 0).sum()) for value in matrices.values()) == expected
    result = json.loads((project.data / "evaluation" / "compressed.json").read_text())
    assert result["zeros"] == expected and result["blocks"] == 2
    assert result["parameters"] == sum(value.numel() for value in stored.values())
    assert result["bytes"] == sum(value.nbytes for value in stored.values())


RUN_ALL = """
import sys
from pathlib import Path
import torch
from tests.project import REPOSITORY, Project
torch.set_num_threads(1)
for family in ("llama", "gpt2", "mixtral"):
    project = Project(Path(sys.argv[1]) / family, family, blocks=3)
    sections = {"removal": {"count": 1}, "peeling": {"keep": True}, "allocation": {"method": "pals"}}
    project.run_until("evaluation@compressed", **sections)
"""


def test_two_processes_write_the_same_bytes(tmp_path: Path) -> None:
    """Sets and dicts of strings come in another order in each; no file may show it."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RUN_ALL, str(tmp_path / seed)],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
        )
        for seed in ("1", "2")
    ]
    assert [process.wait() for process in processes] == [0, 0]
    one, two = (
        {str(path.relative_to(tmp_path / seed)): path.read_bytes() for path in (tmp_path / seed).rglob("*") if path.is_file()}
        for seed in ("1", "2")
    )
    assert one.keys() == two.keys() and len(one) > 3 * 20
    assert [name for name in one if one[name] != two[name]] == []

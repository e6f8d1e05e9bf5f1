"""Cosines of the tape, window by window, against torch's own."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.tensors import write_tensors
from tests.project import Project
from tests.stages.conftest import Finished


def boundaries(project: Project) -> torch.Tensor:
    """[boundary, window, token, channel]."""
    return torch.stack([value for _, value in sorted(load_file(project.data / "tape.safetensors").items())]).double()


def check(project: Project) -> None:
    tape = boundaries(project)
    pairs = pd.read_csv(project.data / "redundancy_pairs.csv")
    assert list(pairs.columns) == ["i", "j", "cosine"]
    assert list(zip(pairs.i, pairs.j, strict=True)) == list(combinations(range(len(tape)), 2))
    windows = {
        (i, j): torch.cosine_similarity(tape[i], tape[j], dim=-1).mean(-1).numpy() for i, j in combinations(range(len(tape)), 2)
    }
    np.testing.assert_allclose(pairs.cosine, [windows[i, j].mean() for i, j in zip(pairs.i, pairs.j, strict=True)], atol=1e-6)
    blocks = pd.read_csv(project.data / "redundancy_blocks.csv")
    assert list(blocks.columns) == ["block", "influence", "influence_error"] and list(blocks.block) == list(range(len(tape) - 1))
    steps = [windows[block, block + 1] for block in blocks.block]
    np.testing.assert_allclose(blocks.influence, [1 - step.mean() for step in steps], atol=1e-6)
    errors = [step.std(ddof=1) / len(step) ** 0.5 if len(step) > 1 else 0 for step in steps]
    np.testing.assert_allclose(blocks.influence_error, errors, atol=1e-6)
    stored = load_file(project.data / "redundancy.safetensors")["cosine"]
    assert stored.shape == (tape.shape[1], len(tape), len(tape))
    for (i, j), expected in windows.items():
        np.testing.assert_allclose(stored[:, i, j], expected, atol=1e-6)
        np.testing.assert_allclose(stored[:, j, i], expected, atol=1e-6)


@pytest.mark.parametrize("batch_tokens", [1, 32, 10**6])
def test_cosines_are_per_token_and_averaged(batch_tokens: int, copied: Finished) -> None:
    project = copied("llama")
    project.run("redundancy", compute={"batch_tokens": batch_tokens})
    check(project)


def test_a_single_window_has_no_error(tmp_path: Path) -> None:
    project = Project(tmp_path, blocks=2, windows=1)
    project.run("capture")
    project.run("redundancy")
    check(project)
    assert (pd.read_csv(project.data / "redundancy_blocks.csv").influence_error == 0).all()


def test_a_block_that_does_nothing_has_no_influence(copied: Finished) -> None:
    project = copied("llama")
    path = project.data / "model" / "model.safetensors"
    tensors = load_file(path)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"model.layers.2.{name}.weight"].zero_()
    save_file(tensors, path, metadata={"format": "pt"})
    project.run("capture")
    project.run("redundancy")
    influence = pd.read_csv(project.data / "redundancy_blocks.csv").influence
    assert 0 <= influence[2] < 1e-6 and influence.drop(2).min() > 1e-3
    for method in ("streamline", "shortgpt"):
        project.run("removal", removal={"method": method, "count": 1})
        assert '"removed": [\n  2\n ]' in (project.data / "removal.json").read_text()


def test_a_zero_stream_is_like_nothing(copied: Finished) -> None:
    """An embedding of zero, say for padding, must not become NaN."""
    project = copied("llama")
    tape = load_file(project.data / "tape.safetensors")
    tape["boundary.0000"][:, 0] = 0
    write_tensors(project.data / "tape.safetensors", tape)
    project.run("redundancy")
    check(project)

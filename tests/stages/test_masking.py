"""Masks are those of an independent, plain Wanda on the whole model, entry by entry."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from pipeline.errors import PalimpsestError
from tests.models import FAMILIES, _config
from tests.plain import blocks_of, matrix_inputs, matrix_of, read_masks
from tests.project import Project
from tests.stages.conftest import Finished

Masks = dict[tuple[int, str], torch.Tensor]


def lowest(score: np.ndarray, share: float) -> torch.Tensor:
    """Which stay: per row, all but the ⌊in · share⌋ first of a stable sort."""
    keep = np.ones(score.shape, dtype=bool)
    count = int(score.shape[1] * share)
    np.put_along_axis(keep, np.argsort(score, axis=1, kind="stable")[:, :count], False, axis=1)
    return torch.from_numpy(keep)


def plain_wanda(project: Project, share: float, sequential: bool) -> Masks:
    """Block by block: forward the whole model, score by |W| · ||x||, and, if sequential, prune before the next block."""
    model = copy.deepcopy(project.model)
    ids = load_file(project.data / "tokens.safetensors")["calibration"]
    names = [name for block, name in read_masks(project.data / "masks.safetensors", model) if block == 0]
    masks: Masks = {}
    for index, block in enumerate(blocks_of(model)):
        inputs = matrix_inputs(model, index, ids, names)
        for name in names:
            weight = matrix_of(block, name)
            norms = inputs[name].double().square().sum(0).sqrt().numpy()
            masks[index, name] = lowest(weight.double().abs().numpy() * norms, share)
        for name in names if sequential else []:
            matrix_of(block, name)[~masks[index, name]] = 0.0
    return masks


def assert_equal(found: Masks, expected: Masks) -> None:
    assert set(found) == set(expected)
    for key, keep in expected.items():
        assert torch.equal(found[key], keep), f"{key}: {int((found[key] != keep).sum())} of {keep.numel()} differ"


@pytest.mark.parametrize("share", [0.5, 0.3])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe", "gemma2"])
def test_wanda_is_the_published_one(family: str, share: float, copied: Finished) -> None:
    project = copied(family)
    project.run("allocation", allocation={"sparsity": share})
    found = {}
    for activations in ("pruned", "tape"):
        path = project.run("masking", masking={"method": "wanda", "activations": activations})
        found[activations] = read_masks(path, project.model)
        assert_equal(found[activations], plain_wanda(project, share, sequential=activations == "pruned"))
    differ = {block for block, name in found["tape"] if not torch.equal(found["tape"][block, name], found["pruned"][block, name])}
    assert differ == {1, 2, 3}, "only the first block sees the same in both"


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_magnitude(family: str, copied: Finished) -> None:
    project = copied(family)
    masks = read_masks(project.run("masking", masking={"method": "magnitude"}), project.model)
    for (block, name), keep in masks.items():
        assert torch.equal(keep, lowest(matrix_of(blocks_of(project.model)[block], name).abs().numpy(), 0.5))


@pytest.mark.parametrize("batch_tokens", [1, 80, 10**6])
def test_the_size_of_batches_does_not_matter(batch_tokens: int, copied: Finished) -> None:
    project = copied("llama")
    before = read_masks(project.data / "masks.safetensors", project.model)
    project.run("masking", compute={"batch_tokens": batch_tokens})
    assert_equal(read_masks(project.data / "masks.safetensors", project.model), before)


@pytest.mark.parametrize("method", ["magnitude", "wanda"])
def test_without_sparsity_all_stay(method: str, copied: Finished) -> None:
    project = copied("llama")
    project.run("allocation", allocation={"sparsity": 0.0})
    masks = read_masks(project.run("masking", masking={"method": method}), project.model)
    assert all(keep.all() for keep in masks.values())
    project.run("evaluation@masked")
    dense, masked = ((project.data / "evaluation" / f"{name}.json").read_text() for name in ("dense", "masked"))
    assert masked.replace('"masked"', '"dense"') == dense


def test_a_share_per_matrix_wins_over_that_of_its_block(copied: Finished) -> None:
    """allocation.csv may be written by hand: `matrix` names the matrix, or is empty for the rest of the block."""
    project = copied("llama")
    rows: list[dict[str, Any]] = [{"block": block, "matrix": "", "sparsity": 0.25 * block} for block in range(4)]
    rows += [{"block": 2, "matrix": "mlp.up_proj", "sparsity": 0.75}, {"block": 0, "matrix": "self_attn.q_proj", "sparsity": 0.5}]
    pd.DataFrame(rows).to_csv(project.data / "allocation.csv", index=False)
    masks = read_masks(project.run("masking"), project.model)
    for (block, name), keep in masks.items():
        share = {(2, "mlp.up_proj"): 0.75, (0, "self_attn.q_proj"): 0.5}.get((block, name), 0.25 * block)
        assert (keep.sum(1) == keep.shape[1] - int(keep.shape[1] * share)).all(), (block, name)


def test_an_allocation_for_another_number_of_blocks_is_refused(copied: Finished) -> None:
    project = copied("llama")
    table = pd.read_csv(project.data / "allocation.csv")
    table[table.block < 3].to_csv(project.data / "allocation.csv", index=False)
    with pytest.raises(PalimpsestError, match=r"allocation\.csv has blocks \[0, 1, 2\], the model has 4"):
        project.run("masking")


def test_widths_that_fill_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, Any] = {"hidden_size": 20, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 27}
    monkeypatch.setitem(FAMILIES, "odd", _config("LlamaConfig", **sizes))
    project = Project(tmp_path, "odd", blocks=2)
    project.run_until("masking", allocation={"sparsity": 0.37})
    assert_equal(read_masks(project.data / "masks.safetensors", project.model), plain_wanda(project, 0.37, sequential=True))


def test_no_scratch_file_is_left(copied: Finished) -> None:
    project = copied("llama")
    before = sorted(path.name for path in project.data.rglob("*"))
    project.run("masking")
    project.run("evaluation@masked")
    assert sorted(path.name for path in project.data.rglob("*")) == before

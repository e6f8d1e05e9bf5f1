"""Each block pruned alone: the same as pruning that block of the plain model and running it in full."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from pipeline.errors import PalimpsestError
from stages.decoder.matrices import prunable_matrices
from stages.decoder.skeleton import Decoder
from stages.decoder.wavefront import Changed, Prompts, Variant
from stages.sensitivity import run as stage
from tests.models import FAMILIES, _config
from tests.plain import blocks_of, matrix_inputs, matrix_of, plain_logits, plain_losses, read_masks
from tests.project import Project
from tests.stages.conftest import Finished

KNOBS = {"sparsity": 0.5, "windows": 3, "length": 11}


def pruned_alone(project: Project, block: int, scores: str) -> Any:
    """A copy of the plain model with half of every row of one block's matrices zero, by scores from hooks and a full sort."""
    ids = load_file(project.data / "tokens.safetensors")["calibration"]
    names = [name for index, name in read_masks(project.data / "masks.safetensors", project.model) if index == block]
    inputs = matrix_inputs(project.model, block, ids, names)
    twin = copy.deepcopy(project.model)
    for name in names:
        weight = matrix_of(blocks_of(twin)[block], name)
        score = weight.abs().double()
        if scores == "wanda" and name in inputs:
            score = score * inputs[name].double().square().sum(0).sqrt()
        lowest = score.argsort(dim=1, stable=True)[:, : weight.shape[1] // 2]
        weight.scatter_(1, lowest, 0.0)
    return twin


def plain_divergence(dense: torch.Tensor, pruned: torch.Tensor) -> np.ndarray:
    """Mean over tokens of KL(dense ‖ pruned), per window, float64."""
    p, q = dense.double().log_softmax(-1), pruned.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean(-1).numpy()


@pytest.mark.parametrize(
    ("family", "scores", "batch_tokens"),
    [
        ("llama", "wanda", 16),
        ("gpt2", "magnitude", 512),
        ("gemma3", "wanda", 40),
        ("qwen3_moe", "wanda", 64),
        ("falcon", "wanda", 1),
    ],
)
def test_it_is_what_the_pruned_model_run_in_full_gives(family: str, scores: str, batch_tokens: int, copied: Finished) -> None:
    project = copied(family)
    ids = load_file(project.data / "tokens.safetensors")["calibration"][:3, :11]
    tables = {}
    for method in ("loss", "kl"):
        knobs = {**KNOBS, "method": method, "scores": scores}
        tables[method] = pd.read_csv(project.run("sensitivity", sensitivity=knobs, compute={"batch_tokens": batch_tokens}))
    dense, dense_logits = plain_losses(project.model, ids), plain_logits(project.model, ids)
    for block in range(4):
        twin = pruned_alone(project, block, scores)
        each = {
            "loss": plain_losses(twin, ids) - dense,
            "kl": plain_divergence(dense_logits, plain_logits(twin, ids)),
        }
        for method, expected in each.items():
            row: Any = tables[method].iloc[block]
            assert row.block == block
            assert row.rise == pytest.approx(expected.mean(), abs=1e-5), (block, method)
            assert row.error == pytest.approx(expected.std(ddof=1) / 3**0.5, abs=1e-5)
        assert each["kl"].mean() > 1e-3, "pruning does something"


@pytest.mark.parametrize("method", ["loss", "kl"])
def test_chunks_of_prompts_and_variants_change_nothing(method: str, copied: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    project = copied("llama")
    whole = pd.read_csv(project.run("sensitivity", sensitivity={**KNOBS, "method": method}))
    for streams in (1, 2, 7):
        monkeypatch.setattr(stage, "STREAM_BYTES", streams * 11 * 32 * 4)
        again = pd.read_csv(project.run("sensitivity"))
        pd.testing.assert_frame_equal(again, whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("family", "scores"), [("gpt2", "magnitude"), ("qwen3_moe", "wanda")])
def test_the_precision_of_forward_passes_prunes_no_other_weights(
    family: str, scores: str, copied: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is in float32; in bfloat16 many of its scores would be equal or swapped."""
    project = copied(family)

    def zeros(decoder: Decoder, variants: list[Variant], prompts: Prompts, *_: Any) -> np.ndarray:
        for index, variant in enumerate(variants):
            step = variant.slots[index]
            assert isinstance(step, Changed)
            with decoder.block(index) as block, step.change(block):
                found.append({matrix.name: matrix.view(block) == 0 for matrix in prunable_matrices(block)})
        return np.zeros((len(variants), prompts.count))

    monkeypatch.setattr(stage, "measure_rises", zeros)
    each = []
    for dtype in ("float32", "bfloat16"):
        found: list[dict[str, torch.Tensor]] = []
        project.run("sensitivity", sensitivity={**KNOBS, "scores": scores}, compute={"dtype": dtype})
        each.append(found)
    exact, half = each
    assert len(exact) == len(half) == 4
    for one, other in zip(exact, half, strict=True):
        for name in one:
            assert torch.equal(one[name], other[name]), name
            assert 0.4 < float(one[name].float().mean()) < 0.6


def test_windows_and_length_go_no_further_than_the_tape(copied: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    project = copied("llama")
    whole = pd.read_csv(project.run("sensitivity", sensitivity={"windows": 6, "length": 16}))
    more = pd.read_csv(project.run("sensitivity", sensitivity={"windows": 100, "length": 1000}))
    pd.testing.assert_frame_equal(whole, more)
    assert "over 6 windows of 16 tokens" in capsys.readouterr().out
    one = pd.read_csv(project.run("sensitivity", sensitivity={"windows": 1}))
    assert one.error.isna().all() and one.rise.notna().all()


def test_off_it_leaves_empty_cells_and_measured_allocation_names_the_key(copied: Finished) -> None:
    project = copied("llama")
    table = pd.read_csv(project.run("sensitivity", sensitivity={"method": "none"}))
    assert table.block.tolist() == [0, 1, 2, 3] and table.rise.isna().all()
    project.run("allocation", allocation={"method": "owl"})
    with pytest.raises(
        PalimpsestError, match=r"allocation\.method = measured needs sensitivity\.method: loss or kl \(it is none\)"
    ):
        project.run("allocation", allocation={"method": "measured"})


def test_experts_that_no_token_reaches_are_pruned_by_magnitude(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config(
        "Qwen3MoeConfig", num_key_value_heads=2, head_dim=8, num_experts=24, num_experts_per_tok=2, moe_intermediate_size=8
    )
    monkeypatch.setitem(FAMILIES, "cold", config)
    project = Project(tmp_path, "cold", blocks=2, windows=2, length=2)
    table = pd.read_csv(project.run_until("sensitivity", sensitivity={"length": 2}))
    assert table.rise.notna().all()

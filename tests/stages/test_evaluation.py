"""Perplexity of every variant, what it was measured on, and what the variant weighs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.artifacts import ArtifactError
from pipeline.tensors import write_tensors
from stages.evaluation import run as stage
from stages.tokens.contract import Contract
from stages.tokens.slide import slide
from tests.plain import blocks_of, plain_losses, plain_variant, read_masks
from tests.project import Project
from tests.stages.conftest import Finished

VARIANTS = ["dense", "masked", "removed", "compressed"]
KEYS = {
    "variant", "loss", "perplexity", "interval", "confidence", "tokens", "windows", "contract",
    "sparsity", "zeros", "prunable", "parameters", "bytes", "blocks",
}  # fmt: skip


def evaluate(project: Project, variant: str, **evaluation: Any) -> dict[str, Any]:
    return json.loads(project.run(f"evaluation@{variant}", evaluation=evaluation).read_text())


def stored(project: Project, variant: str) -> dict[str, Any]:
    return json.loads((project.data / "evaluation" / f"{variant}.json").read_text())


@pytest.mark.parametrize("variant", VARIANTS)
def test_everything_a_reader_needs_is_there(variant: str, finished: Finished) -> None:
    result = stored(finished("llama"), variant)
    assert set(result) == KEYS and result["variant"] == variant
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    assert result["loss"] == pytest.approx(np.mean(result["windows"])) and len(result["windows"]) == 4
    low, high = result["interval"]
    assert low < result["perplexity"] < high and result["confidence"] == 0.95
    assert result["tokens"] == 4 * 15
    assert result["contract"] == {
        "corpus": "random", "length": 16, "stride": 16, "windows": 4, "scored_per_window": 15, "dtype": "float32",
    }  # fmt: skip


def test_sizes_of_the_variants(finished: Finished) -> None:
    project = finished("gpt2")
    model, masks = project.model, read_masks(project.data / "masks.safetensors", project.model)
    total, block = (sum(p.numel() for p in part.parameters()) for part in (model, blocks_of(model)[0]))
    prunable = sum(keep.numel() for keep in masks.values())
    zeros = {index: sum(int((~keep).sum()) for (b, _), keep in masks.items() if b == index) for index in range(4)}
    expected = {
        "dense": (total, prunable, 0, 4),
        "masked": (total, prunable, sum(zeros.values()), 4),
        "removed": (total - 2 * block, prunable // 2, 0, 2),
        "compressed": (total - 2 * block + 32 * 32, prunable // 2, zeros[0] + zeros[3], 2),
    }
    for variant, (parameters, weights, gone, blocks) in expected.items():
        result = stored(project, variant)
        assert (result["parameters"], result["prunable"], result["zeros"], result["blocks"]) == (
            parameters,
            weights,
            gone,
            blocks,
        )
        assert result["sparsity"] == gone / weights and result["bytes"] == 4 * parameters, "zeros take their place as before"


def test_tied_parameters_count_once(finished: Finished) -> None:
    tied, untied = stored(finished("llama_tied"), "dense"), stored(finished("llama"), "dense")
    assert untied["parameters"] - tied["parameters"] == 96 * 32


@pytest.mark.parametrize("batch_tokens", [1, 32, 48, 10**6])
@pytest.mark.parametrize("logit_bytes", [1, 96 * 4 * 7, 1 << 27])
def test_batches_and_pieces_of_logits_do_not_matter(
    batch_tokens: int, logit_bytes: int, copied: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = copied("gemma2")  # its logits are capped: the head is more than a product
    monkeypatch.setattr(stage, "LOGIT_BYTES", logit_bytes)
    project.params["compute"]["batch_tokens"] = batch_tokens
    ids = load_file(project.data / "tokens.safetensors")["evaluation"]
    np.testing.assert_allclose(evaluate(project, "dense")["windows"], plain_losses(project.model, ids), rtol=1e-5)


@pytest.mark.parametrize("removed", [[0, 2], [1, 3]])
def test_removed_blocks_are_jumped(removed: list[int], copied: Finished) -> None:
    """Also the first and the last, with sliding windows of their own."""
    project = copied("gemma3")
    project.run("removal", removal={"method": "list", "blocks": removed})
    ids = load_file(project.data / "tokens.safetensors")["evaluation"]
    expected = plain_losses(plain_variant(project.model, removed=removed), ids)
    np.testing.assert_allclose(evaluate(project, "removed")["windows"], expected, rtol=1e-5)


def test_the_interval_follows_its_parameters(copied: Finished) -> None:
    project = copied("llama")
    wide, narrow = evaluate(project, "dense", confidence=0.99), evaluate(project, "dense", confidence=0.5)
    assert wide["interval"][0] < narrow["interval"][0] < narrow["interval"][1] < wide["interval"][1]
    assert wide["windows"] == narrow["windows"] and wide["confidence"] == 0.99
    other = evaluate(project, "dense", confidence=0.5, seed=1)
    assert other["interval"] != narrow["interval"] and other["perplexity"] == narrow["perplexity"]


def test_one_window(copied: Finished) -> None:
    project = copied("llama")
    ids = load_file(project.data / "tokens.safetensors")
    write_tensors(project.data / "tokens.safetensors", ids | {"evaluation": ids["evaluation"][:1]})
    result = evaluate(project, "dense")
    assert result["interval"] == [result["perplexity"]] * 2 and result["tokens"] == 15


def test_zeros_that_were_there_before_are_counted(copied: Finished) -> None:
    project = copied("llama")
    path = project.data / "model" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"][3] = 0
    save_file(tensors, path, metadata={"format": "pt"})
    assert evaluate(project, "dense")["zeros"] == 32


@pytest.mark.parametrize(("value", "message"), [(float("nan"), "nan nats"), (1e6, r"\d nats")])
def test_a_loss_that_is_no_number_stops(value: float, message: str, copied: Finished) -> None:
    """A broken head, and one so wild that the perplexity would be infinite."""
    project = copied("llama")
    path = project.data / "model" / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = torch.full_like(tensors["lm_head.weight"], value) * torch.randn(96, 32)
    save_file(tensors, path, metadata={"format": "pt"})
    (project.data / "evaluation" / "dense.json").unlink()
    with pytest.raises(ArtifactError, match=rf"window 0: a mean loss of .*{message}.*final norm and head"):
        evaluate(project, "dense")
    assert not list((project.data / "evaluation").glob("*dense*"))


def test_every_variant_of_an_untouched_model_is_the_model(tmp_path: Path) -> None:
    project = Project(tmp_path, "qwen3", blocks=2)
    project.run_until("evaluation@compressed", allocation={"sparsity": 0.0}, removal={"method": "none"})
    results = [stored(project, variant) for variant in VARIANTS]
    assert all(result | {"variant": ""} == results[0] | {"variant": ""} for result in results)


@pytest.mark.parametrize("overlap", ["new", "published"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_overlapping_windows_against_a_loop(family: str, overlap: Any, tmp_path: Path) -> None:
    """Window after window through the plain model, unpadded, scoring what no earlier window had."""
    project = Project(tmp_path, family, blocks=2)
    ids = torch.randint(3, 96, (43,), generator=torch.Generator().manual_seed(5), dtype=torch.int32)
    contract = Contract(window=16, stride=6, rest="kept", overlap=overlap)
    windows, scored = slide(ids.numpy(), contract)
    tensors = {"evaluation": windows, "scored": scored.astype(np.uint8), "calibration": windows}
    write_tensors(
        project.data / "tokens.safetensors",
        {name: torch.from_numpy(array) for name, array in tensors.items()},
        {"evaluation": {"corpus": "random", **contract.terms()}},
    )
    losses, seen = [], 0
    for begin in range(0, 43, 6):
        end = min(begin + 16, 43)
        logits = project.model(ids[None, begin:end].long()).logits[0].log_softmax(-1).detach()
        new = range(max(seen, begin + 1) + (overlap == "published" and begin > 0), end)
        losses.append([-float(logits[place - begin - 1, ids[place]]) for place in new])
        seen = end
        if end == 43:
            break
    result = evaluate(project, "dense")
    every = [loss for some in losses for loss in some]
    np.testing.assert_allclose(result["windows"], [np.mean(some) for some in losses], rtol=1e-5)
    assert result["tokens"] == len(every) == 42 - (overlap == "published") * (len(losses) - 1)
    assert result["loss"] == pytest.approx(np.mean(every), rel=1e-5), "over tokens, not over windows"
    assert result["perplexity"] == pytest.approx(math.exp(np.mean(every)), rel=1e-5)
    assert result["interval"][0] < result["perplexity"] < result["interval"][1]
    assert (result["contract"]["stride"], result["contract"]["length"]) == (6, 16)
    assert "scored_per_window" not in result["contract"]


@pytest.mark.parametrize("wrong", ["shape", "first", "none"])
def test_scored_tokens_that_cannot_be(wrong: str, copied: Finished) -> None:
    project = copied("llama")
    tensors = load_file(project.data / "tokens.safetensors")
    scored = torch.ones((4, 16), dtype=torch.uint8)
    scored[:, 0] = wrong == "first"
    scored[2] *= wrong != "none"
    tensors["scored"] = scored[:, :5].contiguous() if wrong == "shape" else scored
    write_tensors(project.data / "tokens.safetensors", tensors)
    with pytest.raises(ArtifactError, match=r"tokens\.safetensors: 'scored' .* does not say which tokens of \(4, 16\)"):
        evaluate(project, "dense")

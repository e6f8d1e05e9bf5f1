"""Stage `model` with `grid`: the same checkpoint with the matrices named on their grid, whatever the family and the source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pipeline.errors import PalimpsestError
from stages.decoder.checkpoint import Checkpoint
from stages.decoder.lowbit import quantise
from stages.decoder.matrices import prunable_matrices
from stages.decoder.skeleton import find_blocks
from tests.models import save_model
from tests.stages.test_model import run_model, write_gguf
from tests.vocabulary import save_tokenizer


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path


def matrices_of(model: Any) -> dict[str, torch.Tensor]:
    """Every prunable matrix by block and name."""
    return {
        f"{index}.{matrix.name}": matrix.view(block)
        for index, block in enumerate(find_blocks(model)[1])
        for matrix in prunable_matrices(block)
    }


def others_of(model: Any) -> dict[str, torch.Tensor]:
    inside = {value.untyped_storage().data_ptr() for value in matrices_of(model).values()}
    return {name: p.data for name, p in model.named_parameters() if p.untyped_storage().data_ptr() not in inside}


@pytest.mark.parametrize("family", ["llama_tied", "gpt2", "mixtral", "qwen3_moe", "phi3", "falcon"])
def test_plain_transformers_loads_the_quantised_model(root: Path, family: str) -> None:
    save_tokenizer(root / "any")
    dense = save_model(root / "any", family, blocks=2)
    out = run_model(root, source="folder", path="any", grid="ternary")
    model: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    before = matrices_of(dense)
    for name, value in matrices_of(model).items():
        assert torch.equal(value, quantise(before[name], "ternary")), name
    assert all(torch.equal(value, others_of(dense)[name]) for name, value in others_of(model).items())
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["grid"], manifest["matrices"], manifest["folder"]) == ("ternary", ["*"], ".")


@pytest.mark.parametrize("grid", ["binary", "4bit"])
def test_only_the_matrices_named_in_the_dtype_they_are_stored_in(root: Path, grid: str) -> None:
    save_tokenizer(root / "any")
    dense = save_model(root / "any", "llama", blocks=2).bfloat16()
    dense.save_pretrained(root / "any")
    out = run_model(root, source="folder", path="any", grid=grid, matrices=["mlp.*", "*.o_proj"])
    read = load_file(out / "model.safetensors")
    for name, value in load_file(root / "any" / "model.safetensors").items():
        named = "mlp." in name or "o_proj" in name
        assert read[name].dtype == torch.bfloat16
        assert torch.equal(read[name], quantise(value, grid) if named else value), name
        assert not named or not torch.equal(read[name], value)


def test_shards_and_companions_stay_as_they_are(root: Path) -> None:
    save_tokenizer(root / "any")
    save_model(root / "any", "llama", blocks=3, max_shard_size="20KB")
    out = run_model(root, source="folder", path="any", grid="binary", matrices=["mlp.*"])
    assert Checkpoint(out).shards.keys() == Checkpoint(root / "any").shards.keys()
    names = {path.name for path in (root / "any").iterdir()}
    assert {path.name for path in out.iterdir()} == names | {"manifest.json"} and len(names) > 4
    for name in names - {path.name for path in Checkpoint(root / "any").shards.values()}:
        assert (out / name).read_bytes() == (root / "any" / name).read_bytes()


def test_a_model_in_place(root: Path) -> None:
    """What stage `model` made itself is quantised where it lies."""
    tensors = write_gguf(root / "tiny.gguf")
    out = run_model(root, source="gguf", path="tiny.gguf", dtype="float32", grid="8bit", matrices=["mlp.down_proj"])
    read = load_file(out / "model.safetensors")
    down, up = (torch.from_numpy(tensors[f"blk.0.ffn_{name}"]) for name in ("down", "up"))
    assert torch.equal(read["model.layers.0.mlp.down_proj.weight"], quantise(down, "8bit"))
    assert torch.equal(read["model.layers.0.mlp.up_proj.weight"], up)
    assert not list(out.glob(".*"))


def test_a_second_time_changes_nothing(root: Path) -> None:
    save_tokenizer(root / "any")
    save_model(root / "any", "llama", blocks=2)
    first = run_model(root, source="folder", path="any", grid="ternary").rename(root / "once")
    again = run_model(root, source="folder", path="once", grid="ternary")
    assert (again / "model.safetensors").read_bytes() == (first / "model.safetensors").read_bytes()


def test_bad_matrices_are_named(root: Path) -> None:
    save_tokenizer(root / "any")
    save_model(root / "any", "llama", blocks=2)
    with pytest.raises(PalimpsestError, match=r"model\.matrices: 'mpl\.\*' fits no matrix of a block; there are self_attn"):
        run_model(root, source="folder", path="any", grid="binary", matrices=["mpl.*"])
    tensors = load_file(root / "any" / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][2, 5] = float("nan")
    save_file(tensors, root / "any" / "model.safetensors", {"format": "pt"})
    with pytest.raises(PalimpsestError, match=r"any: block 1, mlp\.up_proj: NaN"):
        run_model(root, source="folder", path="any", grid="binary")
    assert not (root / "data" / "model").exists() and not list((root / "data").glob(".*"))

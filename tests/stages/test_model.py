"""Stage `model`: every source becomes a checkpoint that later stages can read, or one clear message."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, dynamic_module_utils

from pipeline.errors import PalimpsestError
from pipeline.files import Files
from pipeline.packages import sha256_of
from stages.decoder.checkpoint import Checkpoint, CheckpointError
from stages.model import Model, Params
from stages.model.check import check_digits
from stages.model.gguf import drop_quantiser
from stages.model.run import run, whole_folder
from tests.hub import CLOSED, COMMIT, commit_of, serve, use_hub
from tests.models import FAMILIES, save_model
from tests.vocabulary import save_tokenizer


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "project" / "data").mkdir(parents=True)
    return tmp_path / "project"


@pytest.fixture
def source(root: Path) -> Path:
    """A whole checkpoint inside the project."""
    save_tokenizer(root / "models" / "tiny")
    save_model(root / "models" / "tiny", "llama_tied", blocks=2)
    return root / "models" / "tiny"


def run_model(root: Path, **keys: Any) -> Path:
    outputs = Files("model", "outs", ("model",), root)
    run(Params(model=Model(**keys)), Files("model", "deps", (), root), outputs)
    return outputs["model"]


def change_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


# A folder


def test_folder_is_pinned_not_copied(root: Path, source: Path) -> None:
    out = run_model(root, source="folder", path="models/tiny")
    assert [path.name for path in out.iterdir()] == ["manifest.json"]
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["folder"] == "models/tiny"
    pins = {entry["name"]: (entry["bytes"], entry["sha256"]) for entry in manifest["files"]}
    assert pins["model.safetensors"] == ((source / "model.safetensors").stat().st_size, sha256_of(source / "model.safetensors"))
    assert {"config.json", "tokenizer.json", "generation_config.json"} <= set(pins)


@pytest.mark.parametrize("path", ["models/tiny", "{root}/models/tiny", "{root}/../elsewhere", "../elsewhere"])
def test_folder_is_found_again(root: Path, source: Path, path: str) -> None:
    shutil.copytree(source, root.parent / "elsewhere")
    checkpoint = Checkpoint(run_model(root, source="folder", path=path.format(root=root)))
    assert torch.equal(checkpoint.read("model.norm.weight"), load_file(source / "model.safetensors")["model.norm.weight"])


def test_a_path_is_kept_as_written(root: Path, source: Path) -> None:
    """A cell of a study works in another folder and gets this manifest from the cache: an absolute path must still be one."""
    for path in (str(source), "models/tiny"):
        out = run_model(root, source="folder", path=path)
        manifest = json.loads((out / "manifest.json").read_text())
        assert manifest["folder"] == path and not manifest["trust_remote_code"]
    elsewhere = root.parent / "elsewhere"
    shutil.copytree(run_model(root, source="folder", path=str(source)), elsewhere / "data" / "model")
    assert Checkpoint(elsewhere / "data" / "model").folder.samefile(source)


def test_only_files_of_the_checkpoint_are_pinned(root: Path, source: Path) -> None:
    for name in ("README.md", "consolidated.safetensors", "pytorch_model.bin", "modeling_x.py"):
        (source / name).write_text("x")
    manifest = json.loads((run_model(root, source="folder", path="models/tiny") / "manifest.json").read_text())
    names = {entry["name"] for entry in manifest["files"]}
    assert not names & {"README.md", "consolidated.safetensors", "pytorch_model.bin", "modeling_x.py"}


def test_folder_that_changed_is_noticed_by_later_stages(root: Path, source: Path) -> None:
    out = run_model(root, source="folder", path="models/tiny")
    with (source / "tokenizer.json").open("a") as file:
        file.write(" ")
    with pytest.raises(
        CheckpointError,
        match=r"tokenizer\.json has \d+ bytes instead of \d+: the checkpoint changed since stage 'model' ran; run: dvc repro",
    ):
        Checkpoint(out)
    (source / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is gone"):
        Checkpoint(out)


def test_sharded_folder(root: Path, source: Path) -> None:
    model = save_model(source, "qwen3_moe", blocks=2, max_shard_size="20KB")
    (source / "model.safetensors").unlink()
    checkpoint = Checkpoint(run_model(root, source="folder", path="models/tiny"))
    assert len(set(checkpoint.shards.values())) > 2
    pinned = {entry["name"] for entry in checkpoint.manifest["files"]}
    assert pinned >= {path.name for path in checkpoint.shards.values()} | {"model.safetensors.index.json"}
    assert sum(checkpoint.read(name).numel() for name in checkpoint.names()) == sum(p.numel() for p in model.parameters())
    for name, (shape, dtype) in checkpoint.specs.items():
        tensor = checkpoint.read(name)
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)


@pytest.mark.parametrize("family", FAMILIES)
def test_folders_of_every_family_pass_the_check(root: Path, family: str, capsys: pytest.CaptureFixture[str]) -> None:
    save_tokenizer(root / "any")
    model = save_model(root / "any", family, blocks=2)
    run_model(root, source="folder", path="any")
    assert f"{model.config.model_type}, " in capsys.readouterr().out


def test_broken_folders_are_named(root: Path, source: Path) -> None:
    def refused(match: str, path: str = "models/tiny") -> None:
        with pytest.raises(PalimpsestError, match=match):
            run_model(root, source="folder", path=path)
        assert not (root / "data" / "model").exists()
        assert not list((root / "data").glob(".*"))

    weights = (source / "model.safetensors").read_bytes()
    refused(r"models/gone: no such folder; check model\.path", path="models/gone")
    (root / "empty").mkdir()
    refused(r"empty: no config\.json", path="empty")

    (source / "model.safetensors").write_bytes(weights[:-100])
    refused(r"model\.safetensors: truncated: \d+ bytes, but its header promises \d+")
    (source / "model.safetensors").write_bytes(weights[:50])
    refused(r"model\.safetensors: truncated or not a safetensors file")
    (source / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    refused(r"model\.safetensors: truncated or not a safetensors file")

    (source / "model.safetensors").unlink()
    refused(r"no model\.safetensors and no model\.safetensors\.index\.json")
    (source / "pytorch_model.bin").write_bytes(b"\x80")
    refused(r"only pickled weights \(pytorch_model\.bin\), and nothing is unpickled here .*save_pretrained")
    (source / "model.safetensors").write_bytes(weights)

    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).unlink()
    refused(r"no tokenizer files \(tokenizer\.json")
    (source / "tokenizer.json").write_text("{}")
    refused(r"transformers cannot read the tokenizer")


def test_broken_shards_are_named(root: Path, source: Path) -> None:
    save_model(source, "llama", blocks=2, max_shard_size="20KB")
    (source / "model.safetensors").unlink()
    index = source / "model.safetensors.index.json"
    files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    content = (source / files[1]).read_bytes()
    (source / files[1]).unlink()
    with pytest.raises(PalimpsestError, match=rf"1 of the {len(files)} files that .* names are missing \({files[1]}\)"):
        run_model(root, source="folder", path="models/tiny")
    (source / files[1]).write_bytes((source / files[0]).read_bytes())
    with pytest.raises(PalimpsestError, match=rf"{files[1]}: no tensor '.*', though .* says so"):
        run_model(root, source="folder", path="models/tiny")
    (source / files[1]).write_bytes(content)
    index.write_text("[]")
    with pytest.raises(PalimpsestError, match="not an index of shards"):
        run_model(root, source="folder", path="models/tiny")


def test_missing_and_misshapen_tensors_are_named(root: Path, source: Path) -> None:
    tensors = load_file(source / "model.safetensors")
    lacking = {name: tensor for name, tensor in tensors.items() if "layers.1.mlp.up_proj" not in name}
    save_file(lacking, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        PalimpsestError, match=r"1 tensors that config\.json calls for are missing \(model\.layers\.1\.mlp\.up_proj\.weight\)"
    ):
        run_model(root, source="folder", path="models/tiny")
    save_file({**tensors, "model.norm.weight": torch.ones(7)}, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(PalimpsestError, match=r"model\.norm\.weight has shape \(7,\) but config\.json calls for \(32,\)"):
        run_model(root, source="folder", path="models/tiny")


def test_quantised_and_unknown_checkpoints_are_refused(root: Path, source: Path) -> None:
    original = (source / "config.json").read_text()
    change_json(source / "config.json", quantization_config={"quant_method": "fp8"})
    with pytest.raises(PalimpsestError, match="the weights are quantised"):
        run_model(root, source="folder", path="models/tiny")
    (source / "config.json").write_text(original.replace('"llama"', '"never-heard-of"'))
    with pytest.raises(PalimpsestError, match=r"config\.json: transformers cannot read it .*never-heard-of"):
        run_model(root, source="folder", path="models/tiny")
    (source / "config.json").write_text(original.replace('"llama"', '"vit"'))
    with pytest.raises(PalimpsestError, match="cannot load this as a causal language model"):
        run_model(root, source="folder", path="models/tiny")


# Code that comes with a checkpoint

CONFIGURATION = """
from pathlib import Path
from transformers import LlamaConfig
Path({marker!r}).write_text("ran")
class OwnConfig(LlamaConfig):
    model_type = "own"
"""
MODELLING = """
from transformers import LlamaForCausalLM
from .configuration_own import OwnConfig
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_remote_code_runs_only_when_trusted(root: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != vars(dynamic_module_utils)["HF_MODULES_CACHE"]])
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(root / "modules"))
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)  # imported by another test from another folder
    marker = root / "marker"
    (source / "configuration_own.py").write_text(CONFIGURATION.format(marker=str(marker)))
    (source / "modeling_own.py").write_text(MODELLING)
    classes = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    change_json(source / "config.json", model_type="own", architectures=["OwnForCausalLM"], auto_map=classes)

    with pytest.raises(PalimpsestError, match=r"set model\.trust_remote_code: true"):
        run_model(root, source="folder", path="models/tiny")
    assert not marker.exists()

    checkpoint = Checkpoint(run_model(root, source="folder", path="models/tiny", trust_remote_code=True))
    assert marker.exists()
    assert checkpoint.trust_remote_code
    assert type(checkpoint.config).__name__ == "OwnConfig"
    assert {"configuration_own.py", "modeling_own.py"} <= {entry["name"] for entry in checkpoint.manifest["files"]}


# GGUF


def write_gguf(path: Path, tied: bool = True) -> dict[str, np.ndarray]:
    """A tiny Llama with 2 heads of 16 as llama.cpp stores it; returns the tensors, quantised ones already unpacked."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    vocabulary = ["<pad>", "<s>", "</s>", "<unk>", *"abcdefghijklmnopqrstuvwxyz0123456789.,", "\u0120", "\u010a", "ab"]
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3] * 4 + [1] * (len(vocabulary) - 4))
    writer.add_token_merges(["a b"])
    for name, index in (("bos", 1), ("eos", 2), ("unk", 3), ("pad", 0)):
        getattr(writer, f"add_{name}_token_id")(index)
    shapes = {"token_embd": (len(vocabulary), 32), "output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
    shapes |= {f"blk.0.attn_{name}": (32, 32) for name in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_gate": (64, 32), "blk.0.ffn_up": (64, 32), "blk.0.ffn_down": (32, 64)}
    shapes |= {} if tied else {"output": (len(vocabulary), 32)}
    random, tensors = np.random.default_rng(0), {}
    for name, shape in shapes.items():
        value = random.normal(size=shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q4_1 if len(shape) == 2 else gguf.GGMLQuantizationType.F32
        packed = gguf.quantize(value, kind)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
        tensors[name] = gguf.dequantize(packed, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def unpermuted(weight: np.ndarray, heads: int = 2) -> np.ndarray:
    """llama.cpp interleaves the two halves of each query and key head; this puts them one behind the other."""
    rows = [head * 16 + 2 * place + half for head in range(heads) for half in (0, 1) for place in range(8)]
    return weight[rows]


@pytest.mark.parametrize("tied", [True, False])
def test_gguf_becomes_an_ordinary_checkpoint(root: Path, tied: bool) -> None:
    tensors = write_gguf(root / "tiny.gguf", tied)
    out = run_model(root, source="gguf", path="tiny.gguf", dtype="float32")
    checkpoint = Checkpoint(out)
    assert checkpoint.folder == out
    assert checkpoint.config.tie_word_embeddings is tied
    assert ("lm_head.weight" in checkpoint) is not tied
    assert not (out / "config.json").read_text().count("quantization")
    read = {name: checkpoint.read(name).numpy() for name in checkpoint.names()}
    assert np.array_equal(read["model.embed_tokens.weight"], tensors["token_embd"])
    assert np.array_equal(read["model.layers.0.mlp.down_proj.weight"], tensors["blk.0.ffn_down"])
    assert np.array_equal(read["model.layers.0.self_attn.q_proj.weight"], unpermuted(tensors["blk.0.attn_q"]))
    assert np.array_equal(read["model.layers.0.self_attn.v_proj.weight"], tensors["blk.0.attn_v"])
    assert len(read) == len(tensors)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.tokenize("abc 2048") == ["ab", "c", "\u0120", "2", "0", "4", "8"]
    assert tokenizer.bos_token_id == 1
    model = AutoModelForCausalLM.from_pretrained(out)
    assert torch.isfinite(model(torch.tensor([[1, 5, 6]])).logits).all()


def test_gguf_dtype_and_equal_bytes(root: Path) -> None:
    write_gguf(root / "tiny.gguf")
    out = run_model(root, source="gguf", path="tiny.gguf", dtype="bfloat16")
    first = {path.name: sha256_of(path) for path in out.iterdir()}
    run_model(root, source="gguf", path="tiny.gguf", dtype="bfloat16")
    assert {path.name: sha256_of(path) for path in out.iterdir()} == first
    assert {dtype for _, dtype in Checkpoint(out).specs.values()} == {torch.bfloat16}
    assert all(str(root) not in path.read_text() for path in out.glob("*.json"))


def test_quantiser_is_taken_off_where_transformers_leaves_it_on(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32)
    assert getattr(model, "hf_quantizer", None) is not None
    drop_quantiser(model)
    model.save_pretrained(tmp_path / "out")
    assert "quantization" not in (tmp_path / "out" / "config.json").read_text()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").lm_head.weight.dtype == torch.float32


def test_what_is_no_gguf_is_refused(root: Path) -> None:
    with pytest.raises(PalimpsestError, match=r"gone\.gguf: no such file; check model\.path"):
        run_model(root, source="gguf", path="gone.gguf")
    (root / "text.gguf").write_text("this is no model at all, only some words in a file")
    with pytest.raises(PalimpsestError, match=r"text\.gguf: not a GGUF file that transformers can read"):
        run_model(root, source="gguf", path="text.gguf")
    write_gguf(root / "whole.gguf")
    (root / "cut.gguf").write_bytes((root / "whole.gguf").read_bytes()[:-5000])
    with pytest.raises(PalimpsestError, match=r"cut\.gguf: not a GGUF file that transformers can read"):
        run_model(root, source="gguf", path="cut.gguf")


def test_digits_must_come_out_one_by_one(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path)
    check_digits(tokenizer)
    tokenizer.add_tokens(["20"])
    with pytest.raises(PalimpsestError, match="instead of digits"):
        check_digits(tokenizer)


# The hub


def test_hub_snapshot_is_pinned_by_commit_and_read_offline(root: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pytorch_model.bin", "README.md", "own.py", "consolidated.safetensors"):
        (source / name).write_text("x")
    cache = root / "cache"
    with serve({"someone/tiny": source}) as address:
        use_hub(monkeypatch, address, cache)
        out = run_model(root, source="hub", repository="someone/tiny")
    assert [path.name for path in out.iterdir()] == ["manifest.json"]
    text = (out / "manifest.json").read_text()
    assert (json.loads(text)["repository"], json.loads(text)["commit"]) == ("someone/tiny", COMMIT)
    assert str(root) not in text

    use_hub(monkeypatch, CLOSED, cache)  # from here on without network
    checkpoint = Checkpoint(out)
    fetched = {path.name for path in checkpoint.folder.iterdir()}
    assert "model.safetensors" in fetched
    assert not fetched & {"pytorch_model.bin", "README.md", "own.py", "consolidated.safetensors"}
    assert torch.equal(checkpoint.read("model.norm.weight"), load_file(source / "model.safetensors")["model.norm.weight"])
    again = run_model(root, source="hub", repository="someone/tiny")
    assert (again / "manifest.json").read_text() == text

    shutil.rmtree(cache)
    with pytest.raises(CheckpointError, match=r"someone/tiny at commit 0123456789ab is no longer in the Hugging Face cache"):
        Checkpoint(out)


def test_hub_revisions_are_checkpoints_of_their_own(root: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = root / "models" / "earlier"
    shutil.copytree(source, earlier)
    weights = load_file(source / "model.safetensors")
    save_file({name: one * 2 for name, one in weights.items()}, earlier / "model.safetensors", {"format": "pt"})
    norms = {}
    with serve({"someone/tiny": source, "someone/tiny@step1": earlier}) as address:
        use_hub(monkeypatch, address, root / "cache")
        for revision in ("step1", "main", commit_of("step1")):
            out = run_model(root, source="hub", repository="someone/tiny", revision=revision)
            commit = json.loads((out / "manifest.json").read_text())["commit"]
            norms[revision] = commit, Checkpoint(out).read("model.norm.weight")
    assert norms["main"][0] == COMMIT and norms["step1"][0] == norms[commit_of("step1")][0] == commit_of("step1")
    assert torch.equal(norms["main"][1], weights["model.norm.weight"])
    assert torch.equal(norms["step1"][1], 2 * weights["model.norm.weight"])


def test_hub_refusals_say_what_to_do(root: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pickled = root / "pickled"
    pickled.mkdir()
    (pickled / "pytorch_model.bin").write_bytes(b"x")
    with serve({"someone/tiny": source, "gated/tiny": source, "someone/pickled": pickled}) as address:
        use_hub(monkeypatch, address, root / "cache")
        for repository, revision, match in (
            ("someone/gone", "main", r"someone/gone: not found on the hub, or private; check model\.repository"),
            ("someone/tiny", "v9", r"someone/tiny: no revision 'v9' on the hub; check model\.revision"),
            ("gated/tiny", "main", r"gated/tiny: gated; accept its terms on the hub and log in"),
            ("someone/pickled", "main", r"only pickled weights \(pytorch_model\.bin\), and nothing is unpickled here"),
            ("not a/name/at all", "main", r"model\.repository = .*: not a repository name"),
        ):
            with pytest.raises(PalimpsestError, match=match):
                run_model(root, source="hub", repository=repository, revision=revision)


def test_hub_without_network(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_hub(monkeypatch, CLOSED, root / "cache")
    with pytest.raises(
        PalimpsestError, match=r"someone/tiny: the hub cannot be reached \(ConnectError.*set model\.source: folder"
    ):
        run_model(root, source="hub", repository="someone/tiny")


# Interruptions


def test_failure_leaves_the_former_output(tmp_path: Path) -> None:
    out = tmp_path / "model"
    with whole_folder(out) as folder:
        (folder / "a").write_text("first")
    with pytest.raises(RuntimeError), whole_folder(out) as folder:
        (folder / "a").write_text("second")
        raise RuntimeError
    assert [(path.name, path.read_text()) for path in out.iterdir()] == [("a", "first")]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    (tmp_path / ".model.partial").mkdir()
    (tmp_path / ".model.partial" / "left").write_text("by a run that was killed")
    with whole_folder(out) as folder:
        (folder / "b").write_text("third")
    assert [path.name for path in out.iterdir()] == ["b"]

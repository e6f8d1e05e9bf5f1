"""The export: ends and several runs removed, shards, ties, types, and what must not be exported."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.errors import PalimpsestError
from pipeline.tensors import write_tensors
from stages.compress import run as stage
from stages.compress.config import shorten_config
from stages.compress.modeling import ghost_places, modeling_source
from tests.models import FAMILIES, _config
from tests.plain import plain_logits, plain_variant, read_masks, read_operators, relative_gap
from tests.project import Project
from tests.stages.conftest import Finished
from tests.stages.test_families import PROMPT, reload

# The first (an operator before what is left), the last, several runs, all but one, none.
REMOVED = [[0], [3], [0, 3], [0, 2], [1, 3], [0, 1, 2], [1, 2, 3], []]
CASES = [("llama", removed) for removed in REMOVED]
CASES += [(family, removed) for family in ("gpt2", "falcon", "gemma2", "qwen3_moe") for removed in ([0, 3], [0, 2], [1, 2, 3])]


def export(project: Project, removed: list[int]) -> Path:
    project.run("removal", removal={"method": "list", "blocks": removed} if removed else {"method": "none"})
    project.run("ghost")
    return project.run("compress")


def expected_logits(project: Project, removed: list[int]) -> Tensor:
    masks = read_masks(project.data / "masks.safetensors", project.model)
    operators = read_operators(project.data / "ghost.safetensors")
    return plain_logits(plain_variant(project.model, masks, removed, operators), PROMPT)


@pytest.mark.parametrize(("family", "removed"), CASES)
def test_any_blocks_may_go(family: str, removed: list[int], copied: Finished) -> None:
    project = copied(family)
    model = reload(export(project, removed), trust_remote_code=True)
    logits = plain_logits(model, PROMPT)
    assert relative_gap(logits, expected_logits(project, removed)) < 1e-5
    more: dict[str, Any] = {
        "attention_mask": torch.ones_like(PROMPT),
        "max_new_tokens": 5,
        "min_new_tokens": 5,
        "do_sample": False,
    }
    assert torch.equal(model.generate(PROMPT, use_cache=True, **more), model.generate(PROMPT, use_cache=False, **more))


@pytest.mark.parametrize("family", ["llama_tied", "mixtral", "phi3"])
@pytest.mark.parametrize("removed", [[1, 2], []])
def test_shards_hold_the_same(family: str, removed: list[int], copied: Finished) -> None:
    """Of the size that the original's have; a single file stays one."""
    project = copied(family)
    folder = export(project, removed)
    whole = load_file(folder / "model.safetensors")
    shutil.rmtree(project.data / "model")
    project.model.save_pretrained(project.data / "model", max_shard_size="20KB")
    sizes = [path.stat().st_size for path in (project.data / "model").glob("*.safetensors")]
    assert len(sizes) > 1
    project.run("compress")
    assert {path.name for path in folder.iterdir()} >= {"config.json", "README.md"}
    assert not list(folder.glob("part-*")) and not list(folder.glob("shard-*"))
    written = [path.stat().st_size for path in folder.glob("*.safetensors")]
    largest = max(*sizes, *(value.nbytes for value in whole.values()))  # tensors are not split
    assert max(written) <= largest + 4000 and sum(written) > max(sizes), "a header comes on top"
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(files) > 1 and files == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    parts = {name: (file, value) for file in files for name, value in load_file(folder / file).items()}
    assert index["weight_map"] == {name: file for name, (file, _) in parts.items()}
    assert index["metadata"]["total_size"] == sum(value.nbytes for _, value in parts.values())
    assert parts.keys() == whole.keys() and all(torch.equal(parts[name][1], value) for name, value in whole.items())
    model = reload(folder, trust_remote_code=True)
    assert relative_gap(plain_logits(model, PROMPT), expected_logits(project, removed)) < 1e-5


@pytest.mark.parametrize("family", ["llama_tied", "gpt2", "gemma2", "bloom"])
def test_a_tied_matrix_is_stored_once(family: str, copied: Finished) -> None:
    project = copied(family)
    for removed in ([], [1]):
        model = reload(export(project, removed), trust_remote_code=True)
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        stored = load_file(project.data / "compressed" / "model.safetensors")
        assert "lm_head.weight" not in stored
        assert sum(value.numel() for value in stored.values()) == sum(p.numel() for p in model.parameters())


def test_an_untied_head_is_kept(copied: Finished) -> None:
    project = copied("llama")
    stored = load_file(export(project, []) / "model.safetensors")
    assert not torch.equal(stored["lm_head.weight"], stored["model.embed_tokens.weight"])


def test_nothing_removed_and_nothing_masked_is_the_model_itself(copied: Finished) -> None:
    project = copied("mixtral")
    project.run("allocation", allocation={"sparsity": 0.0})
    project.run("masking")
    folder = export(project, [])
    before = load_file(project.data / "model" / "model.safetensors")
    after = load_file(folder / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(after[name], value) for name, value in before.items())


def test_masked_zeros_have_no_sign(copied: Finished) -> None:
    """-0.0 would be a zero all the same, but other bytes than 0.0."""
    project = copied("llama")
    for value in load_file(export(project, []) / "model.safetensors").values():
        assert not (value[value == 0].view(torch.int32) != 0).any()


def test_the_stored_dtype_is_kept(tmp_path: Path) -> None:
    """Whatever the forward passes ran in; operators are stored in it too."""
    project = Project(tmp_path, "llama_tied", blocks=3)
    project.model.to(torch.bfloat16).save_pretrained(project.data / "model")
    project.run_until("compress", removal={"method": "list", "blocks": [1]})
    stored = load_file(project.data / "compressed" / "model.safetensors")
    assert {value.dtype for value in stored.values()} == {torch.bfloat16}
    operator = read_operators(project.data / "ghost.safetensors")[1, 2]
    assert torch.equal(stored["model.layers.0.ghost_after.0.linear.weight"], operator.T.to(torch.bfloat16))
    assert json.loads((project.data / "compressed" / "config.json").read_text())["dtype"] == "bfloat16"
    assert reload(project.data / "compressed", trust_remote_code=True).dtype == torch.bfloat16


def test_every_tensor_keeps_its_own_dtype(tmp_path: Path) -> None:
    """Norms in float32 among weights in bfloat16, and one block's matrix too; values that bfloat16 cannot hold."""
    project = Project(tmp_path, "llama", blocks=3)
    source = project.data / "model" / "model.safetensors"
    wide = lambda name: "norm" in name or "layers.2.mlp.up_proj" in name  # noqa: E731
    state = {name: value + 1e-5 if wide(name) else value.bfloat16() for name, value in load_file(source).items()}
    save_file(state, source, metadata={"format": "pt"})
    project.run_until("compress", allocation={"sparsity": 0.0}, removal={"method": "list", "blocks": [1]})
    stored = load_file(project.data / "compressed" / "model.safetensors")
    assert stored.pop("model.layers.0.ghost_after.0.linear.weight").dtype == torch.bfloat16
    for name, value in stored.items():
        before = state[name.replace("layers.1.", "layers.2.")]
        assert value.dtype == before.dtype == (torch.float32 if wide(name.replace("layers.1.", "layers.2.")) else torch.bfloat16)
        assert torch.equal(value, before)
    assert json.loads((project.data / "compressed" / "config.json").read_text())["dtype"] == "bfloat16"


def test_companions_come_along_and_a_card_is_written(copied: Finished) -> None:
    project = copied("llama")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        (project.data / "model" / name).write_text('{"name": "kept"}')
    folder = export(project, [1, 3])
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        assert (folder / name).read_text() == '{"name": "kept"}'
    card = (folder / "README.md").read_text()
    assert (
        "LlamaForCausalLM of 4 blocks" in card
        and "Removed blocks (indices of the dense model, from 0): 1, 3, chosen by list." in card
    )
    assert "trust_remote_code=True" in card and "for block 1, for block 3." in card
    assert "- 0.5000 of the prunable weights of the blocks that stay are masked (method wanda, pattern unstructured" in card
    assert "ridge 0.0001" in card and "held_out 0.125" in card and "accumulate model" in card
    assert "- For block 1 the ridge used is 0.0001, relative" in card
    assert "trust_remote_code" not in (export(project, []) / "README.md").read_text()


def test_the_card_says_what_was_really_used(copied: Finished) -> None:
    project = copied("llama")
    project.run("allocation", allocation={"sparsity": 0.0})
    project.run("masking")
    project.run("removal", removal={"method": "list", "blocks": [1, 2]})
    project.run("ghost", ghost={"ridge_rule": "held_out", "ridge_grid": [0.5], "sinks": "weight", "accumulate": "float32"})
    project.run("compress")
    card = (project.data / "compressed" / "README.md").read_text()
    assert "No weights are masked." in card and "zeros" not in card
    for setting in ("ridge_grid [0.5]", "sink_threshold 10.0", "sink_weight 0.01", "accumulate float32"):
        assert setting in card
    assert "For blocks 1 to 2 the ridge used is 0.5" in card


def test_the_card_says_how_weights_and_blocks_were_chosen(copied: Finished) -> None:
    project = copied("llama")
    project.run("allocation", allocation={"method": "pals", "sparsity": 0.5})
    project.run("masking", masking={"method": "sparsegpt"})
    project.run("removal", removal={"method": "shortgpt", "count": 1})
    project.run("ghost", ghost={"sinks": "restore", "sink_threshold": 1e6})
    project.run("compress", allocation={"method": "pals", "sparsity": 0.5}, masking={"method": "sparsegpt"})
    card = (project.data / "compressed" / "README.md").read_text()
    assert "chosen by shortgpt (axis token, spacing 0)." in card and "rounding exact" in card and "block 128" in card
    assert "Shared out by pals (sparsity 0.5, " in card and "percentile 99.0" in card
    assert "no sink token was found that a rule tells, so none is treated apart" in card
    assert "whole n" not in card
    project.run("masking", masking={"pattern": "4:8"})
    project.run("compress", masking={"pattern": "4:8"})
    card = (project.data / "compressed" / "README.md").read_text()
    assert "projection projected); the pattern rounds the shares to whole n of 8, which can make them equal." in card
    project.run("compress", allocation={"method": "uniform"})
    assert "whole n" not in (project.data / "compressed" / "README.md").read_text()


def test_code_beside_a_checkpoint_that_was_not_run_is_not_exported(copied: Finished) -> None:
    """Evaluation trusts the code in `compressed/`, so only the file written here may lie there."""
    project = copied("llama")
    source, marker = project.data / "model", project.root / "ran"
    config = json.loads((source / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel"}
    (source / "config.json").write_text(json.dumps(config))
    code = f"open({str(marker)!r}, 'w')\nfrom transformers import LlamaConfig as EvilConfig, LlamaForCausalLM as EvilModel\n"
    (source / "evil.py").write_text(code)
    for removed in ([], [1]):
        folder = export(project, removed)
        project.run("evaluation@compressed")
        assert not (folder / "evil.py").exists() and "evil" not in (folder / "config.json").read_text()
    assert not marker.exists()


def test_a_killed_export_leaves_the_old_one(copied: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    project = copied("llama")
    before = {path.name: path.read_bytes() for path in (project.data / "compressed").iterdir()}

    def full(*_: object) -> int:
        raise PalimpsestError("disk full")

    monkeypatch.setattr(stage, "write_shards", full)
    with pytest.raises(PalimpsestError, match="disk full"):
        export(project, [])
    assert {path.name: path.read_bytes() for path in (project.data / "compressed").iterdir()} == before
    assert not list(project.data.glob(".*partial*"))


def test_operators_of_other_runs_are_refused(copied: Finished) -> None:
    project = copied("llama")
    export(project, [1, 2])
    project.run("removal", removal={"method": "list", "blocks": [2]})
    with pytest.raises(PalimpsestError, match=r"ghost\.safetensors: the removed blocks ask for runs\.2-3, not runs\.1-3"):
        project.run("compress")


@pytest.mark.parametrize("family", ["gpt_neo", "llama4", "smollm3", "gpt_oss"])
def test_blocks_that_know_their_place_are_renumbered(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a name of their own (GPT-Neo), by lists of indices (Llama 4), of kinds (all four); with transposed experts (GPT-OSS)."""
    monkeypatch.setitem(FAMILIES, family, MORE[family])
    project = Project(tmp_path, family)
    project.run("capture")
    project.run("redundancy")
    project.run("search")
    table = "block,matrix,sparsity\n" + "".join(f"{block},,0.0\n" for block in range(4))
    (project.data / "allocation.csv").write_text(table)
    write_tensors(project.data / "statistics.safetensors", {"none": torch.zeros(1)})
    project.run("masking", masking={"method": "magnitude"})
    model = reload(export(project, [1, 2]), trust_remote_code=True)
    operators = read_operators(project.data / "ghost.safetensors")
    expected = plain_logits(plain_variant(project.model, None, [1, 2], operators), PROMPT)
    assert relative_gap(plain_logits(model, PROMPT), expected) < 1e-5


KV: dict[str, Any] = {"num_key_value_heads": 2}
MORE: dict[str, Callable[[int], Any]] = {
    "gpt_neo": lambda blocks: transformers.GPTNeoConfig(
        vocab_size=96, hidden_size=32, num_layers=blocks, num_heads=4, max_position_embeddings=64, window_size=4,
        attention_types=[[["global", "local"], blocks // 2]], bos_token_id=1, eos_token_id=2, pad_token_id=0,
    ),
    "llama4": _config("Llama4TextConfig", num_local_experts=4, num_experts_per_tok=1, head_dim=8, intermediate_size_mlp=48, **KV),
    "smollm3": _config("SmolLM3Config", **KV),
    "gpt_oss": _config("GptOssConfig", num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=4, **KV),
}  # fmt: skip


def test_a_block_that_would_become_another_kind_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second block is a mixture of experts, by its position: block 2 cannot become block 1."""
    config = _config(
        "Qwen3MoeConfig", num_experts=4, num_experts_per_tok=2, head_dim=8, moe_intermediate_size=24, decoder_sparse_step=2, **KV
    )
    monkeypatch.setitem(FAMILIES, "every second", config)
    project = Project(tmp_path, "every second")
    project.run_until("masking")
    with pytest.raises(PalimpsestError, match=r"block 2 would become block 1, .*choose other blocks in removal"):
        export(project, [1])
    model = reload(export(project, [1, 2]), trust_remote_code=True)
    assert relative_gap(plain_logits(model, PROMPT), expected_logits(project, [1, 2])) < 1e-5


def test_lists_of_a_config_are_cut_or_renumbered() -> None:
    class Config(SimpleNamespace):
        def get_text_config(self) -> Config:
            return self

    config = Config(
        num_hidden_layers=4, eos_token_id=[7, 8, 9, 10], layer_types=["a", "b", "c", "d"],
        no_rope_layers=[1, 1, 0, 1], moe_layers=[0, 1, 2, 3], mlp_only_layers=[3], dense_layers=[1], other=[1, 2],
    )  # fmt: skip
    short = shorten_config(config, [0, 3], 4)
    assert short.num_hidden_layers == 2 and short.layer_types == ["a", "d"]
    assert short.no_rope_layers == [1, 1], "one entry per block"
    assert (short.moe_layers, short.mlp_only_layers, short.dense_layers) == ([0, 1], [1], []), "indices"
    assert short.eos_token_id == [7, 8, 9, 10] and short.other == [1, 2]
    assert config.num_hidden_layers == 4 and config.layer_types == ["a", "b", "c", "d"], "the original is not touched"


def test_places_of_operators() -> None:
    assert ghost_places([(2, 4)], [0, 1, 4]) == [(1, "after")]
    assert ghost_places([(0, 2), (3, 4)], [2, 4]) == [(0, "before"), (0, "after")]
    assert ghost_places([(0, 1), (2, 3), (5, 7)], [1, 3, 4]) == [(0, "before"), (0, "after"), (2, "after")]
    assert ghost_places([], [0]) == []


def test_a_model_with_code_of_its_own_gets_no_operators() -> None:
    class Custom:
        config = SimpleNamespace(model_type="custom")

    with pytest.raises(PalimpsestError, match=r"Custom: ghosts cannot be exported.*ghost\.method: none"):
        modeling_source(Custom(), "model.layers")


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_the_export_is_recounted_against_the_masks(
    family: str, copied: Finished, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A weight that comes back on its way to the disk is found there, and nothing is left under the export's name."""
    project = copied(family)
    project.run("compress")
    masks = read_masks(project.data / "masks.safetensors", project.model)
    zeros = sum(int((~keep).sum()) for (block, _), keep in masks.items() if block in (0, 3))
    assert f"read back from the export: all {zeros:,} masked weights are zero" in capsys.readouterr().out
    whole = stage.write_shards

    def spoilt(folder: Path, parts: Any, limit: int | None) -> int:
        total = whole(folder, parts, limit)
        path = folder / "model.safetensors"
        state = load_file(path)
        name = max(name for name in state if ".1." in name and state[name].ndim == 2 and not state[name].all())
        state[name][state[name] == 0] = 0.5
        save_file(state, path, metadata={"format": "pt"})
        return total

    monkeypatch.setattr(stage, "write_shards", spoilt)
    shutil.rmtree(project.data / "compressed")
    with pytest.raises(
        PalimpsestError, match=r"model\.safetensors: '.*\.1\..*' \(block 3 of the dense model\): \d+ weights that"
    ):
        project.run("compress")
    assert not (project.data / "compressed").exists()

"""The tape is the residual stream of the plain model, or a clear message."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.artifacts import ArtifactError
from pipeline.errors import PalimpsestError
from pipeline.tensors import TensorFile, write_tensors
from tests.models import FAMILIES, _config
from tests.plain import relative_gap
from tests.project import Project
from tests.stages.conftest import Finished

NORMS = {"llama": "model.norm", "gpt2": "transformer.ln_f", "gemma2": "model.norm", "neox": "gpt_neox.final_layer_norm"}


def read_tape(project: Project) -> list[torch.Tensor]:
    return [value for _, value in sorted(load_file(project.data / "tape.safetensors").items())]


@pytest.mark.parametrize("family", NORMS)
def test_boundaries_are_the_hidden_states_of_transformers(family: str, finished: Finished) -> None:
    """Their last hidden state stands behind the final norm, ours before it."""
    project = finished(family)
    ids = load_file(project.data / "tokens.safetensors")["calibration"]
    with torch.no_grad():
        *states, last = project.model(input_ids=ids.long(), output_hidden_states=True, use_cache=False).hidden_states
        tape = read_tape(project)
        assert len(tape) == len(states) + 1 == 5
        for found, expected in zip(tape, states, strict=False):
            assert relative_gap(found, expected) < 1e-6
        assert relative_gap(tape[-1], last) > 1e-3
        assert relative_gap(project.model.get_submodule(NORMS[family])(tape[-1]), last) < 1e-5


def test_the_header_says_what_it_is(finished: Finished) -> None:
    file = TensorFile(finished("llama").data / "tape.safetensors")
    assert file.names() == [f"boundary.{index:04d}" for index in range(5)]
    assert file.shape("boundary.0003") == (6, 16, 32)
    assert file.metadata == {"axes": ["window", "token", "channel"], "boundaries": 5}


@pytest.mark.parametrize("batch_tokens", [1, 16, 80, 10**6])
def test_the_size_of_batches_does_not_matter(batch_tokens: int, copied: Finished) -> None:
    """Less than a window, one window, five of six windows, all at once."""
    project = copied("mistral_sliding")
    before = read_tape(project)
    project.run("capture", compute={"batch_tokens": batch_tokens})
    for found, expected in zip(read_tape(project), before, strict=True):
        assert relative_gap(found, expected) < 1e-6


ODD: dict[str, Any] = {"hidden_size": 20, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 27}


@pytest.mark.parametrize(
    ("name", "config", "blocks"),
    [
        ("odd widths", _config("LlamaConfig", **ODD), 3),
        ("one block", _config("LlamaConfig"), 1),
        ("large vocabulary", _config("LlamaConfig", vocab_size=40_000, hidden_size=8, num_attention_heads=2), 2),
    ],
)
def test_unusual_models_pass_every_stage(
    name: str, config: Any, blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, name, config)
    project = Project(tmp_path / "project", name, blocks, windows=5)
    if name == "large vocabulary":  # ids that need more than 15 bits
        ids = torch.randint(33_000, 40_000, (9, 16), dtype=torch.int32)
        write_tensors(project.data / "tokens.safetensors", {"calibration": ids[:5], "evaluation": ids[5:]})
    removal = {"method": "list", "blocks": [-1]} if blocks > 1 else {"method": "none"}
    project.run_until("evaluation@compressed", removal=removal)
    ids = load_file(project.data / "tokens.safetensors")
    with torch.no_grad():
        states = project.model(input_ids=ids["calibration"].long(), output_hidden_states=True).hidden_states
        loss = project.model(input_ids=ids["evaluation"].long(), labels=ids["evaluation"].long()).loss
    assert relative_gap(read_tape(project)[0], states[0]) < 1e-6
    assert json.loads((project.data / "evaluation" / "dense.json").read_text())["loss"] == pytest.approx(float(loss), rel=1e-5)


def spoil(project: Project, name: str, row: int) -> None:
    """Put one NaN into a tensor of the checkpoint."""
    path = project.data / "model" / "model.safetensors"
    tensors = load_file(path)
    tensors[name][row] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_weight_that_is_not_a_number_stops_with_its_block(copied: Finished) -> None:
    project = copied("llama")
    spoil(project, "model.layers.2.mlp.down_proj.weight", 5)
    (project.data / "tape.safetensors").unlink()
    with pytest.raises(ArtifactError, match=r"^block 2: NaN or infinite activation in window 0, token 0, channel 5;"):
        project.run("capture")
    assert not list(project.data.glob("*tape*")), "no half of a tape is left"
    with pytest.raises(ArtifactError, match=r"^block 2: NaN or infinite activation in window 0"):
        project.run("evaluation@dense")
    with pytest.raises(PalimpsestError, match=r"^block 2, mlp\.down_proj: NaN or infinite weights"):
        project.run("masking")


def test_an_embedding_that_is_not_a_number_stops_before_any_block(copied: Finished) -> None:
    project = copied("llama")
    ids = load_file(project.data / "tokens.safetensors")["calibration"]
    once = next(int(one) for one in ids[3] if (ids == one).sum() == 1)
    spoil(project, "model.embed_tokens.weight", once)
    token = ids[3].tolist().index(once)
    with pytest.raises(ArtifactError, match=rf"^embedding: NaN or infinite activation in window 3, token {token}, channel 0"):
        project.run("capture")


STAGES = ["capture", "statistics", "redundancy", "masking", "ghost", "peeling", "compress", "evaluation@masked"]
Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(
    ("stage", "key"),
    [
        ("capture", "tokens.calibration_windows or tokens.length"),
        ("redundancy", "tokens.calibration_windows"),
        ("masking", "tokens.calibration_windows"),
        ("ghost", "removal.count"),
        ("peeling", "peeling.keep: false"),
        ("compress", "free space"),
        ("evaluation@masked", "tokens.evaluation_windows"),
    ],
)
def test_a_full_disk_is_seen_before_the_work(stage: str, key: str, copied: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    project = copied("llama")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(100, 90, 10))
    with pytest.raises(PalimpsestError, match=f"{project.data}.* to write but 10 B free; .*{key}"):
        project.run(stage, peeling={"keep": True})


@pytest.mark.parametrize("stage", STAGES)
def test_too_little_memory_is_seen_before_the_work(stage: str, copied: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"peeling": "peeling.reach", "compress": "larger machine"}
    monkeypatch.setattr("pipeline.console.available_memory", lambda: 1000)
    with pytest.raises(
        PalimpsestError, match=f"of memory needed but 1 kB available; .*{keys.get(stage, 'compute.batch_tokens')}"
    ):
        copied("llama").run(stage)


# What each stage reads beside the checkpoint.
READS = [
    ("capture", "tokens.safetensors"), ("statistics", "tape.safetensors"), ("redundancy", "tape.safetensors"),
    ("statistics", "tokens.safetensors"), ("sensitivity", "tape.safetensors"), ("sensitivity", "statistics.safetensors"),
    ("sensitivity", "tokens.safetensors"), ("allocation", "statistics.csv"), ("allocation", "importance.csv"),
    ("allocation", "sensitivity.csv"), ("masking", "tokens.safetensors"), ("masking", "statistics.safetensors"),
    ("masking", "allocation.csv"), ("removal", "redundancy_blocks.csv"), ("removal", "redundancy_pairs.csv"),
    ("ghost", "tape.safetensors"), ("ghost", "tokens.safetensors"), ("ghost", "removal.json"), ("peeling", "tape.safetensors"),
    ("compress", "masks.safetensors"), ("compress", "removal.json"), ("compress", "ghost.safetensors"),
    ("evaluation@dense", "tokens.safetensors"), ("evaluation@masked", "masks.safetensors"),
    ("evaluation@removed", "removal.json"),
]  # fmt: skip
WAYS = ["truncated", "empty", "missing", "foreign", "of another model"]
# Whatever model it is of, a tape or a table is all that these stages know of it.
SOUND = {(stage, "tape.safetensors") for stage in ("redundancy", "peeling")} | {
    ("allocation", f"{table}.csv") for table in ("statistics", "importance", "sensitivity")
}
CASES = [
    (stage, name, how)
    for stage, name in READS
    for how in WAYS
    if not (how == "of another model" and (stage, name) in SOUND)
    and not (how == "truncated" and name in ("statistics.csv", "importance.csv", "sensitivity.csv"))
]


def break_file(path: Path, how: str, other: Path) -> None:
    """Truncated, empty, foreign (another file's content), or that of another model."""
    content = path.read_bytes()
    if how == "truncated":
        path.write_bytes(content[: len(content) * 2 // 3])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "missing":
        path.unlink()
    elif how == "foreign":
        save_file({"w": torch.zeros(3)}, path.with_suffix(".safetensors"))
        if path.suffix != ".safetensors":
            path.write_text("[1, 2, 3]\n")
    else:
        shutil.copyfile(other / path.name, path)


@pytest.fixture(scope="session")
def wider(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a model with more blocks, more channels and a larger vocabulary, of which three others are removed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, "wider", _config("LlamaConfig", hidden_size=40, vocab_size=200))
        project = Project(tmp_path_factory.mktemp("wider"), "wider", blocks=7)
        ids = torch.randint(100, 200, (10, 16), dtype=torch.int32)
        write_tensors(project.data / "tokens.safetensors", {"calibration": ids[:6], "evaluation": ids[6:]})
        project.run_until("ghost", removal={"method": "list", "blocks": [3, 4, 5]})
    return project.data


@pytest.mark.parametrize(("stage", "name", "how"), CASES)
def test_a_broken_input_is_named_in_one_line(stage: str, name: str, how: str, copied: Finished, wider: Path) -> None:
    project = copied("llama")
    break_file(project.data / name, how, wider)
    activations = "tape" if name == "statistics.safetensors" else "pruned"
    with pytest.raises(PalimpsestError) as caught:
        project.run(stage, masking={"activations": activations}, removal={"method": "streamline", "count": 1})
    message = str(caught.value)
    assert name in message and "\n" not in message and len(message) < 600, message
    assert "dvc repro" in message or "removal.blocks" in message or "stay" in message, message

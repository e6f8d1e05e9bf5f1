"""A project folder around a large random checkpoint, and its stages run as `dvc repro` runs them: one process each."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from ruamel.yaml import YAML
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from pipeline.tensors import write_tensors
from stages.compress.shards import write_shards

REPOSITORY = Path(__file__).parents[2]


@dataclass
class Usage:
    """What one stage took."""

    seconds: float
    peak_bytes: int


def llama_config(width: int, blocks: int, vocabulary: int = 32000) -> LlamaConfig:
    """A Llama of the usual proportions."""
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=blocks,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )


def save_random(folder: Path, config: LlamaConfig) -> int:
    """Write a random bfloat16 checkpoint, never holding more than one shard of it. Returns its bytes."""
    folder.mkdir(parents=True)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).state_dict()
    generator = torch.Generator().manual_seed(0)

    def parts() -> Iterator[dict[str, Tensor]]:
        for name, value in state.items():
            if name != "lm_head.weight":
                random = torch.randn(value.shape, generator=generator) * 0.02
                yield {name: (random + (1 if value.ndim == 1 else 0)).bfloat16()}

    write_shards(folder, parts())
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def make_project(root: Path, config: LlamaConfig, windows: int, length: int, **sections: dict[str, object]) -> int:
    """Lay out a project in `root`; returns the checkpoint's bytes."""
    for name in ("pipeline", "stages"):
        (root / name).symlink_to(REPOSITORY / name)
    shutil.copy(REPOSITORY / "dvc.yaml", root)
    yaml = YAML(typ="safe", pure=True)
    params = yaml.load(REPOSITORY / "params.yaml")
    for name, values in sections.items():
        params[name].update(values)
    yaml.dump(params, root / "params.yaml")
    ids = torch.randint(
        0, config.vocab_size, (2 * windows, length), dtype=torch.int32, generator=torch.Generator().manual_seed(1)
    )
    write_tensors(root / "data/tokens.safetensors", {"calibration": ids[:windows], "evaluation": ids[windows:]})
    return save_random(root / "data/model", config)


def run_stage(root: Path, stage: str) -> Usage:
    """Run one stage in a process of its own and ask the operating system what it took."""
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "pipeline.runner", stage],
        cwd=root,
        env={**os.environ, "PREFECT_API_URL": ""},
        stdout=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{stage} failed")
    return Usage(time.monotonic() - start, usage.ru_maxrss * 1024)


def idle_bytes() -> int:
    """Peak memory of a process that only imports what the stages import."""
    code = "import stages.decoder.skeleton"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY)
    _, _, usage = os.wait4(process.pid, 0)
    return usage.ru_maxrss * 1024

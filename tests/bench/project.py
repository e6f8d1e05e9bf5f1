"""A project folder around a large random checkpoint: `python -m tests.bench.project FOLDER WIDTH BLOCKS WINDOWS LENGTH`.

Made in a process of its own: the peak memory that the operating system reports of a child counts the parent's at its birth,
so whoever measures has to stay small.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from ruamel.yaml import YAML
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from pipeline.tensors import write_tensors
from stages.compress.shards import write_shards
from stages.decoder.skeleton import find_blocks

REPOSITORY = Path(__file__).parents[2]


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


def save_random(folder: Path, config: LlamaConfig) -> None:
    """Write a random bfloat16 checkpoint, never holding more than one shard of it."""
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

    write_shards(folder, parts(), limit=1 << 29)


def make_project(root: Path, config: LlamaConfig, windows: int, length: int) -> None:
    """Lay out a project in `root`, with one window a batch and float32 throughout."""
    for name in ("pipeline", "stages"):
        (root / name).symlink_to(REPOSITORY / name)
    shutil.copy(REPOSITORY / "dvc.yaml", root)
    yaml = YAML(typ="safe", pure=True)
    params = yaml.load(REPOSITORY / "params.yaml")
    params["compute"].update(dtype="float32", batch_tokens=length)
    yaml.dump(params, root / "params.yaml")
    ids = torch.randint(
        0, config.vocab_size, (2 * windows, length), dtype=torch.int32, generator=torch.Generator().manual_seed(1)
    )
    write_tensors(root / "data/tokens.safetensors", {"calibration": ids[:windows], "evaluation": ids[windows:]})
    save_random(root / "data/model", config)


def block_parameters(config: LlamaConfig) -> int:
    """Parameters of one block."""
    with torch.device("meta"):
        _, blocks = find_blocks(AutoModelForCausalLM.from_config(config))
    return sum(p.numel() for p in blocks[0].parameters())


if __name__ == "__main__":
    root, (width, blocks, windows, length) = Path(sys.argv[1]), map(int, sys.argv[2:])
    config = llama_config(width, blocks)
    make_project(root, config, windows, length)
    print(4 * block_parameters(config))

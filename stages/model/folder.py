"""A checkpoint folder: which of its files belong to the checkpoint, whether they are whole, and their hashes."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from pipeline.artifacts import human_bytes
from pipeline.console import progress, say
from pipeline.errors import PalimpsestError
from pipeline.packages import sha256_of
from stages.decoder.checkpoint import INDEX, find_shards

VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece*.model",
    "*.tiktoken",
)
SETTINGS = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.*",
    *VOCABULARIES,
)
WEIGHTS = ("model.safetensors", "model-*.safetensors", INDEX)
CODE = ("*.py",)  # of the checkpoint's own; wanted only where the user trusts it


def checkpoint_files(folder: Path, trust_remote_code: bool) -> list[Path]:
    """The files of a checkpoint folder that a run depends on, sorted by name.

    Raises PalimpsestError naming what is missing: the folder, config.json, the weights (or a part of them), the tokenizer.
    """
    if not folder.is_dir():
        raise PalimpsestError(f"{folder}: no such folder; check model.path in params.yaml")
    if not (folder / "config.json").is_file():
        raise PalimpsestError(f"{folder}: no config.json, so this is no Hugging Face checkpoint; check model.path in params.yaml")
    shards = set(find_shards(folder).values())
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    if not any(_matches(name, VOCABULARIES) for name in names):
        raise PalimpsestError(
            f"{folder}: no tokenizer files ({', '.join(VOCABULARIES[:4])}, …); copy those of the model beside its weights"
        )
    wanted = SETTINGS + (CODE if trust_remote_code else ())
    chosen = [name for name in names if _matches(name, wanted) or name == INDEX or folder / name in shards]
    return [folder / name for name in chosen]


def pin_files(files: list[Path]) -> list[dict[str, Any]]:
    """`{"name", "bytes", "sha256"}` of each file. Reads all of them once."""
    say(f"hashing {human_bytes(sum(path.stat().st_size for path in files))} in {len(files)} files")
    return [
        {"name": path.name, "bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in progress(files, "hashed files")
    ]


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)

"""Make the model a local safetensors checkpoint, or pin one that lies on this machine already."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pipeline.artifacts import read_json, write_json
from pipeline.console import say
from pipeline.files import Files
from pipeline.packages import fetch
from stages.decoder.checkpoint import MANIFEST, Checkpoint
from stages.model import Model, Params
from stages.model.check import check_checkpoint, check_digits, load_tokenizer
from stages.model.demo import SMOLLM2
from stages.model.folder import checkpoint_files, pin_files
from stages.model.gguf import convert_gguf
from stages.model.hub import fetch_snapshot
from stages.model.lowbit import quantise_checkpoint


def run(params: Params, inputs: Files, outputs: Files) -> None:
    """Fill `model/`: a checkpoint and its manifest, or a manifest alone that says where the checkpoint lies."""
    model, out = params.model, outputs["model"]
    with whole_folder(out) as folder:
        where = SOURCES[model.source](model, out.parent, folder)
        checkpoint = where.pop("at")
        files = checkpoint_files(checkpoint, model.trust_remote_code)
        if model.grid != "none":
            check_checkpoint(Checkpoint(checkpoint, model.trust_remote_code))
            quantise_checkpoint(checkpoint, files, folder, model)
            where = {"folder": ".", "grid": model.grid, "matrices": model.matrices}
            files = [folder / path.name for path in files]
        manifest = {**where, "source": model.source, "trust_remote_code": model.trust_remote_code, "files": pin_files(files)}
        write_json(folder / MANIFEST, manifest)
        say(check_checkpoint(Checkpoint(folder)))


def from_demo(model: Model, data: Path, folder: Path) -> dict[str, Any]:
    """The demo's GGUF file, kept in data/demo/."""
    convert_gguf(fetch(SMOLLM2, data / "demo"), folder, getattr(torch, model.dtype))
    check_digits(load_tokenizer(folder, trust_remote_code=False))
    return {"at": folder, "folder": "."}


def from_gguf(model: Model, data: Path, folder: Path) -> dict[str, Any]:
    """A GGUF file of the user's."""
    convert_gguf(data.parent / Path(str(model.path)).expanduser(), folder, getattr(torch, model.dtype))
    return {"at": folder, "folder": "."}


def from_folder(model: Model, data: Path, folder: Path) -> dict[str, Any]:
    """A checkpoint folder of the user's: used where it lies, never copied."""
    path = Path(str(model.path)).expanduser()  # absolute stays absolute: DVC may give the manifest to another copy of the project
    return {"at": data.parent / path, "folder": path.as_posix()}


def from_hub(model: Model, data: Path, folder: Path) -> dict[str, Any]:
    """A snapshot in the Hugging Face cache, found again by its commit."""
    snapshot = fetch_snapshot(str(model.repository), model.revision, model.trust_remote_code)
    return {"at": snapshot, "repository": model.repository, "commit": snapshot.name}


def from_scratch(model: Model, data: Path, folder: Path) -> dict[str, Any]:
    """A checkpoint of stage `training`, copied; the manifest says which of its matrices are of few bits."""
    about = read_json(data / "training" / "training.json")
    epoch = about["checkpoints"][-1] if model.checkpoint == "last" else model.checkpoint
    shutil.copytree(data / "training" / f"epoch-{epoch:04d}", folder, dirs_exist_ok=True)
    low = {key: about[key] for key in ("grid", "matrices")} if about["grid"] != "none" else {}
    return {"at": folder, "folder": ".", **low}


SOURCES: dict[str, Callable[[Model, Path, Path], dict[str, Any]]] = {
    "demo": from_demo,
    "gguf": from_gguf,
    "folder": from_folder,
    "hub": from_hub,
    "scratch": from_scratch,
}


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `out` that takes its place at the end, or goes if anything fails."""
    temporary = out.with_name(f".{out.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        shutil.rmtree(out, ignore_errors=True)
        temporary.replace(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)

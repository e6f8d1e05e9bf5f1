"""Write what is left of the model as an ordinary Hugging Face checkpoint, one block in memory at a time."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from pipeline.artifacts import ArtifactError, producer
from pipeline.console import plan, progress, say
from pipeline.files import Files
from pipeline.tensors import TensorFile, check_finite
from stages.compress import Params
from stages.compress.card import model_card
from stages.compress.config import check_shortened, exported_config, shorten_config, skeleton_of
from stages.compress.modeling import MODELING_FILE, ghost_places, is_native, modeling_source
from stages.compress.shards import write_shards
from stages.decoder.checkpoint import Checkpoint
from stages.decoder.masks import apply_masks
from stages.decoder.operators import operator_name, read_removed, runs_of
from stages.decoder.skeleton import Decoder

COPIED = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt",
    "merges.txt", "*.model", "*.tiktoken",
    "generation_config.json", "chat_template*", "preprocessor_config.json",
)  # fmt: skip


def run(params: Params, inputs: Files, outputs: Files) -> None:
    """Write `compressed/`: masked weights as zeros, removed blocks gone and the rest renumbered, ghosts as small linears."""
    masks = TensorFile(inputs["masks.safetensors"])
    ghosts = TensorFile(inputs["ghost.safetensors"])
    decoder = Decoder(inputs["model"], Checkpoint(inputs["model"]).stored_dtype())
    removed = read_removed(inputs["removal.json"], len(decoder))
    kept = [index for index in range(len(decoder)) if index not in set(removed)]
    runs = runs_of(removed) if ghosts.metadata.get("operator") != "none" else []
    _check_ghosts(ghosts, runs, decoder.width)
    places = ghost_places(runs, kept)

    config = shorten_config(decoder.checkpoint.config, kept, len(decoder))
    small = skeleton_of(config, decoder.dtype, decoder.checkpoint.trust_remote_code)
    check_shortened(small, decoder, kept)

    folder = outputs["compressed"]
    plan(
        memory=2 * max(decoder.block_bytes(), decoder.trunk_bytes()),
        disk=sum(p.numel() for p in small.parameters()) * decoder.dtype.itemsize,
        folder=folder.parent,
        memory_key="",  # the model's largest part has to fit
        disk_key="",
    )
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _copy_companions(decoder.checkpoint.folder, partial, COPIED if is_native(small) else (*COPIED, "*.py"))
        (partial / "config.json").write_text(exported_config(config, small, places, decoder.path), encoding="utf-8")
        if places:
            (partial / MODELING_FILE).write_text(modeling_source(small, decoder.path), encoding="utf-8")
        fitted = {
            place: check_finite(ghosts.read(operator_name(*run)), f"{ghosts.path}: {operator_name(*run)}")
            for run, place in zip(runs, places, strict=True)
        }
        parts = _state(decoder, small, kept, masks, fitted)
        total = write_shards(partial, (_names_on_disk(small, part, bool(places)) for part in parts))
        (partial / "README.md").write_text(model_card(decoder, removed, runs), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    say(f"{len(kept)} of {len(decoder)} blocks, {len(places)} ghosts, {total:,} parameters")


def _check_ghosts(ghosts: TensorFile, runs: list[tuple[int, int]], width: int) -> None:
    """Raise ArtifactError naming the file if its operators are not those of the removed runs of this model."""
    expected = {operator_name(*run): (width, width) for run in runs}
    if ghosts.specs != expected:
        raise ArtifactError(
            f"{ghosts.path}: the removed blocks ask for {', '.join(expected)} of {width} channels, not {ghosts.specs}; "
            + producer(ghosts.path)
        )


def _state(
    decoder: Decoder, small: Any, kept: list[int], masks: TensorFile, fitted: dict[tuple[int, str], Tensor]
) -> Iterator[dict[str, Tensor]]:
    """The exported model's tensors under its own names: first what surrounds the blocks, then block by block."""
    tied = set(getattr(small, "all_tied_weights_keys", None) or {})
    with decoder.trunk(head=True):
        around = {name: value for name, value in decoder.model.state_dict().items() if not name.startswith(decoder.path + ".")}
        yield {name: value for name, value in around.items() if name not in tied}
    for new, old in progress(list(enumerate(kept)), "block"):
        with decoder.block(old) as block:
            apply_masks(block, masks, old)
            part = {f"{decoder.path}.{new}.{name}": value for name, value in block.state_dict().items()}
            for (at, where), operator in fitted.items():
                if at == new:  # nn.Linear holds the transpose of the row-vector convention
                    part[f"{decoder.path}.{new}.ghost_{where}.weight"] = operator.T.to(decoder.dtype)
            yield part


def _names_on_disk(small: Any, part: dict[str, Tensor], has_code: bool) -> dict[str, Tensor]:
    """The names `transformers` expects in a file: for its own classes those of the hub, for a class with code its own."""
    return part if has_code else revert_weight_conversion(small, part)


def _copy_companions(source: Path, target: Path, patterns: tuple[str, ...]) -> None:
    """Tokenizer, generation config and the like come along as they are; code only if the model was built from it."""
    for pattern in patterns:
        for file in sorted(source.glob(pattern)):
            if file.is_file():
                shutil.copyfile(file, target / file.name)

"""Write what is left of the model as an ordinary Hugging Face checkpoint, one block in memory at a time."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from pipeline.artifacts import ArtifactError, producer, read_json
from pipeline.console import plan, progress, say
from pipeline.files import Files
from pipeline.tensors import TensorFile
from stages.compress import Params
from stages.compress.card import model_card
from stages.compress.config import check_shortened, exported_config, shorten_config, skeleton_of
from stages.compress.modeling import MODELING_FILE, ghost_places, ghost_spec, ghost_state, is_native, modeling_source
from stages.compress.recount import recount
from stages.compress.shards import shard_limit, write_shards
from stages.decoder.checkpoint import Checkpoint
from stages.decoder.masks import HEAD, apply_head_mask, apply_masks, kept_name, mask_name
from stages.decoder.matrices import prunable_matrices
from stages.decoder.operators import Operator, fold_into, operator_name, read_operators, read_removed, runs_of
from stages.decoder.skeleton import Decoder, as_stored

COPIED = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt",
    "merges.txt", "*.model", "*.tiktoken",
    "generation_config.json", "chat_template*", "preprocessor_config.json",
)  # fmt: skip


def run(params: Params, inputs: Files, outputs: Files) -> None:
    """Write `compressed/`: masked weights as zeros, removed blocks gone and the rest renumbered, ghosts as small linears."""
    masks = TensorFile(inputs["masks.safetensors"])
    ghosts = TensorFile(inputs["ghost.safetensors"])
    stored = Checkpoint(inputs["model"]).stored_dtype()  # of most tensors; those that differ are kept as they are
    decoder = as_stored(Decoder(inputs["model"], stored))
    removed = read_removed(inputs["removal.json"], len(decoder))
    kept = [index for index in range(len(decoder)) if index not in set(removed)]
    operators = read_operators(ghosts, decoder.width)
    _check_ghosts(ghosts, operators, removed)
    run_ones = {run: one for run, one in operators.items() if one.fold is None}
    places = ghost_places(list(run_ones), kept)
    accumulate = ghosts.metadata.get("accumulate", "model")
    specs = [ghost_spec(one, place, accumulate) for one, place in zip(run_ones.values(), places, strict=True)]

    config = shorten_config(decoder.checkpoint.config, kept, len(decoder))
    small = skeleton_of(config, stored, decoder.checkpoint.trust_remote_code)
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
        (partial / "config.json").write_text(exported_config(config, small, specs), encoding="utf-8")
        if specs:
            (partial / MODELING_FILE).write_text(modeling_source(small, decoder.path), encoding="utf-8")
        ghost_tensors = _by_block(run_ones, places, stored)
        parts = _state(decoder, small, kept, masks, ghost_tensors, _folds(operators))
        on_disk = lambda part: _names_on_disk(small, part, bool(specs))  # noqa: E731
        limit = shard_limit(decoder.checkpoint.shards.values())
        total = write_shards(partial, map(on_disk, parts), limit)
        mixed = {(block, operator.into) for block, operator in _folds(operators).items()}
        masked = recount(partial, decoder, kept, masks, on_disk, mixed)
        chosen = read_json(inputs["removal_scores.json"])
        sparsity = _sparsity(decoder, kept, masks, mixed)
        of_head = 1 - int(masks.read(kept_name(HEAD))) / decoder.head_weight.numel() if HEAD in masks else 0.0
        asked = params.allocation, params.masking
        card = model_card(decoder, removed, chosen, *asked, sparsity, of_head, ghosts.metadata, operators)
        (partial / "README.md").write_text(card, encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    folded = len(operators) - len(specs)
    also = f", {folded} folded into {', '.join(sorted({one.into for one in operators.values() if one.into}))}" if folded else ""
    say(f"{len(kept)} of {len(decoder)} blocks, {len(specs)} ghosts{also}, {total:,} parameters")
    apart = f"; a fold filled those of {', '.join(f'block {block}, {name}' for block, name in sorted(mixed))}" if mixed else ""
    say(f"read back from the export: all {masked:,} masked weights are zero{apart}")


def _sparsity(decoder: Decoder, kept: list[int], masks: TensorFile, mixed: set[tuple[int, str]]) -> float:
    """Share of the prunable weights of the blocks `kept` that are masked, and not filled again by a fold into one of `mixed`."""
    stay = whole = 0
    for index in kept:
        for matrix in prunable_matrices(decoder.blocks[index]):
            size = matrix.view(decoder.blocks[index]).numel()
            stay += size if (index, matrix.name) in mixed else int(masks.read(kept_name(mask_name(index, matrix.name))))
            whole += size
    return 1 - stay / whole if whole else 0.0


def _check_ghosts(ghosts: TensorFile, operators: dict[tuple[int, int], Operator], removed: list[int]) -> None:
    """Raise ArtifactError naming the file if its operators do not stand for exactly the removed blocks."""
    if ghosts.metadata.get("operator") == "none":  # where it has no sink to restore, nothing is there
        removed = [block for block in removed if any(start <= block < stop for start, stop in operators)]
    stand_for = sorted(block for start, stop in operators for block in range(start, stop))
    if stand_for != sorted(removed):
        wanted, there = ([operator_name(*run) for run in some] for some in (runs_of(removed), operators))
        raise ArtifactError(
            f"{ghosts.path}: the removed blocks ask for {', '.join(wanted)}, not {', '.join(there) or 'nothing'}; "
            + producer(ghosts.path)
        )


def _by_block(
    operators: dict[tuple[int, int], Operator], places: list[tuple[int, str]], dtype: torch.dtype
) -> dict[int, dict[str, Tensor]]:
    """Index of an exported block -> the tensors of its operators in `dtype`, by their names inside it."""
    state: dict[int, dict[str, Tensor]] = {}
    count: dict[tuple[int, str], int] = {}
    for operator, (block, where) in zip(operators.values(), places, strict=True):
        number = count[block, where] = count.get((block, where), -1) + 1
        named = {f"ghost_{where}.{number}.{name}": value.to(dtype) for name, value in ghost_state(operator).items()}
        state.setdefault(block, {}).update(named)
    return state


def _folds(operators: dict[tuple[int, int], Operator]) -> dict[int, Operator]:
    """Index of a dense block -> the operator that changes one of its matrices."""
    return {start - 1: one for (start, _), one in operators.items() if one.fold is not None}


def _state(
    decoder: Decoder,
    small: Any,
    kept: list[int],
    masks: TensorFile,
    ghosts: dict[int, dict[str, Tensor]],
    folds: dict[int, Operator],
) -> Iterator[dict[str, Tensor]]:
    """The exported model's tensors under its own names, in the dtypes of the checkpoint: first what surrounds the blocks, then
    block by block."""
    tied = set(getattr(small, "all_tied_weights_keys", None) or {})
    with decoder.trunk(head=True):
        apply_head_mask(decoder, masks)
        around = {name: value for name, value in decoder.model.state_dict().items() if not name.startswith(decoder.path + ".")}
        yield {name: _in_stored_dtype(decoder, name, value) for name, value in around.items() if name not in tied}
    for new, old in progress(list(enumerate(kept)), "block"):
        with decoder.block(old) as block:
            apply_masks(block, masks, old)
            if old in folds:
                (matrix,) = [one for one in prunable_matrices(block) if one.name == folds[old].into]
                bias = getattr(block.get_submodule(matrix.module), "bias", None)
                fold_into(matrix.view(block), None if bias is None else bias.data, folds[old])
            part = {
                name: _in_stored_dtype(decoder, f"{decoder.path}.{old}.{name}", value)
                for name, value in block.state_dict().items()
            }
            yield {f"{decoder.path}.{new}.{name}": value for name, value in {**part, **ghosts.get(new, {})}.items()}


def _in_stored_dtype(decoder: Decoder, name: str, value: Tensor) -> Tensor:
    """A tensor of the model in the dtype that the checkpoint has it in: nothing but the changes made here is rounded."""
    stored = decoder.stored.get(name, value.dtype)
    return value.to(stored) if stored.is_floating_point and stored.itemsize > 1 else value


def _names_on_disk(small: Any, part: dict[str, Tensor], has_code: bool) -> dict[str, Tensor]:
    """The names `transformers` expects in a file: for its own classes those of the hub, for a class with code its own."""
    return part if has_code else revert_weight_conversion(small, part)


def _copy_companions(source: Path, target: Path, patterns: tuple[str, ...]) -> None:
    """Tokenizer, generation config and the like come along as they are; code only if the model was built from it."""
    for pattern in patterns:
        for file in sorted(source.glob(pattern)):
            if file.is_file():
                shutil.copyfile(file, target / file.name)

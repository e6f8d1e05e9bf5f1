"""A checkpoint whose matrices are quantised after training: the same files, with other numbers in the matrices named."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from pipeline.console import plan, progress, say
from pipeline.errors import PalimpsestError
from pipeline.tensors import TensorWriter, check_finite
from stages.decoder.lowbit import choose_matrices, quantise
from stages.decoder.matrices import Matrix
from stages.decoder.skeleton import Decoder
from stages.model import Model


def quantise_checkpoint(source: Path, files: list[Path], folder: Path, model: Model) -> None:
    """Write `files` of the checkpoint `source` into `folder`, `model.matrices` of its blocks on `model.grid`.

    Weights keep their names, dtypes and files. One block is in memory at a time. `folder` may be `source` itself.

    Raises PalimpsestError naming the pattern that fits no matrix, or the matrix that holds NaN.
    """
    decoder = Decoder(source, torch.float32, trust_remote_code=model.trust_remote_code)
    checkpoint = decoder.checkpoint
    try:
        chosen = choose_matrices(decoder.blocks, model.matrices)
    except PalimpsestError as error:
        raise PalimpsestError(f"model.matrices: {error}") from None
    shards = sorted(set(checkpoint.shards.values()))
    plan(2 * decoder.block_bytes(), sum(path.stat().st_size for path in shards), folder, "", "")
    for file in files:
        if file not in shards and folder != source:
            shutil.copyfile(file, folder / file.name)
    left = set(checkpoint.names())
    with ExitStack() as stack:
        writers = {}
        for shard in shards:
            specs = {name: spec for name, spec in checkpoint.specs.items() if checkpoint.shards[name] == shard}
            writers[shard] = stack.enter_context(TensorWriter(folder / shard.name, specs, raw_metadata={"format": "pt"}))
        for name, value in progress(_quantised(decoder, chosen, model.grid), "matrix", sum(map(len, chosen))):
            writers[checkpoint.shards[name]].write(name, value)
            left.remove(name)
        for name in sorted(left):
            writers[checkpoint.shards[name]].write(name, checkpoint.read(name))
    say(f"{model.grid}: {len(checkpoint.names()) - len(left)} of {len(checkpoint.names())} tensors quantised after training")


def _quantised(decoder: Decoder, chosen: list[list[Matrix]], grid: str) -> Iterator[tuple[str, Tensor]]:
    """Name on disk and new value of every tensor that holds a chosen matrix; experts beside a chosen one as they are."""
    for index, matrices in enumerate(chosen):
        if not matrices:
            continue
        with decoder.block(index) as block:
            changed: dict[str, nn.Parameter] = {}
            for matrix in matrices:
                weight = matrix.view(block)
                name = f"{decoder.path}.{index}.{matrix.module}.{matrix.parameter}"
                check_finite(weight, f"{decoder.checkpoint.folder}: block {index}, {matrix.name}")
                weight.copy_(quantise(weight.to(decoder.stored[name]), grid))  # its scale rounded as it will be stored
                changed[name] = matrix.stored(block)
            yield from revert_weight_conversion(decoder.model, {name: one.data for name, one in changed.items()}).items()

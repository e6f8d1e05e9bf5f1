"""Prune each block alone and see what the rest of the dense model makes of it, all blocks in one sweep over the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from pipeline.artifacts import ArtifactError, producer, write_table
from pipeline.console import plan, say
from pipeline.errors import PalimpsestError
from pipeline.files import Files
from pipeline.tensors import TensorFile
from stages.decoder.skeleton import Decoder, as_stored
from stages.decoder.stream import read_windows
from stages.decoder.tape import Tape
from stages.decoder.wavefront import Changed, Prompts, Variant, chunks, sweep, sweep_memory
from stages.sensitivity import Params
from stages.sensitivity.kl import kl_divergence
from stages.sensitivity.loss import loss_rise
from stages.sensitivity.pruned import pruned

# A method compares streams that leave the last block with the dense one, given the token ids: nats, [stream, prompt].
METHODS: dict[str, Callable[[Decoder, Tensor, Sequence[Tensor], Tensor], Tensor]] = {"loss": loss_rise, "kl": kl_divergence}
STREAM_BYTES = 1 << 29  # streams of all variants together; prompts are taken in chunks that fit


def run(params: Params, inputs: Files, outputs: Files) -> None:
    """Write `sensitivity.csv`: block, rise (nats per token), error (standard error over windows), sparsity of the block that
    was pruned; empty with method none."""
    compute, wanted, path = params.compute, params.sensitivity, outputs["sensitivity.csv"]
    tape = Tape(inputs["tape.safetensors"])
    blocks = range(tape.boundaries - 1)
    if wanted.method == "none":
        write_table(path, pd.DataFrame({"block": blocks, "rise": None, "error": None, "sparsity": None}))
        say("not measured (sensitivity.method is none)")
        return
    decoder = Decoder(inputs["model"], compute.resolve_dtype(), compute.resolve_device())
    source = as_stored(decoder)
    tape.check_model(len(decoder), decoder.width)
    ids = read_windows(TensorFile(inputs["tokens.safetensors"]), "calibration", decoder)[: wanted.windows, : wanted.length]
    if len(ids) > tape.windows or ids.shape[1] > tape.length:
        file = inputs["tape.safetensors"]
        raise ArtifactError(f"{file}: {tape.windows} windows of {tape.length} tokens, fewer than there are now; {producer(file)}")
    norms = TensorFile(inputs["statistics.safetensors"]) if wanted.scores == "wanda" else None
    prune = partial(pruned, source=source, sparsity=wanted.sparsity, norms=norms)
    variants = [Variant({index: Changed(index, partial(prune, index=index))}) for index in blocks]
    prompts = Prompts(tape, *ids.shape)
    copies = decoder.block_bytes() + (source.block_bytes() if source is not decoder else 0)
    plan(
        memory=sweep_memory(decoder, variants, prompts, STREAM_BYTES, compute.batch_tokens) + copies,
        disk=0,
        folder=path.parent,
        memory_key="compute.batch_tokens",
        disk_key="",
    )
    rises = measure_rises(decoder, variants, prompts, ids, METHODS[wanted.method], compute.batch_tokens)
    errors = rises.std(axis=1, ddof=1) / np.sqrt(len(ids)) if len(ids) > 1 else None
    table = pd.DataFrame({"block": blocks, "rise": rises.mean(axis=1), "error": errors, "sparsity": wanted.sparsity})
    write_table(path, table)
    low, high = int(table.rise.argmin()), int(table.rise.argmax())
    ends = f"from {table.rise[low]:.4f} (block {low}) to {table.rise[high]:.4f} (block {high})"
    what = f"{wanted.method} with one block pruned by {wanted.scores} at {wanted.sparsity:g}"
    say(f"{what}: {ends} nats per token, over {len(ids)} windows of {ids.shape[1]} tokens")


def measure_rises(
    decoder: Decoder,
    variants: Sequence[Variant],
    prompts: Prompts,
    ids: Tensor,
    compare: Callable[[Decoder, Tensor, Sequence[Tensor], Tensor], Tensor],
    batch_tokens: int,
) -> np.ndarray:
    """What `compare` says of each variant, [variant, prompt]. Raises PalimpsestError naming a block where it is not finite."""
    many, together = chunks(len(variants), prompts, decoder.dtype.itemsize, STREAM_BYTES)
    rises = torch.zeros(len(variants), prompts.count, dtype=torch.float64)
    for start in range(0, prompts.count, many):
        stop = min(start + many, prompts.count)
        for first in range(0, len(variants), together):
            some = slice(first, min(first + together, len(variants)))
            finals = sweep(decoder, variants[some], prompts, start, stop, batch_tokens)
            with decoder.trunk(head=True):
                rises[some, start:stop] = compare(decoder, prompts.read(len(decoder), start, stop), finals, ids[start:stop])
    bad = (~rises.isfinite()).nonzero()
    if len(bad):
        block, window = bad[0].tolist()
        raise PalimpsestError(
            f"block {block} pruned alone, window {window}: NaN or infinite logits; try compute.dtype: float32 in params.yaml"
        )
    return rises.numpy()

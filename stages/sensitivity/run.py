"""Prune each block alone and see what the rest of the dense model makes of it, all blocks in one pass.

The variant in which block l is pruned is the dense model up to there, and that prefix is on the tape. So variant l starts at
block l from the tape, and goes through all later blocks together with the variants that started before it: each block is
loaded once for the whole sweep. Variants lie in a scratch file, behind one another.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from pipeline.artifacts import ArtifactError, producer, write_table
from pipeline.console import plan, progress, say
from pipeline.files import Files
from pipeline.tensors import TensorFile
from stages.decoder.matrices import prunable_matrices
from stages.decoder.scores import magnitude_score, wanda_score
from stages.decoder.selection import keep_per_row
from stages.decoder.skeleton import Decoder
from stages.decoder.stream import Stream, batches, finite_or_stop, read_windows
from stages.decoder.tape import Tape
from stages.sensitivity import Params, Sensitivity
from stages.sensitivity.kl import kl_divergence
from stages.sensitivity.loss import loss_rise

# A method compares dense and pruned logits [token, vocabulary] given the next tokens [token]: a number per token.
METHODS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"loss": loss_rise, "kl": kl_divergence}
LOGIT_BYTES = 1 << 27  # logits of as many tokens at a time as fit in this


def run(params: Params, inputs: Files, outputs: Files) -> None:
    """Write `sensitivity.csv`: block, rise (nats per token), error (standard error over windows); empty with method none."""
    compute, wanted, path = params.compute, params.sensitivity, outputs["sensitivity.csv"]
    tape = Tape(inputs["tape.safetensors"])
    blocks = tape.boundaries - 1
    if wanted.method == "none":
        write_table(path, pd.DataFrame({"block": range(blocks), "rise": None, "error": None}))
        say("not measured (sensitivity.method is none)")
        return
    decoder = Decoder(inputs["model"], compute.resolve_dtype(), compute.resolve_device())
    tape.check_model(len(decoder), decoder.width)
    ids = read_windows(TensorFile(inputs["tokens.safetensors"]), "calibration", decoder)[: wanted.windows, : wanted.length]
    if len(ids) > tape.windows or ids.shape[1] > tape.length:
        raise ArtifactError(
            f"{inputs['tape.safetensors']}: {tape.windows} windows of {tape.length} tokens, fewer than tokens.safetensors has; "
            + producer(inputs["tape.safetensors"])
        )
    bytes_each = ids.numel() * decoder.width * decoder.dtype.itemsize
    batch_bytes = min(compute.batch_tokens, blocks * ids.numel()) * decoder.width * decoder.dtype.itemsize
    plan(
        memory=max(3 * decoder.block_bytes(), decoder.trunk_bytes() + 6 * LOGIT_BYTES) + 16 * batch_bytes,
        disk=blocks * bytes_each,
        folder=path.parent,
        memory_key="compute.batch_tokens",
        disk_key="sensitivity.windows",
    )
    with Stream(path.parent, (blocks * len(ids), ids.shape[1], decoder.width), decoder.dtype) as stream:
        push_variants(decoder, tape, stream, wanted, TensorFile(inputs["statistics.safetensors"]), ids, compute.batch_tokens)
        rises = compare(decoder, tape, stream, ids, METHODS[wanted.method])
    errors = rises.std(axis=1, ddof=1) / np.sqrt(len(ids)) if len(ids) > 1 else None
    table = pd.DataFrame({"block": range(blocks), "rise": rises.mean(axis=1), "error": errors})
    write_table(path, table)
    what = f"{wanted.method} with one block pruned by {wanted.scores} at {wanted.sparsity:g}"
    low, high = int(table.rise.argmin()), int(table.rise.argmax())
    ends = f"from {table.rise[low]:.4f} (block {low}) to {table.rise[high]:.4f} (block {high})"
    say(f"{what}: {ends} nats per token, over {len(ids)} windows of {ids.shape[1]} tokens")


def push_variants(
    decoder: Decoder, tape: Tape, stream: Stream, wanted: Sensitivity, statistics: TensorFile, ids: Tensor, batch_tokens: int
) -> None:
    """Fill `stream` with the last boundary of every variant: windows `l · n` to `(l + 1) · n` are those with block l pruned."""
    count, length = ids.shape
    for index in progress(range(len(decoder)), "block"):
        with decoder.block(index) as block:
            for start, stop in batches(index * count, length, batch_tokens):
                stream.write(start, _finite(decoder.call(index, stream.read(start, stop).to(decoder.device)), index))
            prune(block, wanted, statistics, index)
            for start, stop in batches(count, length, batch_tokens):
                hidden = tape.read(index, start, stop)[:, :length].to(decoder.device)
                stream.write(index * count + start, _finite(decoder.call(index, hidden), index))


def prune(block: nn.Module, wanted: Sensitivity, statistics: TensorFile, index: int) -> None:
    """Set the lowest scores of each row of each matrix of the loaded block to zero; by magnitude where no token came by."""
    for matrix in prunable_matrices(block):
        weight, key = matrix.view(block), f"blocks.{index}.{matrix.name}"
        seen = wanted.scores == "wanda" and int(statistics.read(f"{key}.tokens")) > 0
        if seen and statistics.shape(f"{key}.squares") != (weight.shape[1],):
            raise ArtifactError(f"{statistics.path}: '{key}' is not of {weight.shape[1]} inputs; {producer(statistics.path)}")
        score = wanda_score(weight, statistics.read(f"{key}.squares").to(weight.device)) if seen else magnitude_score(weight)
        weight.mul_(keep_per_row(score, wanted.sparsity))


def compare(
    decoder: Decoder, tape: Tape, stream: Stream, ids: Tensor, measure: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> np.ndarray:
    """What `measure` says of each variant, averaged over the predicted tokens of each window, [block, window]."""
    count, predicted = len(ids), ids.shape[1] - 1
    step = max(1, LOGIT_BYTES // (decoder.checkpoint.config.get_text_config().vocab_size * 4))
    sums = np.zeros((len(decoder), count))
    with decoder.trunk(head=True):
        for window in progress(range(count), "window"):
            dense = tape.read(len(decoder), window, window + 1)[:, :predicted].to(decoder.device)
            targets = ids[window, 1:].long().to(decoder.device)
            for start in range(0, predicted, step):
                part = slice(start, min(start + step, predicted))
                expected = decoder.logits(dense[:, part])[0]
                for block in range(len(decoder)):
                    hidden = stream.read(block * count + window, block * count + window + 1)[:, part].to(decoder.device)
                    found = measure(expected, decoder.logits(hidden)[0], targets[part])
                    sums[block, window] += float(found.sum(dtype=torch.float64))
    return sums / predicted


def _finite(hidden: Tensor, index: int) -> Tensor:
    finite_or_stop(hidden, f"block {index}, with a block pruned", 0)
    return hidden

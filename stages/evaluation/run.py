"""Perplexity of one variant of the model on the evaluation windows, block by block, so that any size of model fits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pipeline.artifacts import ArtifactError, write_json
from pipeline.console import plan, progress, say
from pipeline.files import Files
from pipeline.tensors import TensorFile
from stages.decoder.masks import apply_masks
from stages.decoder.matrices import prunable_matrices
from stages.decoder.operators import read_removed
from stages.decoder.skeleton import Decoder
from stages.decoder.stream import Stream, advance, embed, read_windows
from stages.evaluation import Params
from stages.evaluation.bootstrap import mean_interval
from stages.evaluation.losses import token_losses

LARGEST_LOSS = 700.0  # nats; its exponential is still a number
LOGIT_BYTES = 1 << 27  # logits of as many tokens at a time as fit in this


def run(params: Params, inputs: Files, outputs: Files) -> None:
    """Write `evaluation/<variant>.json`: loss of each window, perplexity with a bootstrap interval, the protocol, the size.

    The variant is what the inputs say: masks alone, removed blocks alone, the exported checkpoint, or none of them.
    """
    compute, wanted = params.compute, params.evaluation
    (path,) = outputs.values()
    exported = "compressed" in inputs
    decoder = Decoder(
        inputs["compressed" if exported else "model"],
        compute.resolve_dtype(),
        compute.resolve_device(),
        trust_remote_code=True if exported else None,  # the modelling file is the one stage compress wrote
    )
    masks = TensorFile(inputs["masks.safetensors"]) if "masks.safetensors" in inputs else None
    removed = set(read_removed(inputs["removal.json"], len(decoder))) if "removal.json" in inputs else set()
    tokens = TensorFile(inputs["tokens.safetensors"])
    ids = read_windows(tokens, "evaluation", decoder)
    batch_bytes = min(compute.batch_tokens, ids.numel()) * decoder.width * decoder.dtype.itemsize
    plan(
        memory=max(decoder.block_bytes(), decoder.trunk_bytes() + 3 * LOGIT_BYTES) + 16 * batch_bytes,
        disk=ids.numel() * decoder.width * decoder.dtype.itemsize,
        folder=path.parent,
        memory_key="compute.batch_tokens",
        disk_key="tokens.evaluation_windows",
    )
    with Stream(path.parent, (*ids.shape, decoder.width), decoder.dtype) as stream:
        embed(decoder, ids, stream, compute.batch_tokens)
        zeros, prunable, blocks = _push_through(decoder, stream, ids, masks, removed, compute.batch_tokens)
        losses = torch.tensor(list(_window_losses(decoder, stream, ids)), dtype=torch.float64)

    low, high = mean_interval(losses.numpy(), wanted.confidence, wanted.resamples, wanted.seed)
    loss, scored = float(losses.mean()), ids.shape[0] * (ids.shape[1] - 1)
    parameters = _parameters(decoder, removed)
    exp = lambda value: float(torch.tensor(value, dtype=torch.float64).exp())  # noqa: E731
    write_json(
        path,
        {
            "variant": path.stem,
            "loss": loss,
            "perplexity": exp(loss),
            "interval": [exp(low), exp(high)],
            "confidence": wanted.confidence,
            "tokens": scored,
            "windows": losses.tolist(),
            "contract": _contract(tokens, ids, decoder),
            "sparsity": zeros / prunable,
            "zeros": zeros,
            "prunable": prunable,
            "parameters": parameters,
            "bytes": parameters * decoder.checkpoint.stored_dtype().itemsize,
            "blocks": blocks,
        },
    )
    say(f"{path.stem}: perplexity {exp(loss):.3f} ({exp(low):.3f} to {exp(high):.3f}) on {scored:,} tokens")


def _push_through(
    decoder: Decoder, stream: Stream, ids: Tensor, masks: TensorFile | None, removed: set[int], batch_tokens: int
) -> tuple[int, int, int]:
    """Run the variant's blocks over the stream. Returns zeros and weights in their prunable matrices, and their number."""
    zeros = prunable = 0
    kept = [index for index in range(len(decoder)) if index not in removed]
    for index in progress(kept, "block"):
        with decoder.block(index) as block:
            if masks is not None:
                apply_masks(block, masks, index)
            for matrix in prunable_matrices(block):
                if matrix.name.startswith("ghost_"):  # an operator of the export, not a matrix of the model
                    continue
                weight = matrix.view(block)
                zeros += weight.numel() - int(weight.count_nonzero())
                prunable += weight.numel()
            advance(decoder, index, stream, batch_tokens, ids)
    return zeros, prunable, len(kept)


def _window_losses(decoder: Decoder, stream: Stream, ids: Tensor) -> Iterator[float]:
    """Mean loss in nats of each window over its length - 1 predicted tokens."""
    vocabulary = decoder.checkpoint.config.get_text_config().vocab_size
    step = max(1, LOGIT_BYTES // (vocabulary * 4))
    with decoder.trunk(head=True):
        for window in progress(range(len(ids)), "window"):
            hidden = stream.read(window, window + 1).to(decoder.device)[:, :-1]
            targets = ids[window, 1:].long().to(decoder.device)
            losses = [
                token_losses(decoder.logits(hidden[:, start : start + step])[0], targets[start : start + step])
                for start in range(0, len(targets), step)
            ]
            loss = float(torch.cat(losses).mean(dtype=torch.float64))
            if not loss < LARGEST_LOSS:  # nor NaN
                raise ArtifactError(
                    f"window {window}: a mean loss of {loss:g} nats, of which no perplexity can be made; "
                    "try compute.dtype: float32 in params.yaml, or check the checkpoint's final norm and head"
                )
            yield loss


def _parameters(decoder: Decoder, removed: set[int]) -> int:
    """Parameters of the variant, tied ones counted once."""
    gone = sum(p.numel() for index in removed for p in decoder.blocks[index].parameters())
    return sum(p.numel() for p in decoder.model.parameters()) - gone


def _contract(tokens: TensorFile, ids: Tensor, decoder: Decoder) -> dict[str, object]:
    """All that has to be equal for two perplexities to be comparable."""
    return {
        **{key: value for key, value in tokens.metadata.get("evaluation", {}).items() if value != ""},
        "length": ids.shape[1],
        "stride": ids.shape[1],
        "windows": ids.shape[0],
        "scored_per_window": ids.shape[1] - 1,
        "dtype": str(decoder.dtype).removeprefix("torch."),
    }

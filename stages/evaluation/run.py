"""Perplexity of one variant of the model on the evaluation windows, block by block, so that any size of model fits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pipeline.artifacts import ArtifactError, producer, write_json
from pipeline.console import plan, progress, say
from pipeline.files import Files
from pipeline.tensors import TensorFile
from stages.decoder.matrices import prunable_matrices
from stages.decoder.skeleton import Decoder
from stages.decoder.stream import Stream, advance, embed, read_windows
from stages.decoder.variant import Variant, read_variant
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
    variant = read_variant(inputs, compute)
    decoder = variant.decoder
    tokens = TensorFile(inputs["tokens.safetensors"])
    ids = read_windows(tokens, "evaluation", decoder)
    scored = read_scored(tokens, ids)
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
        zeros, prunable = _push_through(variant, stream, ids, compute.batch_tokens)
        losses = torch.tensor(list(_window_losses(variant, stream, ids, scored)), dtype=torch.float64)

    counts = scored.sum(dim=1)
    weights = counts / counts.double().mean()  # exactly 1 where the windows are alike
    low, high = mean_interval(losses.numpy(), wanted.confidence, wanted.resamples, wanted.seed, weights.numpy())
    loss = float((losses * weights).mean())
    parameters = _parameters(variant)
    exp = lambda value: float(torch.tensor(value, dtype=torch.float64).exp())  # noqa: E731
    write_json(
        path,
        {
            "variant": path.stem,
            "loss": loss,
            "perplexity": exp(loss),
            "interval": [exp(low), exp(high)],
            "confidence": wanted.confidence,
            "tokens": int(counts.sum()),
            "windows": losses.tolist(),
            **({} if (counts == counts[0]).all() else {"scored": counts.tolist()}),
            "contract": _contract(tokens, ids, counts, decoder),
            "sparsity": zeros / prunable,
            "zeros": zeros,
            "prunable": prunable,
            "parameters": parameters,
            "bytes": parameters * decoder.checkpoint.stored_dtype().itemsize,
            "blocks": len(variant.kept),
        },
    )
    say(f"{path.stem}: perplexity {exp(loss):.3f} ({exp(low):.3f} to {exp(high):.3f}) on {int(counts.sum()):,} tokens")


def read_scored(tokens: TensorFile, ids: Tensor) -> Tensor:
    """Which tokens of the evaluation windows are scored, bool [window, token]: all but the first where the file says nothing.

    Raises ArtifactError naming the file if it is of another shape, scores a first token, or leaves a window without any.
    """
    if "scored" not in tokens:
        scored = torch.ones(ids.shape, dtype=torch.bool)
        scored[:, 0] = False
        return scored
    shape = tokens.shape("scored")
    scored = tokens.read("scored").bool() if shape == tuple(ids.shape) else torch.zeros(1, 1, dtype=torch.bool)
    if scored[:, 0].any() or not scored.any(dim=1).all():
        raise ArtifactError(
            f"{tokens.path}: 'scored' ({shape}) does not say which tokens of {tuple(ids.shape)} are scored; "
            + producer(tokens.path)
        )
    return scored


def _push_through(variant: Variant, stream: Stream, ids: Tensor, batch_tokens: int) -> tuple[int, int]:
    """Run the variant's blocks over the stream. Returns zeros and weights in their prunable matrices."""
    zeros = prunable = 0
    for index in progress(variant.kept, "block"):
        with variant.block(index) as block:
            for matrix in prunable_matrices(block):
                if matrix.name.startswith("ghost_"):  # an operator of the export, not a matrix of the model
                    continue
                weight = matrix.view(block)
                zeros += weight.numel() - int(weight.count_nonzero())
                prunable += weight.numel()
            advance(variant.decoder, index, stream, batch_tokens, ids)
    return zeros, prunable


def _window_losses(variant: Variant, stream: Stream, ids: Tensor, scored: Tensor) -> Iterator[float]:
    """Mean loss in nats of each window over its scored tokens."""
    decoder = variant.decoder
    vocabulary = decoder.checkpoint.config.get_text_config().vocab_size
    step = max(1, LOGIT_BYTES // (vocabulary * 4))
    with variant.head():
        for window in progress(range(len(ids)), "window"):
            chosen = scored[window, 1:]
            hidden = stream.read(window, window + 1)[:, :-1][:, chosen].to(decoder.device)
            targets = ids[window, 1:][chosen].long().to(decoder.device)
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


def _parameters(variant: Variant) -> int:
    """Parameters of the variant, tied ones counted once."""
    decoder = variant.decoder
    gone = sum(p.numel() for index in variant.removed for p in decoder.blocks[index].parameters())
    return sum(p.numel() for p in decoder.model.parameters()) - gone


def _contract(tokens: TensorFile, ids: Tensor, counts: Tensor, decoder: Decoder) -> dict[str, object]:
    """All that has to be equal for two perplexities to be comparable."""
    alike = bool((counts == counts[0]).all())
    return {
        "stride": ids.shape[1],
        **{key: value for key, value in tokens.metadata.get("evaluation", {}).items() if value != ""},
        "length": ids.shape[1],
        "windows": ids.shape[0],
        **({"scored_per_window": int(counts[0])} if alike else {}),
        "dtype": str(decoder.dtype).removeprefix("torch."),
    }

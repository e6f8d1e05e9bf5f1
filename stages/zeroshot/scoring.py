"""Log-likelihoods of continuations in one sweep over the weights, a block at a time, so that any size of model fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pipeline.console import plan, progress
from stages.decoder.stream import Stream, advance, batches, finite_or_stop
from stages.decoder.variant import Variant

LOGIT_BYTES = 1 << 27  # logits of as many tokens at a time as fit in this
STEPS = ((128, 16), (1 << 30, 64))  # up to how many tokens, lengths are filled up to a multiple of what: few shapes, little waste


@dataclass(frozen=True)
class Request:
    """How likely is `continuation` behind `context`? Token ids, neither of them empty."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]

    @property
    def read(self) -> tuple[int, ...]:
        """What the model reads: all but the last token."""
        return (*self.context, *self.continuation)[:-1]


@dataclass(frozen=True)
class Bucket:
    """Sequences filled up with zeros to one length. What stands behind a token cannot change what a decoder says of it."""

    ids: Tensor  # [sequence, token]
    lengths: tuple[int, ...]
    requests: tuple[tuple[int, ...], ...]  # of each sequence: which requests read it


def loglikelihoods(
    variant: Variant, requests: Sequence[Request], longest: int, batch_size: int, batch_tokens: int, folder: Path
) -> list[tuple[float, bool]]:
    """For each request, the log-likelihood of its continuation in nats, and whether each token of it is the most likely one.

    Args:
        longest: tokens that the model can read at once; no request reads more.
        batch_size, batch_tokens: bounds of a batch.
        folder: where the scratch files lie.
    """
    decoder, buckets = variant.decoder, pack(requests, longest)
    width = decoder.width * decoder.dtype.itemsize
    plan(
        memory=max(decoder.block_bytes(), decoder.trunk_bytes() + 3 * LOGIT_BYTES) + 16 * max(batch_tokens, longest) * width,
        disk=sum(bucket.ids.numel() for bucket in buckets) * width,
        folder=folder,
        memory_key="compute.batch_tokens",
        disk_key="zeroshot.limit",
    )
    with ExitStack() as stack:
        streams = [stack.enter_context(Stream(folder, (*one.ids.shape, decoder.width), decoder.dtype)) for one in buckets]
        tokens = [min(batch_tokens, batch_size * one.ids.shape[1]) for one in buckets]
        with decoder.trunk():
            for bucket, stream, most in zip(buckets, streams, tokens, strict=True):
                for start, stop in batches(len(bucket.ids), bucket.ids.shape[1], most):
                    hidden = decoder.embed(bucket.ids[start:stop])
                    finite_or_stop(hidden, "embedding", start)
                    stream.write(start, hidden)
        for index in progress(variant.kept, "block"):
            with variant.block(index):
                for bucket, stream, most in zip(buckets, streams, tokens, strict=True):
                    advance(decoder, index, stream, most, bucket.ids)
        return _read_off(variant, requests, buckets, streams, longest)


def pack(requests: Sequence[Request], longest: int) -> list[Bucket]:
    """Buckets of rising length. Requests that read the same tokens share a sequence (answers of one token to one question)."""
    readers: dict[tuple[int, ...], list[int]] = {}
    for index, request in enumerate(requests):
        readers.setdefault(request.read, []).append(index)
    by_length: dict[int, list[tuple[int, ...]]] = {}
    for read in sorted(readers, key=lambda read: (len(read), read)):
        by_length.setdefault(min(_filled(len(read)), longest), []).append(read)
    buckets = []
    for length, reads in by_length.items():
        ids = torch.zeros(len(reads), length, dtype=torch.long)
        for row, read in enumerate(reads):
            ids[row, : len(read)] = torch.tensor(read)
        buckets.append(Bucket(ids, tuple(map(len, reads)), tuple(tuple(readers[read]) for read in reads)))
    return buckets


def _filled(length: int) -> int:
    step = next(step for most, step in STEPS if length <= most)
    return -(-length // step) * step


def _read_off(
    variant: Variant, requests: Sequence[Request], buckets: Sequence[Bucket], streams: Sequence[Stream], longest: int
) -> list[tuple[float, bool]]:
    decoder = variant.decoder
    vocabulary = decoder.checkpoint.config.get_text_config().vocab_size
    step = min(longest, max(1, LOGIT_BYTES // (vocabulary * 4)))
    found: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
    with variant.head():
        for group in progress(list(_groups(requests, buckets, step)), "answers"):
            hidden = [
                streams[place].read(row, row + 1)[0, end - len(requests[index].continuation) : end]
                for place, row, end, index in group
            ]
            targets = [torch.tensor(requests[index].continuation) for *_, index in group]
            logits = decoder.logits(torch.cat(hidden)[None].to(decoder.device))[0].float()
            chosen, best = logits.log_softmax(-1).cpu(), logits.argmax(-1).cpu()
            start = 0
            for (*_, index), target in zip(group, targets, strict=True):
                stop = start + len(target)
                likely = chosen[start:stop].gather(1, target[:, None])
                found[index] = float(likely.sum(dtype=torch.float64)), bool((best[start:stop] == target).all())
                start = stop
    return found


def _groups(requests: Sequence[Request], buckets: Sequence[Bucket], step: int) -> Iterator[list[tuple[int, int, int, int]]]:
    """(bucket, sequence, its length, request), as many at a time as have `step` tokens of continuation together, one at least."""
    group: list[tuple[int, int, int, int]] = []
    count = 0
    for place, bucket in enumerate(buckets):
        for row, (length, readers) in enumerate(zip(bucket.lengths, bucket.requests, strict=True)):
            for index in readers:
                tokens = len(requests[index].continuation)
                if group and count + tokens > step:
                    yield group
                    group, count = [], 0
                group.append((place, row, length, index))
                count += tokens
    if group:
        yield group

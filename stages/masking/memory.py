"""What masking needs at its peak, and keeping that the same for the last block as for the first."""

from __future__ import annotations

import ctypes
import sys

from pipeline.console import plan
from pipeline.tensors import TensorWriter
from stages.decoder.skeleton import Decoder
from stages.masking.shares import Key

LARGE_BLOCK = 1 << 27  # bytes
OWN_MAPPING = 1 << 22  # tensors from here on are given back to the operating system as soon as they are freed
_M_MMAP_THRESHOLD = -3


def map_large_tensors(block_bytes: int) -> None:
    """Where blocks are large, have every large tensor mapped on its own, for the rest of this process.

    glibc raises its threshold for that up to 32 MB as mapped tensors are freed. From then on the masks and scores of a block lie
    in a heap that small, lasting pieces keep from shrinking, and block after block its holes grow: the peak wobbled upwards by a
    third over 20 blocks, and was twice what the block needed. Fresh pages cost time, so small models are left alone.
    """
    if block_bytes >= LARGE_BLOCK and sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_M_MMAP_THRESHOLD, OWN_MAPPING)


def gram_bytes(sizes: dict[Key, tuple[int, int]]) -> int:
    """Bytes of the Grams of the block that needs most, and of the work on the largest; `sizes` as `budgets` takes them."""
    shared: dict[int, dict[tuple[str, int], int]] = {}  # matrices of one module with as many inputs most often share them
    for (block, name), (_, columns) in sizes.items():
        module, _, last = name.rpartition(".")
        shared.setdefault(block, {})[name if last.isdigit() else module, columns] = columns
    return max(8 * (sum(c**2 for c in widths.values()) + 2 * max(widths.values()) ** 2) for widths in shared.values())


def say_plan(
    decoder: Decoder,
    source: Decoder,
    sizes: dict[Key, tuple[int, int]],
    tokens: int,
    batch_tokens: int,
    file: TensorWriter,
    streams: bool,
    grams: bool,
    head: bool,
) -> None:
    """Say what memory and disk the stage will need; stop if they are not there.

    Args:
        source: the model in the precision that it is stored in.
        sizes: (block, matrix) -> (out, in).
        file: the masks, not yet written.
        streams: the calibration tokens go through the masked blocks.
        grams: whole Grams are collected, not squares alone.
        head: the logits' matrix is pruned too.
    """
    batch_bytes = min(batch_tokens, tokens) * decoder.width * decoder.dtype.itemsize
    block_bytes = 3 * source.block_bytes() + (decoder.block_bytes() if streams and source is not decoder else 0)
    if head:  # beside what surrounds the blocks: its magnitudes, scores and new weights in float32
        block_bytes = max(block_bytes, source.trunk_bytes() + 4 * 4 * source.head_weight.numel())
    plan(
        memory=block_bytes + 16 * batch_bytes + (gram_bytes(sizes) if grams else 0),
        disk=file.bytes + (tokens * decoder.width * decoder.dtype.itemsize if streams else 0),
        folder=file.path.parent,
        memory_key="compute.batch_tokens",
        disk_key="tokens.calibration_windows",
    )

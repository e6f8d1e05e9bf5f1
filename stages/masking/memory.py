"""Keeping the peak of a block's work the same for the last block as for the first."""

from __future__ import annotations

import ctypes
import sys

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

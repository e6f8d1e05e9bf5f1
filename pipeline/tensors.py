"""safetensors files, written in place and read in slices, so that memory holds a slice and never the file.

The format: eight bytes of header length, a JSON header, the tensors one after another. The header carries one
`__metadata__` key with sorted JSON: the safetensors library writes several keys in random order (its issue 584),
which would give equal content unequal bytes. Reading goes through the library.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipeline.artifacts import ArtifactError, producer

METADATA_KEY = "palimpsest"
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
Spec = tuple[tuple[int, ...], torch.dtype]


def write_at(fd: int, offset: int, value: Tensor) -> None:
    """Write the bytes of `value` (contiguous, on the CPU) at `offset`. Raises ArtifactError if the disk is full."""
    view = memoryview(value.view(-1).view(torch.uint8).numpy().data) if value.numel() else memoryview(b"")
    while view:
        try:
            count = os.pwrite(fd, view, offset)
        except OSError as error:
            raise ArtifactError(f"writing {value.numel() * value.itemsize} bytes: {error.strerror}") from None
        view, offset = view[count:], offset + count


def read_at(fd: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Read a tensor of `shape` and `dtype` from `offset`. Raises ArtifactError if the file ends before it does."""
    buffer = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
    view = memoryview(buffer.numpy().data)
    while view:
        count = os.preadv(fd, [view], offset)
        if count == 0:
            raise ArtifactError("a scratch file ended early; is something else writing to data/?")
        view, offset = view[count:], offset + count
    return buffer.view(dtype).view(shape)


class TensorWriter:
    """Write a safetensors file whose shapes are known in advance, tensor by tensor or row by row, in any order.

    Used as a context: the file appears under its name when the block ends without an error, and only then. Every
    byte must have been written by then; a tensor left out is an error, not a hole.
    """

    def __init__(
        self,
        path: Path,
        specs: Mapping[str, Spec],
        metadata: Mapping[str, Any] | None = None,
        raw_metadata: Mapping[str, str] | None = None,
    ):
        """
        Args:
            path: the file to make.
            specs: name -> (shape, dtype).
            metadata: anything JSON can say (units, axes); stored as one sorted JSON string.
            raw_metadata: stored as it is; for files that other programs read (`{"format": "pt"}`).
        """
        self.path = path
        self.specs = {name: specs[name] for name in sorted(specs)}
        header: dict[str, Any] = {}
        if raw_metadata:
            header["__metadata__"] = dict(sorted(raw_metadata.items()))
        elif metadata:
            header["__metadata__"] = {METADATA_KEY: json.dumps(metadata, sort_keys=True, allow_nan=False)}
        self._start: dict[str, int] = {}
        offset = 0
        # The library wants wide types first, so that every tensor is aligned.
        for name in sorted(self.specs, key=lambda name: (-self.specs[name][1].itemsize, name)):
            shape, dtype = self.specs[name]
            size = math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
            self._start[name] = offset
            offset += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._header = len(text).to_bytes(8, "little") + text
        self.bytes = len(self._header) + offset
        self._left = {name: math.prod(shape) for name, (shape, _) in self.specs.items()}
        self._temporary = path.with_name(f".{path.name}.partial")
        self._fd = -1

    def __enter__(self) -> TensorWriter:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
            write_at(self._fd, 0, torch.frombuffer(bytearray(self._header), dtype=torch.uint8))
            if hasattr(os, "posix_fallocate"):  # a full disk is found now, not in the eighth hour
                os.posix_fallocate(self._fd, 0, self.bytes)
        except OSError as error:
            self._discard()
            raise ArtifactError(f"{self.path}: cannot write {self.bytes} bytes ({error.strerror})") from None
        return self

    def write(self, name: str, value: Tensor, row: int = 0) -> None:
        """Write `value` into tensor `name` at index `row` of the first axis. Rows are written once each."""
        shape, dtype = self.specs[name]
        value = value.detach().to(device="cpu", dtype=dtype).contiguous()
        partial = value.shape != torch.Size(shape)
        if partial and (value.ndim != len(shape) or tuple(value.shape[1:]) != tuple(shape[1:]) or row + len(value) > shape[0]):
            raise ValueError(f"{name}: {tuple(value.shape)} does not fit {tuple(shape)} at row {row}")
        offset = len(self._header) + self._start[name] + row * math.prod(shape[1:]) * dtype.itemsize
        write_at(self._fd, offset, value)
        self._left[name] -= value.numel()

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Read rows `start:stop` of a tensor that is being written."""
        shape, dtype = self.specs[name]
        row = math.prod(shape[1:]) * dtype.itemsize
        offset = len(self._header) + self._start[name] + start * row
        return read_at(self._fd, offset, (stop - start, *shape[1:]), dtype)

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                holes = [name for name, left in self._left.items() if left != 0]
                if holes:
                    raise ValueError(f"{self.path}: tensors not written, or written twice: {', '.join(holes[:5])}")
                os.fsync(self._fd)
                self._temporary.replace(self.path)
        finally:
            self._discard()

    def _discard(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._temporary.unlink(missing_ok=True)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any] | None = None) -> None:
    """Write `tensors` as one safetensors file: atomic, equal bytes for equal content."""
    with TensorWriter(path, {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}, metadata) as writer:
        for name, value in tensors.items():
            writer.write(name, value)


class TensorFile:
    """A safetensors file to read from. Opens the file for each read, so that no mapping of it stays in memory."""

    def __init__(self, path: Path):
        """Raises ArtifactError naming the file if it is missing, truncated or no safetensors file."""
        self.path = path
        self.specs: dict[str, tuple[int, ...]] = {}
        with self._open() as file:
            try:
                self.metadata: dict[str, Any] = dict(json.loads((file.metadata() or {}).get(METADATA_KEY, "{}")))
            except (ValueError, TypeError):
                raise ArtifactError(f"{path}: metadata that is not ours; {producer(path)}") from None
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                self.specs[name] = tuple(file.get_slice(name).get_shape())

    def __contains__(self, name: str) -> bool:
        return name in self.specs

    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return sorted(self.specs)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of tensor `name`. Raises ArtifactError if it is not there."""
        if name not in self.specs:
            some = ", ".join(self.names()[:5])
            raise ArtifactError(f"{self.path}: no tensor '{name}' (it has {some}, …); {producer(self.path)}")
        return self.specs[name]

    def read(self, name: str) -> Tensor:
        """The whole tensor `name`, in memory of its own."""
        self.shape(name)
        with self._open() as file:
            return file.get_tensor(name).clone()

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows `start:stop` of tensor `name`, in memory of their own."""
        self.shape(name)
        with self._open() as file:
            return file.get_slice(name)[start:stop].clone()

    def _open(self) -> Any:
        try:
            return safe_open(self.path, framework="pt")
        except FileNotFoundError:
            raise ArtifactError(f"{self.path}: not there; {producer(self.path)}") from None
        except (SafetensorError, OSError) as error:
            raise ArtifactError(f"{self.path}: not a whole safetensors file ({error}); {producer(self.path)}") from None


def check_finite(value: Tensor, what: str) -> Tensor:
    """Return `value`, or raise ArtifactError naming `what` if it holds NaN or infinity."""
    quick = value.is_floating_point() and torch.isfinite(value.sum(dtype=torch.float32))  # NaN and infinity survive a sum
    if not quick and not torch.isfinite(value).all():
        raise ArtifactError(f"{what}: NaN or infinite values")
    return value

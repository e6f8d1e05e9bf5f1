"""A decoder-only language model whose weights are on disk: one block in memory at a time.

Nothing about an architecture is named here. The blocks are the longest outermost `ModuleList` of one class. How a block
must be called is asked of the model itself: every block is replaced by a recorder that notes the arguments it is given
and hands the hidden state on, and the model's own forward runs once per batch shape. The same trick gives the head:
recorders that reply with a given hidden state leave the final norm and the logits to the model's own forward.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging as transformers_logging

from pipeline.errors import PalimpsestError
from stages.decoder.checkpoint import Checkpoint

TRUNK, HEAD = -1, -2  # groups of tensors beside the blocks 0, 1, …: around the blocks, and the logits' matrix


class DecoderError(PalimpsestError):
    """The checkpoint cannot be run as a stack of decoder blocks."""


@dataclass
class Call:
    """The arguments one block is given beside its hidden state."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class _Log:
    """What the recorders have seen, and what they answer."""

    calls: list[Call] = field(default_factory=list)
    first: Tensor | None = None
    reply: Tensor | None = None
    tail: tuple[Any, ...] | None = None  # what a block returns behind the hidden state; None: it returns a bare tensor


class _Recorder(nn.Module):
    """Stands in for a block. Carries the block's plain attributes, since models look some of them up."""

    def __init__(self, block: nn.Module, log: _Log):
        super().__init__()
        self.__dict__["_block"] = block
        self.__dict__["_log"] = log

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_block"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        log: _Log = self.__dict__["_log"]
        if args:
            hidden, args = args[0], args[1:]
        else:
            hidden = kwargs.pop("hidden_states")
        log.calls.append(Call(args, dict(kwargs)))
        if log.first is None:
            log.first = hidden
        answer = hidden if log.reply is None else log.reply
        return answer if log.tail is None else (answer, *log.tail)


class Decoder:
    """A checkpoint seen as embedding, blocks and head.

    Blocks are loaded by `with decoder.block(index) as block:` and are gone afterwards; embedding, final norm and head by
    `with decoder.trunk():`. Forward passes run without gradients in `dtype` on `device`.
    """

    def __init__(
        self, folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu", trust_remote_code: bool | None = None
    ):
        """Build the skeleton; read no weights.

        Raises:
            DecoderError: the model has no stack of like blocks, or the checkpoint lacks tensors of it.
        """
        transformers_logging.disable_progress_bar()
        self.checkpoint = Checkpoint(folder, trust_remote_code)
        self.dtype, self.device = dtype, device
        with init_empty_weights(include_buffers=False):
            self.model = AutoModelForCausalLM.from_config(
                self.checkpoint.config, dtype=dtype, trust_remote_code=self.checkpoint.trust_remote_code
            )
        self.model.eval().requires_grad_(False)
        if hasattr(self.model, "set_experts_implementation"):
            self.model.set_experts_implementation("eager")  # the form that multiplies expert by expert, which hooks can see
        for module in self.model.modules():
            module._buffers.update({name: b.to(device) for name, b in module._buffers.items() if b is not None})
        self.path, self.blocks = find_blocks(self.model)
        self._conversions = get_model_conversion_mapping(self.model)
        self.stored: dict[str, torch.dtype] = {}  # name in the model -> widest dtype on disk of what it is made from
        self._groups = self._group_tensors()
        self._loaded: set[int] = set()
        self._calls: dict[tuple[int, int], list[Call]] = {}
        self._tail: tuple[Any, ...] | None = None
        self._tail_known = False
        self._mode: Callable[[], AbstractContextManager[Any]] = torch.inference_mode

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    @property
    def width(self) -> int:
        """Channels of the residual stream."""
        return self.checkpoint.config.get_text_config().hidden_size

    @property
    def head(self) -> nn.Module:
        """The module that makes the logits. Raises DecoderError if the model has none with a matrix."""
        head = self.model.get_output_embeddings()
        if getattr(head, "weight", None) is None:
            raise DecoderError(f"{self.checkpoint.folder}: {type(self.model).__name__} makes its logits without a matrix")
        return head

    @property
    def head_weight(self) -> Tensor:
        """Its matrix, [vocabulary, channel]; writing to it writes to the parameter."""
        return cast(nn.Parameter, self.head.weight).data

    @property
    def head_path(self) -> str:
        """Its name in the model."""
        head = self.head
        return next(name for name, module in self.model.named_modules() if module is head)

    def is_tied(self) -> bool:
        """Whether the logits' matrix is the embedding too."""
        return f"{self.head_path}.weight" in (getattr(self.model, "all_tied_weights_keys", None) or {})

    def block_bytes(self) -> int:
        """Bytes of the largest block in the dtype of forward passes."""
        return max(sum(p.numel() for p in block.parameters()) for block in self.blocks) * self.dtype.itemsize

    def trunk_bytes(self) -> int:
        """Bytes of everything beside the blocks, shared tensors counted once."""
        inside = {id(p) for p in self.blocks.parameters()}
        return sum(p.numel() for p in self.model.parameters() if id(p) not in inside) * self.dtype.itemsize

    def block_types(self) -> list[str]:
        """A name per block that is equal for blocks of one kind (class, attention type, parameter shapes)."""
        return [block_type(block) for block in self.blocks]

    @contextmanager
    def block(self, index: int) -> Iterator[nn.Module]:
        """Block `index` with its weights, for the duration of the context."""
        if index in self._loaded:  # inside another context that will unload it
            yield self.blocks[index]
            return
        self._load(index)
        self._loaded.add(index)
        try:
            yield self.blocks[index]
        finally:
            self._loaded.remove(index)
            _unload(self.blocks[index].modules())

    @contextmanager
    def trunk(self, head: bool = False) -> Iterator[None]:
        """Embedding and final norm (and the logits' matrix) with their weights, for the duration of the context."""
        self._load(TRUNK)
        if head:
            self._load(HEAD)
            self.model.tie_weights()
        try:
            yield
        finally:
            inside = set(self.blocks.modules())
            _unload(module for module in self.model.modules() if module not in inside)
            self.model.tie_weights()

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids [window, token] -> the stream that enters block 0, [window, token, channel]. Needs `trunk()`."""
        log = self._record(ids)
        self._calls[ids.shape[0], ids.shape[1]] = log.calls
        assert log.first is not None
        return log.first

    def call(self, index: int, hidden: Tensor, ids: Tensor | None = None) -> Tensor:
        """Run block `index`, which must be loaded, on `hidden` [window, token, channel].

        `ids` [window, token] are for exports whose operators treat some tokens apart.
        """
        if ids is not None and hasattr(self.model, "note_inputs"):
            self.model.note_inputs(input_ids=ids.to(self.device))
        call = self.calls(hidden.shape[0], hidden.shape[1])[index]
        with self._mode():
            out = self.blocks[index](hidden, *call.args, **call.kwargs)
        return out[0] if isinstance(out, tuple) else out

    @contextmanager
    def gradients(self) -> Iterator[None]:
        """For the duration of the context, `call` and `logits` note what a backward pass needs."""
        self._mode = torch.enable_grad
        try:
            yield
        finally:
            self._mode = torch.inference_mode

    def calls(self, windows: int, length: int) -> list[Call]:
        """The arguments of every block for full windows of this shape; they depend on nothing else.

        The first time, block 0 is run on two tokens to see what it returns: ask before something watches it.
        """
        if (windows, length) not in self._calls:
            with self.trunk():
                self.embed(torch.zeros(windows, length, dtype=torch.long))
        return self._calls[windows, length]

    def logits(self, hidden: Tensor) -> Tensor:
        """Final stream [window, token, channel] -> logits [window, token, vocabulary]. Needs `trunk(head=True)`."""
        ids = torch.zeros(hidden.shape[:2], dtype=torch.long)
        return self._record(ids, reply=hidden, whole=True)

    def head_inputs(self, hidden: Tensor) -> Tensor:
        """Final stream [window, token, channel] -> what the logits' matrix multiplies, behind the final norm. Needs `trunk()`."""
        seen: list[Tensor] = []

        def stop(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            seen.append(args[0])
            raise _Stopped

        handle = self.head.register_forward_pre_hook(stop)
        try:
            with suppress(_Stopped):
                self.logits(hidden)
        finally:
            handle.remove()
        return seen[0]

    def _record(self, ids: Tensor, reply: Tensor | None = None, whole: bool = False) -> Any:
        """Run the model's own forward over recorders. Returns the log, or with `whole` the logits."""
        log = _Log(reply=reply, tail=self._block_tail())
        model = self.model if whole else self.model.base_model
        mode = self._mode if whole else torch.no_grad  # what is replayed may take part in a backward pass
        with self._replaced([_Recorder(block, log) for block in self.blocks]), mode():
            out = model(input_ids=ids.to(self.device), use_cache=False)
        return out.logits if whole else log

    def _block_tail(self) -> tuple[Any, ...] | None:
        """What blocks return behind the hidden state, seen by running block 0 once on two tokens."""
        if not self._tail_known:
            self._tail_known = True
            log = _Log()
            probe = _Recorder(self.blocks[0], log)
            with self._replaced([_Stop(probe), *list(self.blocks)[1:]]), torch.no_grad():
                ids = torch.zeros(1, 2, dtype=torch.long, device=self.device)
                with suppress(_Stopped):
                    self.model.base_model(input_ids=ids, use_cache=False)
            call, hidden = log.calls[0], log.first
            assert hidden is not None
            later = hidden.clone()
            later[:, -1] += 1
            with self.block(0) as block, torch.no_grad():
                out, other = block(hidden, *call.args, **call.kwargs), block(later, *call.args, **call.kwargs)
            self._tail = tuple(out[1:]) if isinstance(out, tuple) else None
            first, changed = (one[0][:, 0] if isinstance(one, tuple) else one[:, 0] for one in (out, other))
            if not torch.allclose(first, changed, rtol=1e-2, atol=1e-4, equal_nan=True):
                raise DecoderError(
                    f"{self.checkpoint.folder}: block 0 of {type(self.model).__name__} looks ahead: its output at the first "
                    "token depends on the second, so it is no decoder and has no perplexity"
                )
        return self._tail

    @contextmanager
    def _replaced(self, stand_ins: list[nn.Module]) -> Iterator[None]:
        originals = list(self.blocks)
        try:
            for index, stand_in in enumerate(stand_ins):
                self.blocks._modules[str(index)] = stand_in
            yield
        finally:
            for index, original in enumerate(originals):
                self.blocks._modules[str(index)] = original

    def _load(self, group: int) -> None:
        state = {name: self.checkpoint.read(name) for name in self._groups.get(group, [])}
        if not state:
            return
        config = LoadStateDictConfig(device_map={"": self.device}, dtype=self.dtype, weight_mapping=list(self._conversions))  # type: ignore[arg-type]
        info, _ = convert_and_load_state_dict_in_model(self.model, state, config)
        problems = [*info.error_msgs, *(str(key) for key in info.mismatched_keys), *info.conversion_errors.values()]
        if problems:
            some = "; ".join(map(str, problems[:3]))
            raise DecoderError(f"{self.checkpoint.folder}: weights do not fit the model: {some}")
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)

    def _group_tensors(self) -> dict[int, list[str]]:
        """Group -> names on disk, by what the model's own loader would call them. Checks that none is missing."""
        expected = self.model.state_dict()
        renamings = [one for one in self._conversions if isinstance(one, WeightRenaming)]
        converters = [one for one in self._conversions if isinstance(one, WeightConverter)]
        prefix = self.model.base_model_prefix
        groups: dict[int, list[str]] = {}
        found: set[str] = set()
        for name in self.checkpoint.names():
            target, _ = rename_source_key(name, renamings, converters, prefix, expected)
            if target not in expected and name in expected:
                target = name
            if target in expected:
                groups.setdefault(self._group_of(target), []).append(name)
                made = {target, *self._siblings(target, converters)}
                found |= made
                on_disk = self.checkpoint.specs[name][1]
                for one in made:
                    self.stored[one] = _wider(self.stored.get(one), on_disk)
        tied = set(getattr(self.model, "all_tied_weights_keys", {}) or {})
        missing = sorted(set(expected) - found - tied)
        if missing:
            some = ", ".join(missing[:4])
            raise DecoderError(f"{self.checkpoint.folder}: {len(missing)} tensors of the model are not in the checkpoint: {some}")
        return groups

    def _group_of(self, name: str) -> int:
        if name.startswith(self.path + "."):
            return int(name.removeprefix(self.path + ".").split(".")[0])
        head = self.model.get_output_embeddings()
        names = {full for full, module in self.model.named_modules(remove_duplicate=False) if module is head}
        return HEAD if name.rsplit(".", 1)[0] in names else TRUNK

    @staticmethod
    def _siblings(target: str, converters: list[WeightConverter]) -> set[str]:
        """Other tensors that a converter makes from the same source (a fused matrix split in several)."""
        for converter in converters:
            patterns = converter.target_patterns
            if len(patterns) > 1:
                for pattern in patterns:
                    if pattern in target:
                        return {target.replace(pattern, other) for other in patterns}
        return set()


def as_stored(decoder: Decoder) -> Decoder:
    """A decoder of the same checkpoint with weights as precise as they are stored: `decoder` itself, or one in float32.

    For what weights decide, or what is written back: neither may depend on the dtype of forward passes.
    """
    wide = {dtype for _, dtype in decoder.checkpoint.specs.values() if dtype.is_floating_point and dtype.itemsize > 1}
    if decoder.dtype == torch.float32 or wide <= {decoder.dtype}:
        return decoder
    return Decoder(decoder.checkpoint.path, torch.float32, decoder.device, decoder.checkpoint.trust_remote_code)


def _wider(one: torch.dtype | None, other: torch.dtype) -> torch.dtype:
    return other if one is None or one == other or 1 in (one.itemsize, other.itemsize) else torch.promote_types(one, other)


class _Stopped(Exception):
    """Ends a forward pass that has shown what it was run for."""


class _Stop(nn.Module):
    """Records through `recorder`, then ends the pass."""

    def __init__(self, recorder: _Recorder):
        super().__init__()
        self.__dict__["_recorder"] = recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_recorder"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.__dict__["_recorder"](*args, **kwargs)
        raise _Stopped


def find_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The path and the list of the decoder's blocks: the longest outermost `ModuleList` of one class.

    Raises DecoderError if there is none.
    """
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    outermost = {name: one for name, one in lists.items() if not any(name.startswith(other + ".") for other in lists)}
    alike = {name: one for name, one in outermost.items() if len(one) and len({type(block) for block in one}) == 1}
    if not alike:
        raise DecoderError(f"{type(model).__name__}: no stack of decoder blocks found (no ModuleList of one class)")
    path = max(alike, key=lambda name: len(alike[name]))
    return path, alike[path]


def block_type(block: nn.Module) -> str:
    """A name that is equal for two blocks exactly if one can stand in for the other: same classes, shapes and settings.

    Settings are the plain attributes of the block and its parts (window, attention type, …), its own index left out.
    """
    shapes = ",".join(f"{name}:{'x'.join(map(str, p.shape))}" for name, p in block.named_parameters())
    settings = [
        f"{path}.{name}={value}"
        for path, module in block.named_modules()
        for name, value in sorted(vars(module).items())
        if isinstance(value, str | bool | int | float | type(None))
        if not name.startswith("_") and not {"idx", "id", "index"} & set(name.split("_"))
    ]
    digest = hashlib.sha256("\n".join([shapes, *settings]).encode()).hexdigest()[:8]
    kind = next((str(getattr(block, name)) for name in ("attention_type", "layer_type") if hasattr(block, name)), "")
    return "/".join(part for part in (type(block).__name__, kind, digest) if part)


def _unload(modules: Iterable[nn.Module]) -> None:
    """Put the parameters back on the meta device, and their memory back to the operating system."""
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
    if _malloc_trim is not None:  # glibc keeps what is freed, and block after block its heap would grow to the model's size
        _malloc_trim(0)


_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None

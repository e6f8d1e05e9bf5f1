"""The wavefront against the plain model: slots rewired in a copy, and the whole of it run, variant by variant."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from stages.decoder import wavefront
from stages.decoder.skeleton import Decoder
from stages.decoder.tape import Tape
from stages.decoder.wavefront import Changed, Prompts, Variant, chunks, measure, sweep
from tests.models import FAMILIES
from tests.plain import blocks_of, plain_logits, relative_gap
from tests.project import Project
from tests.stages.conftest import Finished

COUNT, LENGTH, DEPTH = 3, 12, 4


def plain_kl(model: Any, other: Any, ids: Tensor, positions: str = "all") -> Tensor:
    """KL(model || other) per prompt, float64 throughout."""
    p, q = (plain_logits(one, ids).double().log_softmax(-1) for one in (model, other))
    kl = (p.exp() * (p - q)).sum(-1)
    return kl.mean(-1) if positions == "all" else kl[:, -1]


def rewired(model: Any, order: list[int | None]) -> Any:
    """A copy in which slot l runs the block `order[l]`, or nothing."""
    twin = copy.deepcopy(model)
    blocks = blocks_of(twin)
    own = list(blocks)
    for slot, block in enumerate(order):
        blocks[slot] = _Nothing(own[slot]) if block is None else own[block]
    return twin


class _Nothing(nn.Module):
    """Hands its input on, as the block it stands for would return it."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "block" else getattr(super().__getattr__("block"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        out = self.block(*args, **kwargs)
        return (hidden, *out[1:]) if isinstance(out, tuple) else hidden


def setting(project: Project) -> tuple[Decoder, Prompts, Tensor]:
    ids = load_file(project.data / "tokens.safetensors")["calibration"][:COUNT, :LENGTH]
    return Decoder(project.data / "model"), Prompts(Tape(project.data / "tape.safetensors"), COUNT, LENGTH), ids


def orders(kinds: list[str]) -> Iterator[list[int | None]]:
    """All deletions, and for all pairs of one kind both replacements and the interchange."""
    for i in range(len(kinds)):
        yield [None if slot == i else slot for slot in range(len(kinds))]
        for j in range(i + 1, len(kinds)):
            if kinds[i] == kinds[j]:
                for changed in ({i: j}, {j: i}, {i: j, j: i}):
                    yield [changed.get(slot, slot) for slot in range(len(kinds))]


def as_variant(order: list[int | None]) -> Variant:
    return Variant(dict(enumerate(order)))


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_rewired_model_run_in_full(family: str, finished: Finished) -> None:
    project = finished(family)
    decoder, prompts, ids = setting(project)
    wanted = list(orders(decoder.block_types()))
    assert len(wanted) >= DEPTH + 6
    expected = torch.stack([plain_kl(project.model, rewired(project.model, order), ids) for order in wanted])
    assert float(expected.min()) > 1e-5, "every variant differs"
    found = measure(decoder, [as_variant(order) for order in wanted], prompts, batch_tokens=5 * LENGTH, memory=1 << 20)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def llama(finished: Finished) -> tuple[Any, Decoder, Prompts, Tensor]:
    project = finished("llama")
    return (project.model, *setting(project))


@pytest.mark.parametrize(("batch_tokens", "memory"), [(1, 1), (30, 10_000), (10**6, 10**9)])
def test_neither_batches_nor_the_budget_change_the_result(
    batch_tokens: int, memory: int, llama: tuple[Any, Decoder, Prompts, Tensor]
) -> None:
    model, decoder, prompts, ids = llama
    wanted: list[list[int | None]] = [[0, 2, 1, 3], [1, 1, 2, 3], [0, 1, 1, 3], [3, 1, 2, 0], [None, 1, None, 3], [2, 3, 0, 1]]
    expected = torch.stack([plain_kl(model, rewired(model, order), ids) for order in wanted])
    found = measure(decoder, list(map(as_variant, wanted)), prompts, batch_tokens=batch_tokens, memory=memory)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stack", [1, 4, 100])
def test_streams_stay_within_the_budget(
    stack: int, llama: tuple[Any, Decoder, Prompts, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the streams keep alive when a block is called, the batch itself apart: counted by storage, so views count whole."""
    _, decoder, prompts, _ = llama
    alive: weakref.WeakSet[wavefront._Stream] = weakref.WeakSet()

    class Noted(wavefront._Stream):
        def __init__(self, *args: Any):
            super().__init__(*args)
            alive.add(self)

    held: list[int] = []
    call = decoder.call

    def watched(index: int, hidden: Tensor) -> Tensor:
        storages = {one.hidden.untyped_storage() for one in alive if one.hidden is not None}
        held.append(sum({one.data_ptr(): one.nbytes() for one in storages}.values()) + hidden.nbytes)
        return call(index, hidden)

    monkeypatch.setattr(wavefront, "_Stream", Noted)
    monkeypatch.setattr(decoder, "call", watched)
    variants = [as_variant(order) for order in orders(decoder.block_types())]
    budget = len(variants) * COUNT * LENGTH * decoder.width * decoder.dtype.itemsize
    assert chunks(len(variants), prompts, decoder.dtype.itemsize, budget) == (COUNT, len(variants))
    measure(decoder, variants, prompts, batch_tokens=stack * COUNT * LENGTH, memory=budget)
    assert held and max(held) <= budget


def test_the_last_position_alone(llama: tuple[Any, Decoder, Prompts, Tensor]) -> None:
    model, decoder, prompts, ids = llama
    order: list[int | None] = [0, None, 2, 3]
    found = measure(decoder, [as_variant(order)], prompts, batch_tokens=64, memory=1 << 20, positions="last")
    torch.testing.assert_close(found[0], plain_kl(model, rewired(model, order), ids, "last"), rtol=1e-4, atol=1e-5)


def test_a_changed_block_and_a_function(llama: tuple[Any, Decoder, Prompts, Tensor]) -> None:
    """Slot 1 runs block 1 with a weight halved; slots 1 and 2 make way for a linear map."""
    model, decoder, prompts, ids = llama
    m = torch.randn(32, 32, generator=torch.Generator().manual_seed(3)) / 10

    @contextmanager
    def halved(block: nn.Module) -> Iterator[None]:
        weight = block.get_parameter("mlp.down_proj.weight")
        weight.mul_(0.5)
        yield
        weight.mul_(2)

    pruned, ghost = copy.deepcopy(model), rewired(model, [0, 1, None, 3])
    blocks_of(pruned)[1].get_parameter("mlp.down_proj.weight").data.mul_(0.5)
    handle: Callable[..., Tensor] = lambda block, args, out: args[0] + args[0] @ m  # noqa: E731
    blocks_of(ghost)[1].register_forward_hook(handle)
    variants = [
        Variant({1: Changed(1, halved)}),
        Variant({1: None}),
        Variant({1: lambda x: x + x @ m, 2: None}),
        Variant({2: Changed(1, halved)}),
    ]
    found = measure(decoder, variants, prompts, batch_tokens=64, memory=1 << 20)
    torch.testing.assert_close(found[0], plain_kl(model, pruned, ids), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[1], plain_kl(model, rewired(model, [0, None, 2, 3]), ids), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[2], plain_kl(model, ghost, ids), rtol=1e-4, atol=1e-5)
    late = copy.deepcopy(pruned)
    blocks_of(late)[2] = blocks_of(late)[1]
    blocks_of(late)[1] = blocks_of(copy.deepcopy(model))[1]
    torch.testing.assert_close(found[3], plain_kl(model, late, ids), rtol=1e-4, atol=1e-5)


def test_the_dense_model_is_at_no_distance(llama: tuple[Any, Decoder, Prompts, Tensor]) -> None:
    """As nothing changed, and run anew from block 1 on by a change that changes nothing."""
    _, decoder, prompts, _ = llama

    @contextmanager
    def unchanged(block: nn.Module) -> Iterator[None]:
        yield

    found = measure(
        decoder, [Variant(), Variant({2: 2}), Variant({1: Changed(1, unchanged)})], prompts, batch_tokens=64, memory=1
    )
    assert not found[:2].any() and float(found[2].max()) < 1e-6


@pytest.mark.parametrize("gap", [1, 2, 3])
def test_each_block_is_read_once_and_gap_plus_one_stay(gap: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = Project(tmp_path, blocks=7)
    project.run("capture")
    decoder, prompts, _ = setting(project)
    variants = [as_variant(order) for order in orders(["one"] * 7)]
    near = [one for one in variants if all(block is None or abs(slot - block) <= gap for slot, block in one.slots.items())]  # type: ignore[operator]
    loads, most = [0] * 7, 0
    read = decoder._load

    def load(group: int) -> None:
        nonlocal most
        read(group)
        if group >= 0:
            loads[group] += 1
            most = max(most, sum(next(block.parameters()).device.type != "meta" for block in decoder.blocks))

    decoder.calls(1, LENGTH)  # what block 0 returns is asked once per model, not per sweep
    monkeypatch.setattr(decoder, "_load", load)
    finals = sweep(decoder, near, prompts, 0, COUNT, 10**6)
    assert loads == [1] * 7 and most == gap + 1
    assert all(next(block.parameters()).device.type == "meta" for block in decoder.blocks)
    alone = [sweep(decoder, [one], prompts, 0, COUNT, 10**6)[0] for one in near]
    assert max(relative_gap(one, other) for one, other in zip(finals, alone, strict=True)) < 1e-5


def test_variants_alike_so_far_are_run_once(llama: tuple[Any, Decoder, Prompts, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Slot 0 runs block 1, the interchange and the deletion of block 0 all begin with block 1 on the embedding."""
    _, decoder, prompts, _ = llama
    ran: list[tuple[int, int]] = []
    call = decoder.call
    monkeypatch.setattr(decoder, "call", lambda index, hidden: ran.append((index, len(hidden))) or call(index, hidden))
    sweep(decoder, [Variant({0: 1}), Variant({0: 1, 1: 0}), Variant({0: None})], prompts, 0, COUNT, 10**6)
    assert ran == [(1, COUNT), (1, COUNT), (0, COUNT), (2, 3 * COUNT), (3, 3 * COUNT)]


def test_chunks_fit_the_budget_and_split_prompts_first(llama: tuple[Any, Decoder, Prompts, Tensor]) -> None:
    _, _, prompts, _ = llama
    stream = LENGTH * 32 * 4
    assert chunks(10, prompts, 4, 30 * stream) == (3, 10)
    assert chunks(10, prompts, 4, 29 * stream) == (2, 10)
    assert chunks(10, prompts, 4, 7 * stream) == (1, 7)
    assert chunks(10, prompts, 4, 1) == (1, 1)
    assert chunks(1, prompts, 4, 10**9) == (COUNT, 1)

"""Log-likelihoods in one sweep against the plain model, one request at a time; and how requests are packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.files import Files
from pipeline.tensors import write_tensors
from stages.decoder.compute import Compute
from stages.decoder.masks import HEAD, kept_name, mask_name, pack_mask
from stages.decoder.matrices import prunable_matrices
from stages.decoder.variant import read_variant
from stages.zeroshot import scoring
from stages.zeroshot.scoring import Request, loglikelihoods, pack
from tests.models import save_model


def requests(model: Any, count: int = 7) -> list[Request]:
    """Some random, some that greedy decoding gives, some that share what is read."""
    draw = np.random.default_rng(1)
    made = []
    for index in range(count):
        context = [int(one) for one in draw.integers(3, 96, 1 + 4 * index)]
        greedy = list(context)
        for _ in range(1 + index % 3):
            greedy.append(int(model(torch.tensor([greedy])).logits[0, -1].argmax()))
        made.append(Request(tuple(context), tuple(greedy[len(context) :])))
        made += [Request(tuple(context), (int(one),)) for one in draw.integers(3, 96, 2)]
        made.append(Request(tuple(context), tuple(int(one) for one in draw.integers(3, 96, 2 + index))))
    return made


def one_by_one(model: Any, request: Request) -> tuple[float, bool]:
    logits = model(torch.tensor([request.read])).logits[0].detach().log_softmax(-1)[-len(request.continuation) :]
    target = torch.tensor(request.continuation)
    return float(logits.gather(1, target[:, None]).sum()), bool((logits.argmax(-1) == target).all())


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral_sliding", "gemma3"])
def test_against_the_plain_model(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_model(tmp_path / "data/model", family, blocks=2)
    asked = requests(model)
    expected = [one_by_one(model, one) for one in asked]
    assert {greedy for _, greedy in expected} == {True, False}
    variant = read_variant(Files("zeroshot", "deps", ("model",), tmp_path), Compute(dtype="float32", device="cpu"))
    for batch_size, batch_tokens, logit_bytes in [(1, 1, 1), (3, 4096, 96 * 4 * 5), (64, 4096, 1 << 27)]:
        monkeypatch.setattr(scoring, "LOGIT_BYTES", logit_bytes)
        found = loglikelihoods(variant, asked, 64, batch_size, batch_tokens, tmp_path)
        np.testing.assert_allclose([one for one, _ in found], [one for one, _ in expected], rtol=1e-4)
        assert [one for _, one in found] == [one for _, one in expected]


def test_a_masked_head_answers(tmp_path: Path) -> None:
    model = save_model(tmp_path / "data/model", "llama", blocks=2)
    asked = requests(model)
    keep = torch.rand(model.lm_head.weight.shape, generator=torch.Generator().manual_seed(0)) > 0.5
    found = {HEAD: keep}
    for index, block in enumerate(model.model.layers):
        found |= {mask_name(index, one.name): torch.ones_like(one.view(block)).bool() for one in prunable_matrices(block)}
    packed = {name: pack_mask(one) for name, one in found.items()}
    counts = {kept_name(name): one.sum().view(1) for name, one in found.items()}
    write_tensors(tmp_path / "data/masks.safetensors", {**packed, **counts})
    model.lm_head.weight.data[~keep] = 0
    expected = [one_by_one(model, one) for one in asked]
    variant = read_variant(
        Files("zeroshot", "deps", ("model", "masks.safetensors"), tmp_path), Compute(dtype="float32", device="cpu")
    )
    scores = loglikelihoods(variant, asked, 64, 8, 4096, tmp_path)
    np.testing.assert_allclose([one for one, _ in scores], [one for one, _ in expected], rtol=1e-4)


TOKENS = st.lists(st.integers(1, 3), min_size=1, max_size=6).map(tuple)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=12), st.integers(11, 40))
def test_every_request_finds_what_it_reads_once(pairs: list[tuple[tuple[int, ...], tuple[int, ...]]], longest: int) -> None:
    asked = [Request(*pair) for pair in pairs]
    buckets = pack(asked, longest)
    seen: dict[int, tuple[int, ...]] = {}
    for bucket in buckets:
        assert bucket.ids.shape[1] <= longest
        for row, length, readers in zip(bucket.ids.tolist(), bucket.lengths, bucket.requests, strict=True):
            assert not any(row[length:])
            seen |= dict.fromkeys(readers, tuple(row[:length]))
    assert seen == {index: one.read for index, one in enumerate(asked)}
    assert sum(len(bucket.lengths) for bucket in buckets) == len({one.read for one in asked})

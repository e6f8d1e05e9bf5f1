"""Which blocks go: cosines, and the selections made from them, by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import PalimpsestError
from stages.decoder.operators import operator_name, runs_of
from stages.redundancy import cosine
from stages.removal.shortgpt import shortgpt
from stages.removal.streamline import streamline
from tests.kernels.shapes import checked

token_cosines = checked(cosine.token_cosines)


def matrix(blocks: int, **cosines: float) -> np.ndarray:
    """Cosine 0 for all pairs but those given, as `i_j=value` with an underscore in front."""
    full = np.eye(blocks + 1)
    for key, value in cosines.items():
        i, j = key.removeprefix("_").split("_")
        full[int(i), int(j)] = value
    return full


def test_cosines_by_hand() -> None:
    """Three boundaries, two tokens: a right angle, 45 degrees, opposite, and a zero vector."""
    stream = torch.tensor([[[1.0, 0.0], [2.0, 0.0]], [[0.0, 3.0], [-5.0, 0.0]], [[7.0, 7.0], [0.0, 0.0]]])
    half = 0.5**0.5
    expected = [[[1, 0, half], [0, 1, half], [half, half, 1]], [[1, -1, 0], [-1, 1, 0], [0, 0, 0]]]
    torch.testing.assert_close(token_cosines(stream), torch.tensor(expected))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 6), st.integers(0, 10**6))
def test_cosines_are_those_of_torch_along_channels(boundaries: int, count: int, channels: int, seed: int) -> None:
    stream = torch.randn(boundaries, count, channels, generator=torch.Generator().manual_seed(seed)) * 100
    found = token_cosines(stream)
    for i in range(boundaries):
        for j in range(boundaries):
            expected = torch.cosine_similarity(stream[i].double(), stream[j].double(), dim=-1)
            torch.testing.assert_close(found[:, i, j].double(), expected, atol=1e-6, rtol=0)
    assert (found.abs() <= 1).all()


def test_bfloat16_is_compared_in_float32() -> None:
    stream = torch.randn(2, 3, 64).to(torch.bfloat16)
    assert torch.equal(token_cosines(stream), token_cosines(stream.float()))


def test_streamline_takes_the_most_alike_window() -> None:
    assert streamline(matrix(6, _1_3=0.7, _2_4=0.9, _3_5=0.8), 2, set()) == (
        [2, 3],
        {0: 0.0, 1: 0.7, 2: 0.9, 3: 0.8, 4: 0.0},
    )


@pytest.mark.parametrize(("key", "removed"), [("_0_2", [0, 1]), ("_3_5", [3, 4])])
def test_streamline_considers_the_first_and_the_last_window(key: str, removed: list[int]) -> None:
    assert streamline(matrix(5, **{key: 0.1}), 2, set())[0] == removed


def test_streamline_never_touches_protected_blocks() -> None:
    best_at_the_ends = matrix(5, _0_2=0.9, _3_5=0.8, _1_3=0.1, _2_4=0.2)
    chosen, scores = streamline(best_at_the_ends, 2, {0, 4})
    assert chosen == [2, 3] and set(scores) == {1, 2}
    assert streamline(best_at_the_ends, 2, {2})[0] == [0, 1], "a protected block in the middle"


def test_streamline_ties_go_to_the_earlier_window_also_below_zero() -> None:
    assert streamline(matrix(4, _1_3=0.5, _2_4=0.5), 2, set())[0] == [1, 2]
    below = matrix(3, _0_1=-0.5, _1_2=-0.25, _2_3=-0.25)
    assert streamline(below, 1, set())[0] == [1], "though no window is above zero"


def test_streamline_can_take_all_but_the_protected() -> None:
    assert streamline(matrix(4), 2, {0, 3})[0] == [1, 2]


def test_streamline_without_a_window_says_what_to_change() -> None:
    with pytest.raises(PalimpsestError, match=r"removal\.count = 2.*removal\.protect \[1, 3\]"):
        streamline(matrix(5), 2, {1, 3})


def test_shortgpt_takes_the_least_influential_anywhere() -> None:
    cosines = matrix(5, _0_1=0.2, _1_2=0.9, _2_3=0.1, _3_4=0.8, _4_5=0.95)
    chosen, scores = shortgpt(cosines, 3, set())
    assert chosen == [1, 3, 4], "in order of depth, the last block considered"
    assert scores == pytest.approx({0: 0.8, 1: 0.1, 2: 0.9, 3: 0.2, 4: 0.05})
    assert shortgpt(cosines, 3, {4})[0] == [0, 1, 3]
    assert shortgpt(matrix(3, _0_1=0.9), 1, set())[0] == [0], "the first block considered"


def test_shortgpt_ties_go_to_the_earlier_block() -> None:
    assert shortgpt(matrix(5, _0_1=0.1, _1_2=0.5, _2_3=0.5, _3_4=0.5), 2, set())[0] == [1, 2]


@settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(0, 30)), st.randoms())
def test_runs_join_neighbours_and_nothing_else(removed: set[int], random: object) -> None:
    shuffled = list(removed)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    runs = runs_of(shuffled)
    assert [block for start, stop in runs for block in range(start, stop)] == sorted(removed)
    assert all(stop < start for (_, stop), (start, _) in zip(runs, runs[1:], strict=False))


def test_runs_by_hand() -> None:
    assert runs_of([7, 3, 4]) == [(3, 5), (7, 8)] and runs_of([]) == [] and runs_of([0]) == [(0, 1)]
    assert operator_name(3, 5) == "runs.3-5"

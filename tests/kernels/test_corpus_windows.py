"""Kernels of stage `tokens` on ids: packing, choosing, and where the BOS goes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import PalimpsestError
from stages.corpus.windows import choose, pack

BOS = 1000


def ids(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.int32)


def test_hand_packed() -> None:
    assert pack(ids(7), 3).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert pack(ids(7), 3, BOS).tolist() == [[BOS, 0, 1], [BOS, 2, 3], [BOS, 4, 5]]


@given(st.integers(0, 60), st.integers(2, 9), st.booleans())
def test_packing_keeps_order_and_loses_only_the_rest(count: int, length: int, marked: bool) -> None:
    windows = pack(ids(count), length, BOS if marked else None)
    body = windows[:, 1:] if marked else windows
    assert windows.dtype == np.int32
    assert windows.shape == (count // (length - marked), length)
    assert body.flatten().tolist() == list(range(body.size))
    assert (windows == BOS).sum() == (len(windows) if marked else 0)


def test_bos_is_not_doubled() -> None:
    text = ids(9)
    text[4] = BOS  # the first place of the third window
    with pytest.raises(PalimpsestError, match="would put another"):
        pack(text, 3, BOS)
    text[4], text[5] = 4, BOS  # elsewhere it is text
    assert pack(text, 3, BOS).shape == (4, 3)


@given(st.integers(1, 50), st.integers(0, 5), st.data())
def test_chosen_windows_are_different_ones_and_nested(total: int, seed: int, data: st.DataObject) -> None:
    windows = pack(ids(2 * total), 2)
    count = data.draw(st.integers(1, total))
    chosen = choose(windows, count, "random", seed)
    assert len({tuple(row) for row in chosen.tolist()} & {tuple(row) for row in windows.tolist()}) == count
    assert (choose(windows, total, "random", seed)[:count] == chosen).all()
    assert (choose(windows, count, "first", seed) == windows[:count]).all()


def test_every_window_can_be_drawn() -> None:
    drawn = [int(choose(pack(ids(10), 2), 1, "random", seed)[0, 0]) // 2 for seed in range(60)]
    assert set(drawn) == set(range(5))

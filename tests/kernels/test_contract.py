"""The evaluation contract: which tokens are scored, with what before them, against a loop that goes token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.errors import PalimpsestError
from stages.corpus.windows import pack
from stages.tokens import Tokens
from stages.tokens.contract import PUBLISHED_TEXT, READY, Contract, first_words
from stages.tokens.slide import slide

BOS = 1000


def ids(count: int) -> np.ndarray:
    return np.arange(1, count + 1, dtype=np.int32)


def scored_pairs(windows: np.ndarray, scored: np.ndarray) -> list[tuple[list[int], int]]:
    """(what stands before it, the token) of every scored token, in order."""
    rows = zip(windows, scored, strict=True)
    return [(row[:place].tolist(), int(row[place])) for row, chosen in rows for place in chosen.nonzero()[0]]


def loop(count: int, contract: Contract, bos: int | None) -> list[tuple[list[int], int]]:
    """The same from the definition: go from window to window and score what no earlier window had."""
    lead, found, seen, begin = [bos] if bos is not None else [], [], 0, 0
    while begin < count:
        end = min(begin + contract.body, count)
        if end - begin < contract.body and contract.rest == "dropped":
            break
        new = list(range(max(seen, begin), end))
        if contract.overlap == "published" and begin < seen:
            new = new[1:]
        pairs = [(lead + list(range(begin + 1, place + 1)), place + 1) for place in new]
        found += [pair for pair in pairs if pair[0]]
        seen, begin = end, begin + contract.stride
        if end == count:
            break
    return found


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 40), st.integers(2, 9), st.data(), st.sampled_from(["dropped", "kept"]), st.sampled_from(["new", "published"]),
    st.booleans(),
)  # fmt: skip
def test_windows_are_those_of_the_loop(
    count: int, window: int, data: st.DataObject, rest: Any, overlap: Any, marked: bool
) -> None:
    stride = data.draw(st.integers(1, window - marked))
    special = "window" if marked else "none"
    contract = Contract(window=window, stride=stride, rest=rest, overlap=overlap, special_tokens=special)
    bos = BOS if marked else None
    windows, scored = slide(ids(count), contract, bos)
    assert windows.dtype == np.int32 and windows.shape == scored.shape and windows.shape[1] == window
    assert scored_pairs(windows, scored) == loop(count, contract, bos)
    assert scored.any(axis=1).all()
    if overlap == "new" and rest == "kept" and stride < contract.body:
        assert [token for _, token in scored_pairs(windows, scored)] == list(range(2 - marked, count + 1)), "each token once"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 40), st.integers(2, 9), st.booleans())
def test_end_to_end_is_packing(count: int, window: int, marked: bool) -> None:
    contract = Contract(window=window, stride=window - marked, special_tokens="window" if marked else "none")
    windows, scored = slide(ids(count), contract, BOS if marked else None)
    assert windows.tolist() == pack(ids(count), window, BOS if marked else None).tolist()
    assert scored[:, 1:].all() and not scored[:, 0].any()


def test_by_hand() -> None:
    contract = Contract(window=4, stride=2, rest="kept")
    windows, scored = slide(ids(7), contract)
    assert windows.tolist() == [[1, 2, 3, 4], [3, 4, 5, 6], [5, 6, 7, 0]]
    assert scored.astype(int).tolist() == [[0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 1, 0]]
    _, scored = slide(ids(7), contract.model_copy(update={"overlap": "published"}))
    assert scored.astype(int).tolist() == [[0, 1, 1, 1], [0, 0, 0, 1]], "a window that adds nothing is left out"


@pytest.mark.parametrize(("tokens", "windows", "scored"), [(5756, 22, 5734), (5606, 21, 5585)])
def test_the_counts_that_no_free_swap_publishes(tokens: int, windows: int, scored: int) -> None:
    """Scored tokens and windows of its Qwen and Llama rows."""
    found, chosen = slide(ids(tokens), READY["no_free_swap"])
    assert (len(found), int(chosen.sum())) == (windows, scored)


def test_bos_is_not_doubled() -> None:
    text = ids(9)
    text[2] = BOS  # the second window begins there
    with pytest.raises(PalimpsestError, match="would put another"):
        slide(text, Contract(window=4, stride=2, special_tokens="window"), BOS)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(alphabet="ab \n", max_size=8), max_size=5), st.integers(1, 6))
def test_first_words(documents: list[str], count: int) -> None:
    words = " ".join(documents).split()[:count]
    assert list(first_words(documents, count)) == ([" ".join(words)] if words else [])
    assert list(first_words(documents, None)) == documents


def test_every_contract_says_what_it_is() -> None:
    assert set(READY) == set(PUBLISHED_TEXT) == {"wanda", "ghosted_layers", "no_free_swap"}
    assert Tokens().evaluation_contract() == Contract(windows=16)
    assert Tokens(special_tokens="window", length=8).evaluation_contract().stride == 7
    assert Tokens(contract="custom", custom=Contract(words=7)).evaluation_contract().words == 7
    assert Tokens(contract="wanda").evaluation_contract() is READY["wanda"]
    assert READY["no_free_swap"].terms() == {
        "length": 512, "stride": 256, "special_tokens": "text", "join": "words by single spaces", "words": 5000,
        "blank_documents": "dropped", "rest": "kept", "overlap": "context only, and one token more",
    }  # fmt: skip


@pytest.mark.parametrize("special", ["none", "window"])
def test_no_token_may_be_skipped(special: Any) -> None:
    Contract(window=8, stride=8 - (special == "window"), special_tokens=special)
    with pytest.raises(ValidationError, match="tokens would be skipped"):
        Contract(window=8, stride=9 - (special == "window"), special_tokens=special)

"""Text to token ids, with the beginning-of-sequence token (BOS) where the policy wants it and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np
from jaxtyping import Int32
from transformers import PreTrainedTokenizerBase

from pipeline.errors import PalimpsestError
from stages.corpus.text import join_documents

Policy = Literal["none", "window", "document", "text"]


def bos_of(tokenizer: PreTrainedTokenizerBase, policy: Policy) -> int | None:
    """The id that the policy adds, None for `none` and `text`. Raises PalimpsestError if the tokenizer has no BOS to add."""
    if policy in ("none", "text"):
        return None
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None:
        raise PalimpsestError(
            f"tokens.special_tokens = '{policy}' needs a beginning-of-sequence token, and this model's tokenizer "
            f"({type(tokenizer).__name__}) has none; set tokens.special_tokens: none"
        )
    return bos


def around_text(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """(before, behind): the special tokens that the tokenizer puts around a text when it is not told otherwise."""
    bare, full = encode(tokenizer, "a").tolist(), list(tokenizer("a", return_attention_mask=False)["input_ids"])
    start = next(at for at in range(len(full)) if full[at : at + len(bare)] == bare)
    return full[:start], full[start + len(bare) :]


def encode_documents(
    tokenizer: PreTrainedTokenizerBase, documents: Iterable[str], separator: str, bos: int | None, enough: int
) -> Int32[np.ndarray, " token"]:
    """Ids of the documents joined by `separator`, read until at least `enough` ids are there or the documents end.

    Args:
        bos: put before each document; None for nothing.
    """
    parts: list[np.ndarray] = [np.zeros(0, dtype=np.int32)]
    count = 0
    for text, begins in _pieces(documents, separator, apart=bos is not None):
        ids = encode(tokenizer, text)
        if begins:
            refuse_doubled(bos, ids[:1])
            parts.append(np.array([bos], dtype=np.int32))
        parts.append(ids)
        count += len(ids) + begins
        if count >= enough:
            break
    return np.concatenate(parts)


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> Int32[np.ndarray, " token"]:
    """Ids of `text` and nothing but `text`: the tokenizer is never asked for special tokens of its own."""
    ids = tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    return np.asarray(ids, dtype=np.int32)


def refuse_doubled(bos: int | None, following: np.ndarray) -> None:
    """Raise PalimpsestError if BOS is about to stand before another BOS that comes from the text."""
    if bos is not None and (following == bos).any():
        raise PalimpsestError(
            "the text itself holds the tokenizer's beginning-of-sequence token where tokens.special_tokens would put another; "
            "set tokens.special_tokens: none, or take it out of the text"
        )


def _pieces(documents: Iterable[str], separator: str, apart: bool) -> Iterator[tuple[str, bool]]:
    """(text, whether a document that wants its BOS begins there); `apart`: no piece spans two documents."""
    if not apart:
        yield from ((text, False) for text in join_documents(documents, separator))
        return
    held: str | None = None
    for document in documents:
        if held is not None:
            yield from ((text, index == 0) for index, text in enumerate(join_documents([held + separator], "")))
        held = document
    if held is not None:
        yield from ((text, index == 0) for index, text in enumerate(join_documents([held], "")))

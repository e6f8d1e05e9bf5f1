"""A split read, tokenised and cut: for calibration into windows end to end, for evaluation as the contract says."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int32
from transformers import PreTrainedTokenizerBase

from pipeline.console import say
from pipeline.errors import PalimpsestError
from stages.corpus.encode import around_text, bos_of, encode_documents, refuse_doubled
from stages.corpus.splits import Split
from stages.corpus.text import Tally, tallied
from stages.corpus.windows import pack
from stages.tokens import Tokens
from stages.tokens.contract import PUBLISHED_TEXT, Contract, first_words
from stages.tokens.slide import slide


@dataclass(frozen=True)
class Read:
    """A split that has been read: all its windows in order, which of their tokens are scored, and what was counted."""

    windows: Int32[np.ndarray, "window length"]
    scored: Bool[np.ndarray, "window length"]
    tally: Tally
    tokens: int


def read_calibration(split: Split, tokens: Tokens, tokenizer: PreTrainedTokenizerBase, bos: int | None) -> Read:
    """Tokenise and pack the calibration text. Raises PalimpsestError with the counts if it gives too few windows."""
    tally = Tally()
    each, window = (bos, None) if tokens.special_tokens == "document" else (None, bos)
    ids = encode_documents(tokenizer, tallied(split.documents, tally), tokens.separator, each, tokens.pool)
    windows = pack(ids, tokens.length, window)
    read = Read(windows, np.ones_like(windows, dtype=bool), tally, len(ids))
    _tell("calibration", split, read, tokens.pool, f"{tokens.calibration_windows} of {len(windows)} windows")
    _check_enough("calibration", split, read, tokens, tokens.calibration_windows, tokens.length - (window is not None))
    return read


def read_evaluation(split: Split, tokens: Tokens, contract: Contract, tokenizer: PreTrainedTokenizerBase) -> Read:
    """Tokenise the evaluation text and cut it by the contract.

    Raises PalimpsestError with the counts if it gives too few windows, or if a text to be scored whole is cut by `tokens.pool`.
    """
    tally, bos = Tally(), bos_of(tokenizer, contract.special_tokens)
    documents = first_words(tallied(split.documents, tally, keep_blank=contract.blank == "kept"), contract.words)
    each, window = (bos, None) if contract.special_tokens == "document" else (None, bos)
    ids = encode_documents(tokenizer, documents, contract.separator, each, tokens.pool)
    if len(ids) >= tokens.pool and contract.windows is None:
        raise PalimpsestError(
            f"tokens.contract = '{tokens.contract}' scores all of the text, and '{split.name}' has more than the {tokens.pool:,} "
            "tokens that tokens.pool allows; raise it"
        )
    if contract.special_tokens == "text":
        before, behind = around_text(tokenizer)
        refuse_doubled(before[-1] if before else None, ids[:1])
        ids = np.concatenate([np.array(before, np.int32), ids, np.array(behind, np.int32)])
    windows, scored = slide(ids, contract, window)
    read = Read(windows, scored, tally, len(ids))
    _tell("evaluation", split, read, tokens.pool, f"{len(windows)} windows, {int(scored.sum()):,} tokens scored")
    if tokens.contract in PUBLISHED_TEXT:
        say(f"'{tokens.contract}' is published for {PUBLISHED_TEXT[tokens.contract]}; here it is applied to '{split.name}'")
    _check_enough("evaluation", split, read, tokens, contract.windows or 1, contract.body)
    return read


def _tell(role: str, split: Split, read: Read, pool: int, windows: str) -> None:
    cut = " (as many as tokens.pool allows)" if read.tokens >= pool else ""
    say(f"{role}: {read.tally.documents} documents of '{split.name}', {read.tokens:,} tokens{cut}; {windows}")


def _check_enough(role: str, split: Split, read: Read, tokens: Tokens, wanted: int, own: int) -> None:
    """`own`: tokens of text in a window."""
    (there, length), tally = read.windows.shape, read.tally
    if wanted <= there:
        return
    more = f"add text to tokens.{role}_files" if tokens.source == "files" else f"choose a larger tokens.{role}_split"
    ours = role == "calibration" or tokens.contract == "ours"
    lower = f"tokens.{role}_windows or tokens.length" if ours else f"what tokens.contract '{tokens.contract}' asks for"
    raise PalimpsestError(
        f"{role}: {wanted} windows of {length} tokens need {wanted * own:,} tokens of text, but '{split.name}' has "
        f"{read.tokens:,} in {tally.documents} documents ({tally.blank} blank ones left out), which is {there} windows; "
        f"lower {lower}, or {more}"
    )

"""The windows of a training: the same that `tokens` makes with this tokenizer, `sampling: first` and the same text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int32
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from pipeline.console import say
from pipeline.errors import PalimpsestError
from stages.corpus.encode import encode_documents
from stages.corpus.splits import Corpus
from stages.corpus.windows import pack
from stages.training import Training
from stages.training.tokenizer import train_tokenizer

CHARACTERS = 16  # per token: more than any tokenizer packs into one


@dataclass(frozen=True)
class Data:
    """What is trained on and measured on, and the tokenizer that made it."""

    tokenizer: PreTrainedTokenizerBase
    train: Int32[Tensor, "window length"]
    test: Int32[Tensor, "other length"]

    @property
    def ids(self) -> dict[str, Any]:
        """What a configuration has to know of the tokenizer."""
        end = self.tokenizer.eos_token_id
        return {"vocab_size": len(self.tokenizer), "bos_token_id": end, "eos_token_id": end}


def read_data(training: Training, corpus: Corpus) -> Data:
    """Train the tokenizer on the beginning of the training text, and pack both texts into windows.

    Raises PalimpsestError naming the key if a text has fewer tokens than are asked for.
    """
    documents = _beginning(corpus.calibration.documents, CHARACTERS * training.tokens)
    tokenizer = train_tokenizer(documents, training.vocabulary)
    return Data(
        tokenizer,
        _windows(training, "tokens", tokenizer, documents, corpus.calibration.name),
        _windows(training, "test_tokens", tokenizer, corpus.evaluation.documents, corpus.evaluation.name),
    )


def _beginning(documents: Iterable[str], characters: int) -> list[str]:
    kept: list[str] = []
    for document in documents:
        if document.strip():
            kept.append(document)
            characters -= len(document)
            if characters <= 0:
                break
    return kept


def _windows(training: Training, key: str, tokenizer: Any, documents: Iterable[str], split: str) -> Tensor:
    wanted: int = getattr(training, key)
    whole = (text for text in documents if text.strip())
    ids = encode_documents(tokenizer, whole, training.separator, None, wanted)
    if len(ids) < wanted:
        raise PalimpsestError(
            f"training.{key} = {wanted}: '{split}' has {len(ids):,} tokens of a vocabulary of {len(tokenizer):,}; "
            "lower it, or add text"
        )
    windows = pack(ids[:wanted], training.length)
    say(f"{key}: {windows.size:,} of '{split}' in {len(windows)} windows of {training.length}")
    return torch.from_numpy(windows)

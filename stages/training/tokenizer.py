"""A tokenizer made from the training text: byte-level BPE, so that any text can be read."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from pipeline.errors import PalimpsestError

END = "<|endoftext|>"


def train_tokenizer(documents: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A tokenizer of `vocabulary` tokens, the first of which is the end of text.

    Raises PalimpsestError if the text has not so many pairs that are worth a token.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(documents, trainer)
    if backend.get_vocab_size() != vocabulary:
        raise PalimpsestError(
            f"training.vocabulary = {vocabulary}: the training text gives {backend.get_vocab_size()} tokens at most; lower it"
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=END, eos_token=END)

"""A tokenizer whose ids can be worked out by hand: a character a token, but for one merge."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,\n"
MERGED = ".\n"  # a full stop and the separator behind it: only seen where documents are joined before tokenising
IDS = {token: index for index, token in enumerate([*SPECIAL, *CHARACTERS, MERGED])}
BOS = IDS["<s>"]


def save_tokenizer(folder: Path, bos: bool = True) -> PreTrainedTokenizerFast:
    """Save the tokenizer in `folder`. With `bos`, it has a BOS and, asked for special tokens, puts it in front by itself."""
    backend = Tokenizer(models.BPE(vocab=IDS, merges=[(".", "\n")], unk_token="<unk>"))
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    names = {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "</s>", **({"bos_token": "<s>"} if bos else {})}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    tokenizer.save_pretrained(folder)
    return tokenizer


def ids_of(text: str) -> list[int]:
    """The ids that the tokenizer must give, spelled out."""
    pieces: list[str] = []
    for character in text:
        if character == "\n" and pieces and pieces[-1] == ".":
            pieces[-1] = MERGED
        else:
            pieces.append(character)
    return [IDS[piece] for piece in pieces]

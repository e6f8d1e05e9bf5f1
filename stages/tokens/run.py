"""Turn two corpora into windows of tokens: the text that every later stage sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int32
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from pipeline.console import say
from pipeline.errors import PalimpsestError
from pipeline.files import Files
from pipeline.tensors import write_tensors
from stages.corpus.encode import bos_of, encode_documents
from stages.corpus.read import read_corpus
from stages.corpus.splits import Corpus, Split
from stages.corpus.text import Tally, tallied
from stages.corpus.windows import choose, pack
from stages.decoder.checkpoint import Checkpoint
from stages.tokens import Params, Tokens


def run(params: Params, inputs: Files, outputs: Files) -> None:
    """Write `tokens.safetensors`: `calibration` and `evaluation`, int32 [window, length]."""
    tokens = params.tokens
    checkpoint = Checkpoint(inputs["model"])
    _check_length(tokens.length, checkpoint)
    tokenizer = load_tokenizer(checkpoint)
    bos = bos_of(tokenizer, tokens.special_tokens)
    corpus = read_corpus(tokens, inputs["corpus"].parent)

    calibration = read_split("calibration", corpus.calibration, tokens, tokenizer, bos)
    evaluation = read_split("evaluation", corpus.evaluation, tokens, tokenizer, bos)
    _check_vocabulary(checkpoint, calibration.windows, evaluation.windows)
    shared = len(calibration.tally.hashes & evaluation.tally.hashes)
    if shared:
        say(f"warning: {shared} documents stand in both the calibration and the evaluation text")

    write_tensors(
        outputs["tokens.safetensors"],
        {
            "calibration": torch.from_numpy(
                choose(calibration.windows, tokens.calibration_windows, tokens.sampling, tokens.seed)
            ),
            "evaluation": torch.from_numpy(choose(evaluation.windows, tokens.evaluation_windows, "first", tokens.seed)),
        },
        {
            "axes": ["window", "token"],
            "tokenizer": {"class": type(tokenizer).__name__, "vocabulary": len(tokenizer)},
            "special_tokens": {"policy": tokens.special_tokens, "bos": bos},
            "files": {"calibration": corpus.calibration.files, "evaluation": corpus.evaluation.files},
            "calibration": _about(corpus, corpus.calibration, calibration, tokens),
            "evaluation": _about(corpus, corpus.evaluation, evaluation, tokens),
            "shared_documents": shared,
        },
    )


@dataclass(frozen=True)
class Read:
    """A split that has been read: all its windows in order, and what was counted on the way."""

    windows: Int32[np.ndarray, "window length"]
    tally: Tally
    tokens: int


def read_split(role: str, split: Split, tokens: Tokens, tokenizer: PreTrainedTokenizerBase, bos: int | None) -> Read:
    """Tokenise and pack one split. Raises PalimpsestError with the counts if it gives too few windows."""
    tally = Tally()
    each, window = (bos, None) if tokens.special_tokens == "document" else (None, bos)
    ids = encode_documents(tokenizer, tallied(split.documents, tally), tokens.separator, each, tokens.pool)
    windows = pack(ids, tokens.length, window)
    wanted: int = getattr(tokens, f"{role}_windows")
    cut = " (as many as tokens.pool allows)" if len(ids) >= tokens.pool else ""
    say(f"{role}: {tally.documents} documents of '{split.name}', {len(ids):,} tokens{cut}; {wanted} of {len(windows)} windows")
    if wanted > len(windows):
        own = tokens.length - (window is not None)
        more = f"add text to tokens.{role}_files" if tokens.source == "files" else f"choose a larger tokens.{role}_split"
        raise PalimpsestError(
            f"{role}: {wanted} windows of {tokens.length} tokens need {wanted * own:,} tokens of text, but '{split.name}' has "
            f"{len(ids):,} in {tally.documents} documents ({tally.blank} blank ones left out), which is {len(windows)} windows; "
            f"lower tokens.{role}_windows or tokens.length, or {more}"
        )
    return Read(windows, tally, len(ids))


def _about(corpus: Corpus, split: Split, read: Read, tokens: Tokens) -> dict[str, Any]:
    """What a perplexity on these windows must be quoted with."""
    return {
        "corpus": f"{corpus.name} ({split.name})",
        "corpus_revision": corpus.revision,
        "corpus_sha256": read.tally.sha256,
        "corpus_documents": read.tally.documents,
        "corpus_tokens": read.tokens,
        "length": tokens.length,
        "special_tokens": tokens.special_tokens,
    }


def load_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    """The model's own tokenizer. Raises PalimpsestError if transformers cannot read it."""
    try:
        return AutoTokenizer.from_pretrained(checkpoint.folder, trust_remote_code=checkpoint.trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).strip().split("\n")[0][:200]
        raise PalimpsestError(
            f"{checkpoint.folder}: transformers cannot read the tokenizer ({reason}); check the checkpoint"
        ) from None


def _check_length(length: int, checkpoint: Checkpoint) -> None:
    longest = getattr(checkpoint.config.get_text_config(), "max_position_embeddings", None)
    if longest and length > longest:
        raise PalimpsestError(
            f"tokens.length = {length}: this model reads {longest} tokens at most (max_position_embeddings); lower it"
        )


def _check_vocabulary(checkpoint: Checkpoint, *all_windows: Int32[np.ndarray, "window length"]) -> None:
    size = checkpoint.config.get_text_config().vocab_size
    highest = max(int(windows.max()) for windows in all_windows)
    if highest >= size:
        raise PalimpsestError(
            f"{checkpoint.folder}: its tokenizer gives token {highest}, but the model has {size} embeddings; "
            "the tokenizer belongs to another model"
        )

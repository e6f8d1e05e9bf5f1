"""Turn two corpora into windows of tokens: the text that every later stage sees."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Int32
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from pipeline.console import say
from pipeline.errors import PalimpsestError
from pipeline.files import Files
from pipeline.tensors import write_tensors
from stages.corpus.encode import bos_of
from stages.corpus.read import read_corpus
from stages.corpus.splits import Corpus, Split
from stages.corpus.windows import choose
from stages.decoder.checkpoint import Checkpoint
from stages.tokens import Params
from stages.tokens.reading import Read, read_calibration, read_evaluation


def run(params: Params, inputs: Files, outputs: Files) -> None:
    """Write `tokens.safetensors`: `calibration` and `evaluation`, int32 [window, length]."""
    tokens = params.tokens
    contract = tokens.evaluation_contract()
    checkpoint = Checkpoint(inputs["model"])
    _check_length("tokens.length", tokens.length, checkpoint)
    _check_length(f"the window of tokens.contract '{tokens.contract}'", contract.window, checkpoint)
    tokenizer = load_tokenizer(checkpoint)
    bos = bos_of(tokenizer, tokens.special_tokens)
    corpus = read_corpus(tokens, inputs["corpus"].parent)

    calibration = read_calibration(corpus.calibration, tokens, tokenizer, bos)
    evaluation = read_evaluation(corpus.evaluation, tokens, contract, tokenizer)
    _check_vocabulary(checkpoint, calibration.windows, evaluation.windows)
    shared = len(calibration.tally.hashes & evaluation.tally.hashes)
    if shared:
        say(f"warning: {shared} documents stand in both the calibration and the evaluation text")

    tensors = {
        "calibration": choose(calibration.windows, tokens.calibration_windows, tokens.sampling, tokens.seed),
        "evaluation": evaluation.windows,
    }
    if not evaluation.scored[:, 1:].all():  # else it goes without saying: all but the first token of each window
        tensors["scored"] = evaluation.scored.astype(np.uint8)
    write_tensors(
        outputs["tokens.safetensors"],
        {name: torch.from_numpy(array) for name, array in tensors.items()},
        {
            "axes": ["window", "token"],
            "tokenizer": {"class": type(tokenizer).__name__, "vocabulary": len(tokenizer)},
            "special_tokens": {"policy": tokens.special_tokens, "bos": bos},
            "files": {"calibration": corpus.calibration.files, "evaluation": corpus.evaluation.files},
            "calibration": {
                **_about(corpus, corpus.calibration, calibration),
                "length": tokens.length,
                "special_tokens": tokens.special_tokens,
            },
            "evaluation": {
                **_about(corpus, corpus.evaluation, evaluation),
                "contract": tokens.contract,
                "split": corpus.evaluation.name,
                **contract.terms(),
            },
            "shared_documents": shared,
        },
    )


def _about(corpus: Corpus, split: Split, read: Read) -> dict[str, Any]:
    """The text, as a perplexity on it must be quoted with."""
    return {
        "corpus": f"{corpus.name} ({split.name})",
        "corpus_revision": corpus.revision,
        "corpus_sha256": read.tally.sha256,
        "corpus_documents": read.tally.documents,
        "corpus_tokens": read.tokens,
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


def _check_length(what: str, length: int, checkpoint: Checkpoint) -> None:
    longest = getattr(checkpoint.config.get_text_config(), "max_position_embeddings", None)
    if longest and length > longest:
        raise PalimpsestError(f"{what} = {length}: this model reads {longest} tokens at most (max_position_embeddings); lower it")


def _check_vocabulary(checkpoint: Checkpoint, *all_windows: Int32[np.ndarray, "window length"]) -> None:
    size = checkpoint.config.get_text_config().vocab_size
    highest = max(int(windows.max()) for windows in all_windows)
    if highest >= size:
        raise PalimpsestError(
            f"{checkpoint.folder}: its tokenizer gives token {highest}, but the model has {size} embeddings; "
            "the tokenizer belongs to another model"
        )

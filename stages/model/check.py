"""Whether a checkpoint can be used: read by plain transformers, nothing missing, tokenizer in order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from pipeline.errors import PalimpsestError
from stages.decoder.checkpoint import Checkpoint, count_elements
from stages.model.gguf import quiet_unless_watched


def check_checkpoint(checkpoint: Checkpoint) -> str:
    """Check a checkpoint without reading its weights, and say in a line what it is.

    Raises PalimpsestError naming the folder and what is wrong: quantised weights, missing tensors, an unreadable tokenizer.
    """
    config, folder = checkpoint.config, checkpoint.folder
    if getattr(config, "quantization_config", None):
        raise PalimpsestError(
            f"{folder}: the weights are quantised, and pruning needs plain ones; use the checkpoint it was made from"
        )
    check_tensors(folder, checkpoint.trust_remote_code)
    tokenizer = load_tokenizer(folder, checkpoint.trust_remote_code)
    tied = ", tied embeddings" if config.tie_word_embeddings else ""
    size = f"{count_elements(checkpoint.specs) / 1e6:.1f}M parameters in {len(checkpoint.specs)} tensors{tied}"
    return f"{config.model_type}, {size}, vocabulary {len(tokenizer)}"


def check_tensors(folder: Path, trust_remote_code: bool) -> None:
    """Raise PalimpsestError if config.json calls for a tensor that the checkpoint lacks or has in another shape.

    The model is built on the meta device: only the headers are read.
    """
    try:
        with quiet_unless_watched():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                device_map="meta",
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                trust_remote_code=trust_remote_code,
            )
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        reason = str(error).strip().split("\n")[0][:300]
        raise PalimpsestError(f"{folder}: transformers cannot load this as a causal language model ({reason})") from None
    found = loaded[1]
    missing = sorted(found["missing_keys"])
    if missing:
        raise PalimpsestError(
            f"{folder}: {len(missing)} tensors that config.json calls for are missing ({', '.join(missing[:5])})"
        )
    if found["mismatched_keys"]:
        name, on_disk, wanted = min(found["mismatched_keys"])
        raise PalimpsestError(f"{folder}: {name} has shape {tuple(on_disk)} but config.json calls for {tuple(wanted)}")


def load_tokenizer(folder: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint folder. Raises PalimpsestError if transformers cannot read it."""
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # tokenizers raise plain Exception for a broken file
        reason = str(error).strip().split("\n")[0][:200]
        raise PalimpsestError(f"{folder}: transformers cannot read the tokenizer ({reason}); copy its files again") from None


def check_digits(tokenizer: PreTrainedTokenizerBase, text: str = "2048") -> None:
    """Raise PalimpsestError unless digits come out one by one, as the demo's tokenizer was trained to do."""
    pieces = tokenizer.tokenize(text)
    if [piece for piece in pieces if piece.strip("Ġ▁ ")] != list(text):
        raise PalimpsestError(
            f"the demo's tokenizer cuts '{text}' into {pieces} instead of digits; use the pinned transformers version"
        )

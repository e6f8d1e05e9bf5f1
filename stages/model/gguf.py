"""A GGUF file made an ordinary safetensors checkpoint: weights dequantised, tokenizer and settings beside them."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from pipeline.console import plan, say
from pipeline.errors import PalimpsestError

PEAK = 3  # times the dense weights: transformers holds them twice while it loads, and unpacks some


def convert_gguf(file: Path, folder: Path, dtype: torch.dtype) -> None:
    """Write the model and tokenizer of a GGUF file into `folder` as safetensors in `dtype`.

    Raises PalimpsestError if the file is missing, is no GGUF file, or is of a kind that transformers cannot read.
    """
    if not file.is_file():
        raise PalimpsestError(f"{file}: no such file; check model.path in params.yaml")
    with _parsed_once(), quiet_unless_watched():
        try:
            weights = sum(int(tensor.n_elements) for tensor in gguf.GGUFReader(str(file)).tensors) * dtype.itemsize
            plan(PEAK * weights, weights, folder, "the size of model.dtype", "the size of model.dtype")
            say(f"dequantising {file.name} to {str(dtype).removeprefix('torch.')}")
            model, found = _load(file, dtype)
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        except (ValueError, IndexError, KeyError, OSError) as error:
            reason = str(error).strip().split("\n")[0][:200]
            raise PalimpsestError(f"{file}: not a GGUF file that transformers can read ({reason}); check model.path") from None
        if found["missing_keys"]:
            some = ", ".join(sorted(found["missing_keys"])[:5])
            raise PalimpsestError(f"{file}: lacks {len(found['missing_keys'])} tensors that the model needs ({some})")
        drop_quantiser(model)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def drop_quantiser(model: PreTrainedModel) -> None:
    """Take off what marks a dequantised model as quantised: with it, saving is refused and reloading goes wrong."""
    for holder, name in [(model.config, "quantization_config"), (model, "hf_quantizer"), (model, "quantization_method")]:
        if hasattr(holder, name):
            delattr(holder, name)
    setattr(model, "is_quantized", False)  # noqa: B010 (not an attribute of every transformers version)
    model.config.__dict__.pop("_model_name_or_path", None)  # what some trainer called it


@contextmanager
def quiet_unless_watched() -> Iterator[None]:
    """Let progress bars through only to a terminal; in a log each would be a thousand lines in one. Warnings still show."""
    if sys.stderr.isatty():
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
        yield


def _load(file: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, dict[str, Any]]:
    # Newer transformers keep some architectures packed in memory unless told otherwise; older ones never do.
    config = getattr(transformers, "GgufConfig", None)
    dense = {"quantization_config": config(dequantize=True)} if config else {}
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=dtype, output_loading_info=True, **dense
    )
    return loaded


@contextmanager
def _parsed_once() -> Iterator[None]:
    """Let transformers parse the file once: it does so anew for settings, tokenizer and weights, seconds each."""
    names = ("GGUFReader", "get_tensor_name_map")
    originals = {name: getattr(gguf, name) for name in names}
    for name in names:
        setattr(gguf, name, functools.cache(originals[name]))
    try:
        yield
    finally:
        for name in names:
            setattr(gguf, name, originals[name])

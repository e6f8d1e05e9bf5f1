"""A reference written as an ordinary checkpoint, which transformers loads without this project, one block in memory at a time."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import init_empty_weights
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from pipeline.artifacts import write_json, write_text
from pipeline.errors import PalimpsestError
from pipeline.tensors import TensorFile, TensorWriter, write_tensors
from stages.decoder.checkpoint import SINGLE
from stages.decoder.skeleton import Decoder, block_type, find_blocks
from stages.yes.block import Weights
from stages.yes.fitting import stored_dtype

COMPANIONS = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt",
    "merges.txt", "*.model", "*.tiktoken", "generation_config.json", "chat_template*",
)  # fmt: skip
NOTE = "reference.json"


def keep_nothing(folder: Path, why: str) -> None:
    """An output folder without a checkpoint in it, that says why."""
    shutil.rmtree(folder, ignore_errors=True)
    write_json(folder / NOTE, {"map": None, "note": why})


def keep_reference(
    folder: Path, decoder: Decoder, blocks: int, block: Callable[[int], Weights], head: Weights, note: dict[str, Any]
) -> None:
    """Write the net of `blocks` blocks with the model's embedding and the given head, and `reference.json` with `note`.

    Args:
        block: slot -> its weights, in the dtypes of the checkpoint.
        head: names in the model -> what stands for its tensors there; an output matrix that was tied becomes the net's own.

    Raises PalimpsestError if the architecture would build a net of so few blocks otherwise.
    """
    config = _config(decoder, blocks, untied=_output_name(decoder) in head)
    with init_empty_weights(include_buffers=False):
        small: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=decoder.checkpoint.trust_remote_code).eval()
    _, built = find_blocks(small)
    if [block_type(one) for one in built] != [block_type(one) for one in list(decoder.blocks)[:blocks]]:
        raise PalimpsestError(
            f"params.yaml: yes.keep: {type(small).__name__} with {blocks} blocks is built differently; allowed here: none"
        )
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        pieces = _write_pieces(partial / "pieces", decoder, small, blocks, block, head)
        specs = {name: (tuple(piece.shape(name)), piece.read(name).dtype) for piece in pieces for name in piece.names()}
        with TensorWriter(partial / SINGLE, specs, raw_metadata={"format": "pt"}) as writer:
            for piece in pieces:
                for name in piece.names():
                    writer.write(name, piece.read(name))
        shutil.rmtree(partial / "pieces")
        values = json.loads(config.to_json_string())
        write_text(partial / "config.json", json.dumps({**values, "architectures": [type(small).__name__]}, indent=2) + "\n")
        for pattern in (*COMPANIONS, *(["*.py"] if decoder.checkpoint.trust_remote_code else [])):
            for file in sorted(decoder.checkpoint.folder.glob(pattern)):
                shutil.copyfile(file, partial / file.name)
        write_json(partial / NOTE, note)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _config(decoder: Decoder, blocks: int, untied: bool) -> Any:
    """The model's configuration for its first `blocks` blocks: lists with an entry per block are cut."""
    config = copy.deepcopy(decoder.checkpoint.config)
    text = config.get_text_config()
    for name, value in vars(text).copy().items():
        per_block = isinstance(value, list) and len(value) == len(decoder) and not name.startswith("_")
        if per_block and not name.endswith(("_id", "_ids")):
            setattr(text, name, value[:blocks])
    text.num_hidden_layers = blocks
    if untied:
        text.tie_word_embeddings = config.tie_word_embeddings = False
    config.dtype = decoder.checkpoint.stored_dtype()
    return config


def _write_pieces(
    folder: Path, decoder: Decoder, small: Any, blocks: int, block: Callable[[int], Weights], head: Weights
) -> list[TensorFile]:
    """Files under the names `transformers` gives on disk: what surrounds the blocks, then a file for each of them."""
    tied = set(getattr(small, "all_tied_weights_keys", None) or {})
    pieces = []

    def add(part: dict[str, Tensor]) -> None:
        path = folder / f"{len(pieces)}.safetensors"
        write_tensors(path, {name: value.contiguous() for name, value in revert_weight_conversion(small, part).items()})
        pieces.append(TensorFile(path))

    with decoder.trunk(head=True):
        state = decoder.model.state_dict()
        around = [name for name in state if not name.startswith(decoder.path + ".") and name not in tied]
        add({name: (head[name] if name in head else state[name].to(stored_dtype(decoder, name))).cpu() for name in around})
    for slot in range(blocks):
        add({f"{decoder.path}.{slot}.{name}": value.cpu() for name, value in block(slot).items()})
    return pieces


def _output_name(decoder: Decoder) -> str:
    output = decoder.model.get_output_embeddings()
    return next((f"{path}.weight" for path, module in decoder.model.named_modules() if module is output), "")

"""The configuration of a model with fewer blocks."""

from __future__ import annotations

import copy
import json
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM

from pipeline.errors import PalimpsestError
from stages.compress.modeling import MODELING_FILE, is_native
from stages.decoder.skeleton import Decoder, block_type, find_blocks


def shorten_config(config: Any, kept: list[int], blocks: int) -> Any:
    """A copy of `config` for the blocks `kept` of `blocks`.

    Every list with one entry per block is cut to the kept ones (layer types and the like); lists that rise and name
    blocks by index are renumbered.
    """
    short = copy.deepcopy(config)
    text = short.get_text_config()
    position = {old: new for new, old in enumerate(kept)}
    for name, value in vars(text).copy().items():
        if not isinstance(value, list) or name.startswith("_"):
            continue
        indices = name.endswith("_layers") and value == [one for one in range(blocks) if one in value]
        if indices:
            setattr(text, name, [position[one] for one in value if one in position])
        elif len(value) == blocks and not name.endswith(("_id", "_ids")):  # token ids, such as several that end a text
            setattr(text, name, [value[index] for index in kept])
    text.num_hidden_layers = len(kept)
    return short


def skeleton_of(config: Any, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    """The model that `config` describes, without weights."""
    with init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code).eval()


def check_shortened(small: Any, decoder: Decoder, kept: list[int]) -> None:
    """Refuse an export whose blocks would not be built as the kept ones are.

    Raises PalimpsestError naming the first block that differs: the architecture decides by position what a block is.
    """
    _, blocks = find_blocks(small)
    if len(blocks) != len(kept):
        raise PalimpsestError(
            f"{decoder.checkpoint.folder}: a config with {len(kept)} blocks builds {len(blocks)}; cannot export"
        )
    for new, old in enumerate(kept):
        if block_type(blocks[new]) != block_type(decoder.blocks[old]):
            raise PalimpsestError(
                f"block {old} would become block {new}, which this architecture builds differently "
                f"({block_type(decoder.blocks[old])} against {block_type(blocks[new])}); choose other blocks in removal"
            )


def exported_config(config: Any, small: Any, ghosts: list[dict[str, Any]]) -> str:
    """The text of config.json; with ghosts it points to the modelling file, under a model type of its own.

    The own type makes a loader without `trust_remote_code` stop with an error, rather than drop the operators in silence.
    """
    values = json.loads(config.to_json_string())
    values["architectures"] = [type(small).__name__]
    if is_native(small):  # code that lay beside the checkpoint was not run here, and nothing is to run it later
        values.pop("auto_map", None)
    values["dtype"] = str(small.dtype).removeprefix("torch.")
    if ghosts:
        module = MODELING_FILE.removesuffix(".py")
        values["architectures"] = ["GhostForCausalLM"]
        values["model_type"] = f"ghost_{values['model_type']}"
        classes = {"AutoConfig": "GhostConfig", "AutoModel": "GhostModel", "AutoModelForCausalLM": "GhostForCausalLM"}
        values["auto_map"] = {auto: f"{module}.{name}" for auto, name in classes.items()}
        values["ghosts"] = ghosts
    return json.dumps(values, indent=2, sort_keys=True) + "\n"

"""The short modelling file that an export with ghosts carries: it needs `transformers` and nothing of this project."""

from __future__ import annotations

from typing import Any

from pipeline.errors import PalimpsestError

MODELING_FILE = "modeling_ghost.py"

_SOURCE = '''"""{model} with linear operators where blocks were removed. Written by Palimpsest; needs only transformers.

Each operator M is added to the residual stream h as h + h M, behind the block it stands with (or before the first one).
"""

from torch import nn
from transformers import {config}, {model}


class GhostConfig({config}):
    model_type = "ghost_{model_type}"


def add_after(block, args, output):
    """Forward hook: apply the operator to what the block returns."""
    hidden = output[0] if isinstance(output, tuple) else output
    hidden = hidden + block.ghost_after(hidden)
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


def add_before(block, args, kwargs):
    """Forward pre-hook: apply the operator to what the block is given."""
    if args:
        return (args[0] + block.ghost_before(args[0]), *args[1:]), kwargs
    hidden = kwargs["hidden_states"]
    return args, {{**kwargs, "hidden_states": hidden + block.ghost_before(hidden)}}


class GhostForCausalLM({model}):
    config_class = GhostConfig

    def __init__(self, config):
        super().__init__(config)
        width = config.get_text_config().hidden_size
        for ghost in config.ghosts:
            block = self.get_submodule("{path}")[ghost["block"]]
            setattr(block, "ghost_" + ghost["where"], nn.Linear(width, width, bias=False))
            if ghost["where"] == "after":
                block.register_forward_hook(add_after)
            else:
                block.register_forward_pre_hook(add_before, with_kwargs=True)
'''


def ghost_places(runs: list[tuple[int, int]], kept: list[int]) -> list[tuple[int, str]]:
    """For each removed run [start, stop) where its operator acts: (index of a kept block, "after" or "before").

    Behind the last block kept before the run; before the first kept block where the run opens the model.
    """
    position = {old: new for new, old in enumerate(kept)}
    return [(position[start - 1], "after") if start - 1 in position else (0, "before") for start, _ in runs]


def is_native(model: Any) -> bool:
    """Whether the model's class is one of `transformers`, not one that comes with the checkpoint."""
    return type(model).__module__.startswith("transformers.")


def modeling_source(model: Any, path: str) -> str:
    """The file's text for a model class of `transformers` whose blocks lie at `path`.

    Raises PalimpsestError for a class that comes with code of its own: the file could not import it.
    """
    if not is_native(model):
        raise PalimpsestError(
            f"{type(model).__name__}: ghosts cannot be exported for a model with code of its own; set ghost.method: none"
        )
    return _SOURCE.format(
        model=type(model).__name__, config=type(model.config).__name__, model_type=model.config.model_type, path=path
    )

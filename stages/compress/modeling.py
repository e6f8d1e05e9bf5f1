"""The short modelling file that an export with operators carries: it needs `transformers` and nothing of this project."""

from __future__ import annotations

from pathlib import Path
from string import Template
from typing import Any

from pipeline.errors import PalimpsestError
from stages.decoder.operators import Operator

MODELING_FILE = "modeling_ghost.py"
TEMPLATE = Path(__file__).parent / "modeling_ghost.py.template"


def ghost_places(runs: list[tuple[int, int]], kept: list[int]) -> list[tuple[int, str]]:
    """For each removed run [start, stop), or part of one, where its operator acts: (index of a kept block, "after" or "before").

    Behind the last block kept before it; before the first kept block where nothing is kept before it. Operators of one
    place act in the order given.
    """
    places = []
    for start, _ in runs:
        before = sum(one < start for one in kept)
        places.append((before - 1, "after") if before else (0, "before"))
    return places


def ghost_spec(operator: Operator, place: tuple[int, str], accumulate: str) -> dict[str, Any]:
    """What config.json says of one operator."""
    form = "dense" if operator.dense is not None else "scale" if operator.scale is not None else "none"
    rank = 0 if operator.down is None else operator.down.shape[1]
    sinks = operator.sinks
    return {
        "block": place[0],
        "where": place[1],
        "form": "low_rank" if rank else form,
        "rank": rank,
        "bias": operator.bias is not None,
        "accumulate": accumulate,
        "sinks": None if sinks is None else {"action": sinks.action, "first": sinks.first, "ids": list(sinks.ids)},
    }


def ghost_state(operator: Operator) -> dict[str, Any]:
    """The operator's tensors under the names the modelling file gives them. nn.Linear holds the transpose of row vectors' M."""
    state = {}
    if operator.dense is not None:
        state["linear.weight"] = operator.dense.T
    if operator.down is not None and operator.up is not None:
        state |= {"down.weight": operator.down.T, "up.weight": operator.up.T}
    if operator.scale is not None:
        state["scale"] = operator.scale
    if operator.bias is not None:
        state["up.bias" if operator.down is not None else "linear.bias"] = operator.bias
    if operator.targets is not None:
        state["targets"] = operator.targets
    return state


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
    base = model.base_model  # the model itself where it has no bare one inside
    names = {"config": type(model.config).__name__, "model": type(model).__name__, "base": type(base).__name__}
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        names,
        names=", ".join(sorted(set(names.values()))),
        model_type=model.config.model_type,
        path=path,
        base_path=path if base is model else path.removeprefix(f"{model.base_model_prefix}."),
    )

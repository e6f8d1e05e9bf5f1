"""params.yaml, read and checked against the models the stages declare.

Each stage package has a `Params` model whose fields are sections of params.yaml; each section is a frozen `Section`.
The whole file is checked before any stage does any work, so that a misspelt key of the last stage is found at once.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from pipeline.errors import PalimpsestError

PARAMS_FILE = Path("params.yaml")


class ParamsError(PalimpsestError):
    """params.yaml holds a key, type or value that is not allowed."""


class Section(BaseModel):
    """One section of params.yaml: frozen, no unknown keys, no silent conversion of types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def read_params(path: Path = PARAMS_FILE) -> dict[str, Any]:
    """Read params.yaml as plain dicts. Raises ParamsError if it is missing or is not a YAML mapping."""
    try:
        raw = YAML(typ="safe", pure=True).load(path)
    except FileNotFoundError:
        raise ParamsError(f"{path}: not found; run this from the project's folder") from None
    except YAMLError as error:
        raise ParamsError(at_line(path, error)) from None
    if not isinstance(raw, dict):
        raise ParamsError(f"{path}: expected a mapping of sections, found {type(raw).__name__}")
    strange = [key for key in raw if not isinstance(key, str)]
    if strange:
        raise ParamsError(f"{path}: {strange[0]!r} is no name of a section")
    return raw


def at_line(path: Path, error: YAMLError) -> str:
    """`params.yaml, line 7: 'model' stands twice`"""
    mark = getattr(error, "problem_mark", None)
    where = f"{path}, line {mark.line + 1}" if mark else f"{path}"
    problem = str(error.problem) if isinstance(error, MarkedYAMLError) else str(error)
    key = re.match(r'found duplicate key "(.*?)" with value', problem) if isinstance(error, DuplicateKeyError) else None
    return f"{where}: '{key[1]}' stands twice" if key else f"{where}: not valid YAML ({' '.join(problem.split())})"


def stage_names() -> list[str]:
    """All stage packages: the folders of `stages/` whose package declares `Params`."""
    import stages

    names = [module.name for module in pkgutil.iter_modules(stages.__path__) if module.ispkg]
    return [name for name in sorted(names) if hasattr(importlib.import_module(f"stages.{name}"), "Params")]


def params_model(stage: str) -> type[BaseModel]:
    """The `Params` model that stage package `stage` declares."""
    return importlib.import_module(f"stages.{stage}").Params


def section_models(stages: list[str] | None = None) -> dict[str, type[Section]]:
    """Section name -> its model, over `stages` (default: all)."""
    models: dict[str, type[Section]] = {}
    for stage in stages if stages is not None else stage_names():
        for name, field in params_model(stage).model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
                models[name] = field.annotation
    return models


def check_sections(raw: dict[str, Any], models: dict[str, type[Section]], source: str = "params.yaml") -> dict[str, Section]:
    """Check every section of `raw` against `models`. Raises ParamsError that lists all that is wrong."""
    problems = [f"{name}: unknown section; {_hint(name, list(models))}" for name in raw if name not in models]
    checked: dict[str, Section] = {}
    for name, model in models.items():
        try:
            checked[name] = model.model_validate({} if raw.get(name) is None else raw[name])
        except ValidationError as error:
            problems += [_explain(name, model, one) for one in error.errors()]
    if problems:
        raise ParamsError("\n".join(f"{source}: {problem}" for problem in problems))
    return checked


def stage_params(stage: str, raw: dict[str, Any], declared: list[str]) -> BaseModel:
    """The `Params` of one stage, built from the sections that dvc.yaml declares for it and nothing else.

    A field that is a `Section` gets it checked; a field that is a plain dict (the report's) gets the section's values
    with defaults filled in.

    Raises ParamsError if the stage's model wants a section that dvc.yaml does not declare, or the other way round.
    """
    model = params_model(stage)
    wanted, given = set(model.model_fields), set(declared)
    if wanted != given:
        raise ParamsError(
            f"dvc.yaml: stage '{stage}' declares params {sorted(given)} but its code reads {sorted(wanted)}; make the two equal"
        )
    models = section_models()
    checked = check_sections({name: raw.get(name) for name in declared}, {name: models[name] for name in declared})
    own = section_models([stage])
    return model(**{name: value if name in own else value.model_dump() for name, value in checked.items()})


def _hint(name: str, allowed: list[str]) -> str:
    close = difflib.get_close_matches(name, allowed, n=1)
    return f"{f'did you mean {close[0]}? ' if close else ''}allowed: {', '.join(sorted(allowed))}"


def _explain(section: str, model: type[BaseModel], error: Any) -> str:
    """`masking.sparsity = 1.0: should be less than 1` from one pydantic error."""
    location = [str(part) for part in error["loc"]]
    key = ".".join([section, *location])
    if error["type"] == "extra_forbidden":
        for part in location[:-1]:
            inner = model.model_fields[part].annotation if part in model.model_fields else None
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                model = inner
        return f"{key}: unknown key; {_hint(location[-1], list(model.model_fields))}"
    message = error["msg"].removeprefix("Value error, ").replace("Input should", "should")
    if error["type"] == "missing":
        return f"{key}: missing"
    shown = "" if error["type"] == "value_error" and not location else f" = {error['input']!r}"
    return f"{key}{shown}: {message}"

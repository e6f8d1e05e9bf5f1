"""params.yaml as a whole: each section by itself, then what a stage asks of several together."""

from __future__ import annotations

import importlib
from typing import Any

from pipeline.params import ParamsError, Section, check_sections, section_models, stage_names


def check_params(raw: dict[str, Any], source: str = "params.yaml") -> dict[str, Section]:
    """Check all of params.yaml before any stage does any work.

    A stage package may have a function `check_with_others(sections)` that takes all sections by name and raises ValueError,
    naming the keys, where its own section asks for what another leaves out. Raises ParamsError that lists all that is wrong.
    """
    sections = check_sections(raw, section_models(), source)
    problems = []
    for stage in stage_names():
        check = getattr(importlib.import_module(f"stages.{stage}"), "check_with_others", None)
        try:
            if check is not None:
                check(sections)
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ParamsError("\n".join(f"{source}: {problem}" for problem in problems))
    return sections

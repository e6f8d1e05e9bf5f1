"""params.yaml as a whole: each section by itself, then what a stage asks of several together."""

from __future__ import annotations

import importlib
from typing import Any, get_args

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


def unread_keys(section: Section) -> dict[str, tuple[str, tuple[str, ...]]]:
    """The keys of a section that nothing reads as it stands, each with the key that decides and the values with which it is read.

    The section's model may say so in `READ_WHEN`: key -> (the key that decides, its values with which the first is read); and in
    `OFF_WHEN`: (the key that decides, its value with which no other key is read). Keys grouped under the name of a method are
    read by that method alone, without being told.
    """
    fields = type(section).model_fields
    rules: dict[str, tuple[str, tuple[str, ...]]] = dict(getattr(section, "READ_WHEN", {}))
    methods = get_args(fields["method"].annotation) if "method" in fields else ()
    rules |= {method: ("method", (method,)) for method in methods if method in fields}
    unread = {key: (by, values) for key, (by, values) in rules.items() if getattr(section, by) not in values}
    decides, off = getattr(section, "OFF_WHEN", ("", None))
    if decides and getattr(section, decides) == off:
        unread = {key: (decides, ()) for key in fields if key != decides} | unread
    return unread


def unread_notes(name: str, section: Section) -> list[str]:
    """A line for each key of section `name` that is not at its default though nothing reads it."""
    fields = type(section).model_fields
    return [
        f"note: {name}.{key} is not at its default, and nothing reads it while {name}.{by} is {getattr(section, by) or 'empty'}"
        + (f" (read with {', '.join(values)})" if values else "")
        for key, (by, values) in unread_keys(section).items()
        if getattr(section, key) != fields[key].get_default()
    ]

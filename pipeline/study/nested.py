"""Inner values of a JSON file, by dotted path (`tasks.arc_easy.accuracy`), and what they were measured under."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.errors import PalimpsestError

LISTED = 20  # keys that an error names at most


def look_up(found: Mapping[str, Any], path: str) -> Any:
    """The value at `path`; a key that has dots in it is found too.

    Raises PalimpsestError saying how far the path goes and what is there.
    """
    *_, (where, last) = _along(found, path)
    if where == path:
        return last
    if not isinstance(last, Mapping):
        raise PalimpsestError(f"no '{path}': {where} is {last!r}, which has nothing below it")
    left = path.removeprefix(where).lstrip(".")
    close = difflib.get_close_matches(left.split(".")[0], list(last), n=1)
    keys = [*last][:LISTED] + ["…"] * (len(last) > LISTED)
    hint = f"did you mean {close[0]}? " if close else ""
    raise PalimpsestError(f"no '{path}'; {hint}{where or 'it'} has {', '.join(keys) or 'nothing'}")


def contract_of(found: Mapping[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """What the values at `paths` were measured under: every `contract` that stands beside or above one of them.

    Of several that differ, each differing key says whose it is.
    """
    stated = {
        where: node["contract"]
        for path in paths
        for where, node in _along(found, path)
        if isinstance(node, Mapping) and isinstance(node.get("contract"), Mapping)
    }
    shared, *others = stated.values() or ({},)
    alike = {key for key, value in shared.items() if all(key in one and one[key] == value for one in others)}
    own = {
        f"{key} of {where or 'the whole'}": value
        for where, one in stated.items()
        for key, value in one.items()
        if key not in alike
    }
    return {key: shared[key] for key in shared if key in alike} | (own if others else {})


def _along(found: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    """(path so far, what is there) from the whole, path "", as far as `path` goes."""
    node, where, parts = found, "", path.split(".")
    yield where, node
    while parts and isinstance(node, Mapping):
        key = next((key for end in range(len(parts), 0, -1) if (key := ".".join(parts[:end])) in node), None)
        if key is None:
            return
        node, where, parts = node[key], f"{where}.{key}".lstrip("."), parts[key.count(".") + 1 :]
        yield where, node

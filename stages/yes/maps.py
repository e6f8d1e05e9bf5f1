"""Target maps: the boundary that each block of a reference is fitted to; and the trie of what maps have in common.

A map is a tuple of boundaries that never falls and ends at the model's last one. "Permutation" is the paper's word
(arXiv 2605.02853), though targets repeat: all examples seen are the staircases of its predecessor (arXiv 2410.10984).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.errors import PalimpsestError

Map = tuple[int, ...]
MOST_STAIRCASES = 8  # blocks; each one more doubles the maps


@dataclass
class Node:
    """A block of some references: `prefix` holds its target behind those of the blocks before it."""

    prefix: Map
    names: list[str] = field(default_factory=list)  # maps that end here
    children: list[Node] = field(default_factory=list)


def staircases(blocks: int) -> dict[str, Map]:
    """All 2^(blocks - 1) staircases: a set of stops, each block fitted to the next stop at or behind it, the end being one.

    Raises PalimpsestError naming the key if there are more than 8 blocks.
    """
    if blocks > MOST_STAIRCASES:
        raise PalimpsestError(
            f"params.yaml: yes.maps = 'staircases': {2 ** (blocks - 1)} maps of {blocks} blocks; it goes up to {MOST_STAIRCASES} "
            "blocks; allowed here: families, or a list of names"
        )
    maps = {}
    for chosen in itertools.product((False, True), repeat=blocks - 1):
        stops = [place for place, is_stop in enumerate(chosen, 1) if is_stop] + [blocks]
        targets = tuple(next(stop for stop in stops if stop >= place) for place in range(1, blocks + 1))
        maps[spell(targets)] = targets
    return maps


def families(blocks: int) -> dict[str, Map]:
    """The named families, for models of any depth: each once, those that the depth rules out left out."""
    names = ["direct", "all_last", "first_last", *(f"prefix_{m}" for m in sorted({2, 3, blocks // 4, blocks // 2}) if m)]
    names += [f"stages_{parts}" for parts in (2, 3, 4)] + [f"skip_{depth}" for depth in (2, 4)]
    return distinct({name: named(name, blocks) for name in names if _parameter(name) <= blocks})


def chosen_maps(wanted: str | Sequence[str], blocks: int) -> dict[str, Map]:
    """Name -> map, for `yes.maps` and a model of that many blocks. Raises PalimpsestError naming the key and the map."""
    if isinstance(wanted, str):
        return {"none": lambda _: {}, "staircases": staircases, "families": families}[wanted](blocks)
    return distinct({name: named(name, blocks) for name in wanted})


def named(name: str, blocks: int) -> Map:
    """The map of that name in a model of that many blocks.

    direct: each block to its own boundary. all_last: all to the last. first_last: the first to its own, the others to the
    last. prefix_M: the first M to their own. stages_G: G equal stages, each block to the end of its stage. skip_K: a net of
    K blocks only, to boundaries equally far apart. without_B: direct, but block B (from 0) to the next one's boundary.
    Raises PalimpsestError naming the key if the model has no such map.
    """
    own, last, number = range(1, blocks + 1), blocks, _parameter(name)
    if name[0].isdigit():
        targets = tuple(map(int, name.split("-")))
        rising = all(here <= there for here, there in itertools.pairwise(targets))
        if targets[-1] != last or len(targets) > blocks or not rising:
            raise _refused(name, blocks, f"targets that never fall, at most {blocks} of them, the last one being {last}")
        return targets
    kind = name.removesuffix(f"_{number}")
    if kind in ("prefix", "stages", "skip") and number > blocks:
        raise _refused(name, blocks, f"{kind}_1 to {kind}_{blocks}")
    if kind == "without" and number > blocks - 2:
        raise _refused(name, blocks, f"without_0 to without_{blocks - 2}" if blocks > 1 else "none of this form")
    if kind in ("stages", "skip"):
        ends = [round(blocks * part / number) for part in range(1, number + 1)]
        return tuple(ends) if kind == "skip" else tuple(next(end for end in ends if end >= place) for place in own)
    if kind == "without":
        return tuple(place + 1 if place == number + 1 else place for place in own)
    straight = {"direct": blocks, "all_last": 0, "first_last": 1, "prefix": number}[kind]
    return tuple(place if place <= straight else last for place in own)


def distinct(maps: Mapping[str, Map]) -> dict[str, Map]:
    """Without maps that another name stands for already."""
    kept: dict[Map, str] = {}
    for name, targets in maps.items():
        kept.setdefault(targets, name)
    return {name: targets for targets, name in kept.items()}


def build_trie(maps: Mapping[str, Map]) -> Node:
    """The root, which stands for no block: below it each node is one fit, shared by all maps that begin alike."""
    root = Node(())
    for name, targets in maps.items():
        node = root
        for depth in range(1, len(targets) + 1):
            prefix = targets[:depth]
            child = next((one for one in node.children if one.prefix == prefix), None)
            if child is None:
                child = Node(prefix)
                node.children.append(child)
            node = child
        node.names.append(name)
    return root


def count_fits(node: Node) -> int:
    """Number of fits below `node`."""
    return sum(1 + count_fits(child) for child in node.children)


def spell(targets: Map) -> str:
    """(1, 4, 4, 4) -> `1-4-4-4`."""
    return "-".join(map(str, targets))


def _parameter(name: str) -> int:
    last = name.rpartition("_")[2]
    return int(last) if last.isdigit() and not name[0].isdigit() else 0


def _refused(name: str, blocks: int, allowed: str) -> PalimpsestError:
    return PalimpsestError(f"params.yaml: yes.maps: no map {name!r} in a model of {blocks} blocks; allowed: {allowed}")

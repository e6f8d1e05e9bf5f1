"""The order of a study's cells: what all share first, and then each as soon as what it shares with an earlier one is there."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from pipeline.graph import Node, edges
from pipeline.reproduce import descendants
from pipeline.study.cells import Job, Outcome
from pipeline.study.checks import needed_stages
from pipeline.study.plan import Cell, Settings, Study

COMMON = -1  # stands before the first cell: the stages that all of them share


class Handle(Protocol):
    """A job under way: a future of threads, of Dask or of Prefect."""

    def add_done_callback(self, fn: Callable[[Any], None], /) -> None: ...


Start = Callable[[Job, Iterable[Handle]], Handle]  # a job, and the handles of those it had to wait for
Finish = Callable[[Handle, Job], Outcome]


def run_in_order(
    jobs: Mapping[int, Job], waits: Mapping[int, set[int]], start: Start, finish: Finish, note: Callable[[int, Outcome], None]
) -> None:
    """Start every job once those it waits for have ended, well or not, and `note` each outcome as it comes.

    Nobody waits for what is not among `jobs`. If the common stages fail no cell is run: each is noted with their error.
    """
    waiting = {index: waits.get(index, set()) & jobs.keys() for index in jobs}
    handles: dict[int, Handle] = {}
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    done: set[int] = set()
    while len(done) < len(jobs):
        for index in [one for one, needed in waiting.items() if needed <= done]:
            handles[index] = start(jobs[index], [handles[one] for one in sorted(waiting.pop(index))])
            handles[index].add_done_callback(lambda _, index=index: ended.put(index))
        index = ended.get()
        outcome = finish(handles[index], jobs[index])
        done.add(index)
        note(index, outcome)
        if index == COMMON and outcome.error:
            for one in waiting:
                note(one, Outcome(jobs[one].cell, None, outcome.error))
            return


def common_stages(study: Study, graph: Mapping[str, Node]) -> list[str]:
    """The stages that every cell needs and that all ask the same of, in the graph's order; none if there is but one cell."""
    needed, reads = _needed(study, graph)
    if len(study.cells) < 2:
        return []
    return [name for name in needed if len({_asked(cell, reads[name]) for cell in study.cells}) == 1]


def common_settings(study: Study, graph: Mapping[str, Node]) -> Settings:
    """What the cells set for the common stages."""
    _, reads = _needed(study, graph)
    sections = {section for stage in common_stages(study, graph) for section in reads[stage]}
    return {key: value for key, value in study.cells[0].settings.items() if key.split(".")[0] in sections}


def waits(study: Study, graph: Mapping[str, Node]) -> dict[int, set[int]]:
    """For each cell, the earlier ones that run something it needs in just the same way; COMMON for what all share."""
    needed, reads = _needed(study, graph)
    common = common_stages(study, graph)
    first: dict[tuple[str, str], int] = {}
    found: dict[int, set[int]] = {}
    for index, cell in enumerate(study.cells):
        apart = [name for name in needed if name not in common]
        mine = {first.setdefault((name, _asked(cell, reads[name])), index) for name in apart}
        found[index] = (mine - {index}) | ({COMMON} if common else set())
    return found


def _needed(study: Study, graph: Mapping[str, Node]) -> tuple[list[str], dict[str, set[str]]]:
    """The stages that a cell brings up to date, and of each the sections that it and all above it read."""
    back = {(end, start) for start, end in edges(graph)}
    needed = needed_stages(study.plan, graph)
    return needed, {name: {section for one in descendants([name], back) for section in graph[one].params} for name in needed}


def _asked(cell: Cell, sections: set[str]) -> str:
    return json.dumps({key: value for key, value in cell.settings.items() if key.split(".")[0] in sections}, sort_keys=True)

"""The DAG as a Prefect flow. DVC does the caching: each task hands its stage to DVC and ends with DVC's own answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from prefect import State, flow, task
from prefect.cache_policies import NO_CACHE
from prefect.futures import wait
from prefect.logging import get_run_logger
from prefect.states import Completed, Failed
from prefect.task_runners import ThreadPoolTaskRunner

from pipeline.errors import PalimpsestError
from pipeline.files import DATA
from pipeline.graph import read_graph
from pipeline.link import INSIDE_FLOW, talk
from pipeline.reproduce import Outcome, StageFailed, changed_stages, descendants, reproduce
from pipeline.ui import publish

Handle = TypeVar("Handle")
STATES: dict[Outcome, str] = {"unchanged": "Cached", "restored": "Restored", "ran": "Completed"}


def wire(stage: Callable[..., Handle]) -> None:
    """The whole DAG: `stage(name, *what it waits for)`, once per stage."""
    training = stage("training")
    model = stage("model", training)
    tokens = stage("tokens", model)
    tape = stage("capture", model, tokens)

    statistics = stage("statistics", model, tokens, tape)
    redundancy = stage("redundancy", model, tape)
    search = stage("search", model, tape)
    peeling = stage("peeling", tape)
    yes = stage("yes", model, tokens, tape)

    sensitivity = stage("sensitivity", model, tokens, tape, statistics)
    allocation = stage("allocation", statistics, sensitivity)
    masks = stage("masking", model, tokens, statistics, allocation)
    removal = stage("removal", redundancy, search)
    ghost = stage("ghost", model, tokens, tape, masks, removal)
    compressed = stage("compress", model, masks, removal, ghost)

    variants = [
        stage("evaluation@dense", model, tokens),
        stage("evaluation@masked", model, tokens, masks),
        stage("evaluation@removed", model, tokens, removal),
        stage("evaluation@compressed", model, tokens, compressed),
    ]
    tasks = [
        stage("zeroshot@dense", model),
        stage("zeroshot@masked", model, masks),
        stage("zeroshot@removed", model, removal),
        stage("zeroshot@compressed", model, compressed),
    ]
    stage("report", statistics, sensitivity, redundancy, allocation, masks, removal, ghost, peeling, yes, *variants, *tasks)


def flow_edges() -> set[tuple[str, str]]:
    """(from, to) for every line of `wire`."""
    edges: set[tuple[str, str]] = set()

    def note(name: str, *after: str) -> str:
        edges.update((one, name) for one in after)
        return name

    wire(note)
    return edges


def upstream(targets: Sequence[str]) -> list[str]:
    """`targets` (none: all stages) and what they depend on, in the order of `wire`.

    Raises PalimpsestError if a target is no stage.
    """
    names: list[str] = []
    wire(lambda name, *_: names.append(name))
    unknown = [name for name in targets if name not in names]
    if unknown:
        raise PalimpsestError(f"no stage '{unknown[0]}'; there are {', '.join(names)}")
    needed = descendants(targets or names, {(end, start) for start, end in flow_edges()})
    return [name for name in names if name in needed]


def run_flow(targets: Sequence[str] = (), force: bool = False, jobs: int = 2) -> dict[str, Outcome]:
    """Run the stages as a Prefect flow; if Prefect fails on the way, finish them without it.

    Args:
        targets: stages to bring up to date, with what they depend on; none means all.
        jobs: how many stages may work at the same time.

    Returns DVC's answer per stage. Raises PalimpsestError with the messages of the stages that failed.
    """
    names = upstream(targets)
    done: dict[str, Outcome] = {}
    failed: dict[str, StageFailed] = {}
    slots = threading.Semaphore(jobs)
    touched = set(names) if force else descendants(changed_stages(), flow_edges())
    outputs = {name: [Path(DATA) / path for path in node.writes] for name, node in read_graph().items()}

    @task(cache_policy=NO_CACHE, persist_result=False)
    def run_stage(name: str, force: bool, surely_unchanged: bool) -> State[Any]:
        tell = _teller(name)
        try:
            if not surely_unchanged:
                with slots:
                    done.update(reproduce([name], force=force, single=True, say=tell, environment={INSIDE_FLOW: "1"}))
            else:
                tell(f"Stage '{name}' didn't change, skipping")
            outcome = done.setdefault(name, "unchanged")
        except StageFailed as error:
            failed[name] = error
            return Failed(message=str(error))
        talk(lambda: publish(outputs[name]))
        return Completed(name=STATES[outcome], message=f"DVC: {outcome}")

    workers: Any = ThreadPoolTaskRunner(max_workers=len(names))  # waiting ones cost nothing; `slots` limits those that work

    @flow(name="palimpsest", persist_result=False, task_runner=workers)
    def palimpsest(targets: list[str], force: bool) -> State[Any]:
        futures: dict[str, Any] = {}

        def submit(name: str, *after: Any) -> Any:
            if name in names:
                submit_one: Any = run_stage.with_options(name=name, task_run_name=name).submit
                futures[name] = submit_one(name, force, name not in touched, wait_for=[future for future in after if future])
            return futures.get(name)

        wire(submit)
        wait(list(futures.values()))
        return Failed(message=_summary(failed)) if failed else Completed(message=_count(done))

    trouble = ""
    try:
        show: Any = palimpsest
        show(list(targets), force, return_state=True)
    except Exception as error:  # Prefect's, for the stages' own are in `failed`
        trouble = f"{type(error).__name__}: {error}".splitlines()[0]
    if failed:
        raise PalimpsestError(_summary(failed))
    left = [name for name in names if name not in done]
    if left:
        print(f"Warning: the run goes on without Prefect ({trouble or 'it gave up'}).", flush=True)
        done.update(reproduce(left, force=force, single=True))
    return done


def _teller(stage: str) -> Callable[[str], None]:
    """Says a line of `stage` here and in the log of its task."""
    logger = get_run_logger()

    def tell(line: str) -> None:
        print(f"{stage:<21} {line.strip()}\n", end="", flush=True)  # one write, so that lines of two stages do not mix
        talk(lambda: logger.info(line))

    return tell


def _summary(failed: dict[str, StageFailed]) -> str:
    return "\n".join(map(str, failed.values()))


def _count(done: dict[str, Outcome]) -> str:
    answers = list(done.values())
    return ", ".join(f"{answers.count(one)} {one}" for one in STATES if one in answers)

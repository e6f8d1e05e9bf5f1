"""The DAG as a Prefect flow. DVC does the caching: each task hands its stage to DVC and ends with DVC's own answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from prefect import Flow, State, flow, task
from prefect.cache_policies import NO_CACHE
from prefect.futures import wait
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed, Failed
from prefect.task_runners import ThreadPoolTaskRunner

from pipeline.errors import PalimpsestError
from pipeline.files import DATA
from pipeline.graph import read_graph
from pipeline.link import INSIDE_FLOW, talk
from pipeline.reproduce import Outcome, Say, StageFailed, changed_stages, descendants, reproduce, stop
from pipeline.trial import Trial
from pipeline.ui import publish

Handle = TypeVar("Handle")
WAITING: Any = ThreadPoolTaskRunner(max_workers=64)  # tasks that wait cost nothing; who works is limited elsewhere
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
    trouble = ""
    try:
        show: Any = make_flow(done, failed)
        show(targets=list(targets), force=force, jobs=jobs, return_state=True)
    except Exception as error:  # Prefect's, for the stages' own are in `failed`
        trouble = f"{type(error).__name__}: {error}".splitlines()[0]
    if failed:
        raise PalimpsestError(_summary(failed))
    left = [name for name in names if name not in done]
    if left:
        print(f"Warning: the run goes on without Prefect ({trouble or 'it gave up'}).", flush=True)
        done.update(reproduce(left, force=force, single=True))
    return done


def make_flow(done: dict[str, Outcome], failed: dict[str, StageFailed]) -> Flow[..., Any]:
    """The flow; what becomes of each stage is noted in `done` or `failed` as it goes."""

    @flow(name="palimpsest", persist_result=False, task_runner=WAITING)
    def palimpsest(
        targets: list[str] = [],  # noqa: B006, what the UI's form shows empty; nothing changes them
        overrides: dict[str, Any] = {},  # noqa: B006
        force: bool = False,
        jobs: int = 2,
    ) -> State[Any]:
        """Bring stages up to date; what is up to date already is not run.

        Args:
            targets: stages, each with all that it depends on; none means every stage.
            overrides: keys of params.yaml and their values for this run alone, as in {"allocation.method": "pals"}. It then is
                a DVC experiment of the flow run's name, in a folder of its own: params.yaml and data/ are left as they were.
            force: run the stages even if nothing changed.
            jobs: stages side by side; one at a time with overrides.
        """
        try:
            names = upstream(targets)
            trial = Trial(flow_run.get_name() or "", names, targets or names, overrides, force) if overrides else None
            work = trial.run if trial else _here(names, force, jobs)
        except PalimpsestError as error:
            failed[""] = StageFailed("", str(error))
            return Failed(message=str(error))

        @task(cache_policy=NO_CACHE, persist_result=False)
        def run_stage(name: str) -> State[Any]:
            try:
                outcome = work(name, _teller(name))
            except StageFailed as error:
                failed[name] = error
                return Failed(message=str(error))
            if outcome is None:
                return Cancelled(name="NotReached", message="another stage failed before")
            done[name] = outcome
            return Completed(name=STATES[outcome], message=f"DVC: {outcome}")

        futures: dict[str, Any] = {}

        def submit(name: str, *after: Any) -> Any:
            if name in names:
                submit_one: Any = run_stage.with_options(name=name, task_run_name=name).submit
                futures[name] = submit_one(name, wait_for=[future for future in after if future])
            return futures.get(name)

        try:
            wire(submit)
            wait(list(futures.values()))
            if trial:
                talk(lambda: trial.show([f"{DATA}{path}" for name in names for path in read_graph()[name].writes]))
        except BaseException as error:
            if not isinstance(error, Exception):  # cancelled: end DVC and the stages under it, which other threads wait for
                stop()
            raise
        if trial and trial.problem:
            failed.setdefault(trial.problem.stage, trial.problem)
        return Failed(message=_summary(failed)) if failed else Completed(message=_count(done))

    return palimpsest


palimpsest = make_flow({}, {})  # for deployments: each of their runs is a process of its own


def _here(names: list[str], force: bool, jobs: int) -> Callable[[str, Say], Outcome]:
    """Each stage through a DVC of its own, `jobs` at a time; what surely has not changed is not asked again."""
    slots = threading.Semaphore(jobs)
    touched = set(names) if force else descendants(changed_stages(), flow_edges())
    outputs = {name: [Path(DATA) / path for path in node.writes] for name, node in read_graph().items()}

    def work(name: str, tell: Say) -> Outcome:
        outcome: Outcome = "unchanged"
        if name in touched:
            with slots:
                answers = reproduce([name], force=force, single=True, say=tell, environment={INSIDE_FLOW: "1"})
            outcome = answers.get(name, "unchanged")
        else:
            tell(f"Stage '{name}' didn't change, skipping")
        talk(lambda: publish(outputs[name]))
        return outcome

    return work


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

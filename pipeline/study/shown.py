"""A study as a Prefect flow: each cell a task run of its name, with what it set and measured, and the comparison at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from prefect import State, flow, task
from prefect.artifacts import create_markdown_artifact, create_progress_artifact, create_table_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.context import FlowRunContext
from prefect.futures import PrefectFuture
from prefect.logging import get_run_logger
from prefect.states import Completed, Failed
from prefect.task_runners import ThreadPoolTaskRunner

from pipeline.drawing.chart import standalone
from pipeline.link import talk
from pipeline.study.cells import Job, Outcome, run_cell
from pipeline.study.mapping import has_dask, local_cluster, lost
from pipeline.study.order import Finish, Handle, Start
from pipeline.ui import picture


@task(cache_policy=NO_CACHE, persist_result=False)
def show_cell(job: Job) -> State[Any]:
    """Run one cell wherever this task is sent; its lines go to the log of the task, what it measured to an artifact."""
    logger = get_run_logger()
    outcome = run_cell(job, lambda line: talk(lambda: logger.info(line)))
    talk(lambda: create_markdown_artifact(_described(job, outcome), key=_key(job.name), description=f"cell {job.cell.name}"))
    if outcome.result is None:
        return Failed(message=outcome.error, data=outcome)
    return Completed(name="Completed" if outcome.ran else "Cached", message=_ran(outcome), data=outcome)


def run_shown(
    name: str,
    workers: int,
    address: str | None,
    work: Callable[[Start, Finish, Callable[[str, float], None]], None],
    conclude: Callable[[], tuple[list[list[list[str]]], list[str]]],
) -> None:
    """Do `work` inside a flow that the parameters are visible of, its jobs as tasks over Dask; then show its conclusion.

    Args:
        workers: Dask workers to start on this machine; threads do if there is to be one, or Dask is not installed.
        address: of a Dask scheduler that is running, in their place.
        work: what runs the study, given how to start and to finish a job, and where to report a line and the share done.
        conclude: a table for each contract (rows, their head first), and the charts.
    """
    options: dict[str, Any] = {"address": address} if address else local_cluster(workers)
    runner: Any = ThreadPoolTaskRunner(max_workers=workers)
    if has_dask() and (address or workers > 1):
        from prefect_dask.task_runners import DaskTaskRunner

        runner = DaskTaskRunner(**options)

    @flow(name="palimpsest-study", flow_run_name=f"study-{name}", persist_result=False, task_runner=runner)
    def palimpsest_study(study: str, workers: int, address: str | None) -> State[Any]:
        logger, shown = get_run_logger(), []
        talk(lambda: shown.append(create_progress_artifact(0.0, key=_key(f"study-{name}-progress"), description="cells done")))

        def report(line: str, share: float) -> None:
            talk(lambda: logger.info(line))
            talk(lambda: update_progress_artifact(shown[0], progress=100 * share))

        work(_start, _finish, report)
        tables, charts = conclude()
        for place, (head, *body) in enumerate(tables):
            rows = [dict(zip(head, row, strict=True)) for row in body]
            key = _key(f"study-{name}-{place + 1}" if place else f"study-{name}")
            talk(lambda rows=rows, key=key: create_table_artifact(rows, key=key, description=f"study {name}"))
        if charts:
            drawn = picture(f"{name}.svg", standalone(charts).encode())
            talk(lambda: create_markdown_artifact(drawn, key=_key(f"study-{name}-picture"), description=f"study {name}"))
        return Completed(message=f"{sum(len(one) - 1 for one in tables)} settings compared")

    show: Any = palimpsest_study
    show(name, workers, address)


def _start(job: Job, after: Iterable[Handle]) -> Handle:
    good = [one for one in after if isinstance(one, PrefectFuture) and one.state.is_completed()]
    client = getattr(FlowRunContext.get().task_runner, "_client", None)  # pyright: ignore[reportOptionalMemberAccess]
    if client is not None and client.status != "running":
        raise ConnectionError("the Dask scheduler was lost")
    submit: Any = show_cell.with_options(name=job.cell.name, task_run_name=job.cell.name).submit
    return submit(job, wait_for=good)


def _finish(handle: Any, job: Job) -> Outcome:
    try:
        found = handle.result(raise_on_failure=False)
    except Exception as error:
        return Outcome(job.cell, None, lost(error))
    if isinstance(found, Outcome):
        return found
    raise RuntimeError(f"{job.cell.name}: Prefect has no outcome of it ({found})")  # so the study goes on without it


def _described(job: Job, outcome: Outcome) -> str:
    """What a cell set and measured, in Markdown."""
    set_here = [f"| {key} | `{value}` |" for key, value in job.cell.settings.items()]
    found = outcome.result or {}
    measured = [f"| {measure} | {found[measure]:.4g} |" for measure in job.plan.measures if measure in found]
    lines = [f"**{job.cell.name}**, the DVC experiment `{job.name}`", "", "| set | |", "|---|---|", *set_here]
    if measured:
        lines += ["", "| measured | |", "|---|---|", *measured, *(f"| {key} | {value} |" for key, value in outcome.shown.items())]
    return "\n".join([*lines, "", outcome.error or _ran(outcome)])


def _ran(outcome: Outcome) -> str:
    return f"ran {', '.join(outcome.ran)}" if outcome.ran else "all from the cache"


def _key(text: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in text.lower()).strip("-")

"""Running a study: its jobs, where they run, and what becomes of their outcomes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pipeline.artifacts import write_text
from pipeline.errors import PalimpsestError
from pipeline.files import DATA
from pipeline.graph import Node, read_graph
from pipeline.link import find_server, is_loopback, open_link
from pipeline.reproduce import StageFailed, drop_experiments
from pipeline.study.cells import Job, Outcome, Say, from_anywhere
from pipeline.study.compare import by_contract, compare
from pipeline.study.elsewhere import Source, fetch_experiments, find_source
from pipeline.study.mapping import check_dask, finish, on_dask, on_threads, threads
from pipeline.study.order import COMMON, Finish, Start, common_settings, common_stages, run_in_order, waits
from pipeline.study.page import page, pictures
from pipeline.study.plan import Cell, Study
from pipeline.study.reading import read_study
from pipeline.study.results import rows, table, write_results

Report = Callable[[str, float], None]  # a line, and the share of cells that are done


def run_study(
    name: str,
    workers: int = 1,
    address: str | None = None,
    remote: str | None = None,
    root: Path = Path(),
    say: Say = print,
) -> str:
    """Run studies/NAME.yaml and return its table as text; write data/studies/NAME.csv, .json and .html.

    Args:
        workers: cells side by side on this machine.
        address: of a Dask scheduler whose workers run the cells instead. They get the code from git, and results from and to
            the DVC remote.
        remote: the name of that DVC remote; None means the default one.

    Raises PalimpsestError, before anything runs, if the study asks for what cannot be run; and, with the table in its
    message, if every cell failed.
    """
    _check_repository(root)
    study, graph = read_study(name, root), read_graph(root / "dvc.yaml")
    source = find_source(remote, root) if address else None
    say(f"{study.plan.question}\n{len(study.cells)} cells, {check_dask(address) if address else f'{workers} at a time'}")
    jobs = make_jobs(study, graph, source or root.resolve(), None if address else threads(workers))
    if source is None:
        drop_experiments([job.name for job in jobs.values()], root)
    outcomes: dict[int, Outcome] = {}

    def work(start: Start, finish: Finish, report: Report = lambda *_: None) -> None:
        def note(index: int, outcome: Outcome) -> None:
            outcomes[index] = outcome
            done = len(outcomes.keys() - {COMMON})
            line = f"{'' if index == COMMON else f'[{done}/{len(study.cells)}] '}{_said(study, outcome)}"
            say(line)
            report(line, done / len(study.cells))

        left = {index: job for index, job in jobs.items() if index not in outcomes}
        run_in_order(left, waits(study, graph), start, finish, note)

    def conclude() -> list[Outcome]:
        found = [outcomes[index] for index in range(len(study.cells))]
        _write(study, found, root)
        return found

    url = _server(address, root, say)
    if url:
        _run_shown(study, workers, address, url, work, conclude, say)
    if len(outcomes) < len(jobs):
        with on_dask(address) if address else on_threads(workers) as start:
            work(start, finish)
    if source is not None:
        _fetch([jobs[index].name for index in range(len(study.cells)) if outcomes[index].result is not None], root, say)
    found = conclude()
    text = table(study, found, compare(study, found))
    if all(outcome.result is None for outcome in found):
        raise PalimpsestError(f"{text}\nEvery cell failed ({len(found)} of {len(found)}): there is nothing to compare")
    return text


def make_jobs(study: Study, graph: dict[str, Node], place: Path | Source, threads: int | None) -> dict[int, Job]:
    """A job per cell by its index, and COMMON for the stages that all share, if there are any."""
    here = place if isinstance(place, Path) else None
    cells = [cell if here is None else replace(cell, settings=from_anywhere(cell.settings, here)) for cell in study.cells]
    jobs = {index: Job(f"{study.name}-{cell.name}", cell, study.plan, place, threads) for index, cell in enumerate(cells)}
    common = common_stages(study, graph)
    if common:
        shared = common_settings(study, graph)
        cell = Cell("common stages", shared if here is None else from_anywhere(shared, here), {}, None)
        plan = study.plan.model_copy(update={"stages": common, "result": "", "show": {}})
        jobs[COMMON] = Job(f"{study.name}-common-stages", cell, plan, place, threads)
    return jobs


def _server(address: str | None, root: Path, say: Say) -> str | None:
    """The Prefect server to show the study in, if there is one that all workers can reach."""
    url, sentence = find_server(root)
    if url and address and is_loopback(url) and not is_loopback(address):
        url, sentence = None, f"Workers elsewhere cannot reach the Prefect server at {url}, so this study is shown here alone."
    say(f"Shown in Prefect: {url.removesuffix('/api')}" if url else sentence)
    return url


def _run_shown(
    study: Study,
    workers: int,
    address: str | None,
    url: str,
    work: Callable[[Start, Finish, Report], None],
    conclude: Callable[[], list[Outcome]],
    say: Say,
) -> None:
    """Run the study as a Prefect flow. What Prefect fails at is left undone, with a warning."""
    open_link(url)
    from pipeline.study.shown import run_shown

    def compared() -> tuple[list[list[list[str]]], list[str]]:
        found = conclude()
        made = compare(study, found)
        return [rows(study, group) for group in by_contract(made)], pictures(study, found, made)

    try:
        run_shown(study.name, workers, address, work, compared)
    except PalimpsestError:
        raise
    except Exception as error:
        say(f"Warning: the study goes on without Prefect ({type(error).__name__}: {error}".splitlines()[0] + ").")


def _fetch(names: list[str], root: Path, say: Say) -> None:
    if names:
        try:
            fetch_experiments(names, root)
        except StageFailed as error:
            say(f"Warning: the experiments stay at the git remote: {error}")


def _write(study: Study, found: list[Outcome], root: Path) -> None:
    compared = compare(study, found)
    write_results(study, found, compared, root)
    write_text(root / DATA / "studies" / f"{study.name}.html", page(study, found, compared))


def _said(study: Study, outcome: Outcome) -> str:
    """`pals-seed3: perplexity 60.17 (ran masking)`"""
    if outcome.result is None:
        return f"{outcome.cell.name}: {outcome.error}"
    measure = study.plan.measures[0]
    found = f": {measure} {outcome.result[measure]:.4g}" if outcome.result else ""
    ran = f"ran {', '.join(outcome.ran)}" if outcome.ran else "all from the cache"
    return f"{outcome.cell.name}{found} ({ran})"


def _check_repository(root: Path) -> None:
    """Raise PalimpsestError if experiments cannot be made here: DVC keeps them in git."""
    if not (root / ".git").exists():
        raise PalimpsestError(
            "a study's cells are DVC experiments, which live in git; run: git init && git add . && git commit -m start"
        )

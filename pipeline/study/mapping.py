"""Where a study's cells run: threads of this process, a Dask cluster, or a Prefect flow that shows them, over either."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from pipeline.errors import PalimpsestError
from pipeline.study.cells import Job, Outcome, run_cell
from pipeline.study.order import Handle, Start

SECONDS_TO_ANSWER = 15


@contextmanager
def on_threads(workers: int) -> Iterator[Start]:
    """Cells of this machine: each is a process of DVC's, so threads do."""
    pool = ThreadPoolExecutor(workers)
    try:
        yield lambda job, _: pool.submit(run_cell, job)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def local_cluster(workers: int) -> dict[str, Any]:
    """How Prefect is to start Dask workers on this machine: a process each, one cell at a time, on loopback alone."""
    quiet = {"dashboard_address": None, "silence_logs": logging.CRITICAL}
    return {"cluster_kwargs": {"n_workers": workers, "threads_per_worker": 1, "host": "127.0.0.1", **quiet}}


@contextmanager
def on_dask(address: str) -> Iterator[Start]:
    """Cells on the workers of the scheduler at `address`, with no Prefect server to show them."""
    with _connected(address) as client:

        def start(job: Job, _: Iterable[Handle]) -> Handle:
            if client.status != "running":  # what is submitted now might wait for ever
                handle: Future[Outcome] = Future()
                handle.set_exception(CancelledError())
                return handle
            return client.submit(run_cell, job, key=f"{job.name}-{os.urandom(4).hex()}", pure=False)

        yield start


def finish(handle: Any, job: Job) -> Outcome:
    """The outcome of a cell that has ended in whatever way. Raises what interrupted it."""
    try:
        return handle.result()
    except PalimpsestError:
        raise  # interrupted
    except Exception as error:
        return Outcome(job.cell, None, lost(error))


def lost(error: Exception) -> str:
    """Why Dask has no outcome of a cell, in words."""
    name = type(error).__name__
    if name == "KilledWorker":
        return "every Dask worker that tried it died: is there enough memory for this many side by side?"
    if name in ("CancelledError", "FutureCancelledError", "CommClosedError"):
        return "the Dask scheduler was lost"
    return f"{name}: {error}".splitlines()[0]


def check_dask(address: str) -> str:
    """One sentence on the scheduler at `address`. Raises PalimpsestError if Dask is not installed or nothing answers there."""
    if importlib.util.find_spec("distributed") is None:
        raise PalimpsestError("--address needs Dask: pip install -c constraints.txt -e '.[cluster]'")
    with _connected(address) as client:
        workers = client.scheduler_info(n_workers=-1)["workers"]
    if not workers:
        return f"The scheduler has no workers yet; the study begins with the first: dask worker --nthreads 1 {address}"
    return f"{len(workers)} Dask workers: {', '.join(sorted({str(one['host']) for one in workers.values()}))}"


@contextmanager
def _connected(address: str) -> Iterator[Any]:
    from distributed import Client

    for name in ("distributed", "distributed.client"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # tracebacks that say no more than the outcomes do
    try:
        client = Client(address, timeout=SECONDS_TO_ANSWER, set_as_default=False)
    except (OSError, ValueError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise PalimpsestError(f"--address {address}: no Dask scheduler answers there ({why})") from None
    with client:
        yield client


def has_dask() -> bool:
    """Whether the extra `cluster` is installed."""
    return importlib.util.find_spec("prefect_dask") is not None


def threads(workers: int) -> int | None:
    """Threads that a stage may compute with when `workers` cells share this machine; None: as many as the libraries take."""
    cores = os.cpu_count() or 1
    return max(1, min(cores // workers, int(os.environ.get("OMP_NUM_THREADS") or cores))) if workers > 1 else None

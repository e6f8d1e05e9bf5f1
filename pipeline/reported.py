"""A stage that DVC runs by itself, shown as a Prefect run of its own when PREFECT_API_URL names a server."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from pipeline.link import INSIDE_FLOW, find_server, open_link, talk


def is_wanted() -> bool:
    """Whether the user named a server, and this stage is not a task of a flow already."""
    return bool(os.environ.get("PREFECT_API_URL")) and INSIDE_FLOW not in os.environ


def run_reported(name: str, outputs: Sequence[Path], work: Callable[[], None]) -> None:
    """Do `work` inside a Prefect run called `name`, which gets its lines and the tables among `outputs`.

    Raises what `work` raises, and nothing else: Prefect's own trouble costs a warning.
    """
    url, sentence = find_server()
    if url is None:
        print(sentence, flush=True)
        return work()
    open_link(url)
    from prefect import State, flow
    from prefect.logging import get_run_logger
    from prefect.states import Completed, Failed

    from pipeline.ui import publish

    begun, problem = False, None

    @flow(name="palimpsest-stage", flow_run_name=name, persist_result=False)
    def stage() -> State[Any]:
        nonlocal begun, problem
        begun = True
        try:
            with redirect_stdout(_Copied(sys.stdout, get_run_logger().info)):
                work()
        except BaseException as error:
            problem = error
            return Failed(message=str(error))
        talk(lambda: publish(list(outputs)))
        return Completed()

    show: Any = stage
    trouble = talk(lambda: show(return_state=True))
    if problem is not None:
        raise problem
    if not begun:
        print(f"Warning: this stage is not shown in Prefect ({trouble}).", flush=True)
        work()


class _Copied(io.TextIOBase):
    """Text for the terminal, whose whole lines also go to the log of the run."""

    def __init__(self, terminal: Any, log: Callable[[str], None]):
        self._terminal, self._log, self._rest = terminal, log, ""

    def write(self, text: str) -> int:
        self._terminal.write(text)
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            if line.strip():
                talk(lambda line=line: self._log(line))
        return len(text)

    def flush(self) -> None:
        self._terminal.flush()

"""Stages with some keys of params.yaml overridden: one DVC experiment in a folder of its own, shown stage by stage."""

from __future__ import annotations

import queue
import re
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.checking import check_params
from pipeline.params import read_params
from pipeline.reproduce import Outcome, StageFailed, answer_in, experiment
from pipeline.study.cells import from_anywhere
from pipeline.study.plan import merged
from pipeline.ui import LARGEST_BYTES, SHOWN, publish


class Trial:
    """One DVC runs all the stages; each of its lines goes to whoever waits for the stage that it belongs to."""

    def __init__(self, name: str, stages: Sequence[str], targets: Sequence[str], overrides: Mapping[str, Any], force: bool):
        """Check the overrides and start. Raises PalimpsestError for a key or value that is refused.

        Args:
            name: of the experiment.
            stages: all that DVC will answer for, `targets` and what they depend on.
        """
        check_params(merged(read_params(), overrides), source="overrides")
        self.name = re.sub(r"[^A-Za-z0-9-]+", "-", name).strip("-") or "trial"  # as far as a git reference may have it
        self._lines: dict[str, queue.SimpleQueue[str | None]] = {stage: queue.SimpleQueue() for stage in stages}
        self._answers: dict[str, Outcome] = {}
        self._current = ""
        self.problem: StageFailed | None = None
        arguments = (self.name, from_anywhere(overrides, Path()), targets, force)
        self._thread = threading.Thread(target=self._run, args=arguments)
        self._thread.start()

    def run(self, stage: str, tell: Callable[[str], None]) -> Outcome | None:
        """Say the lines of `stage` as they come. Returns DVC's answer, None if it did not get there; raises StageFailed."""
        for line in iter(self._lines[stage].get, None):
            tell(line)
        if self.problem and self.problem.stage in (stage, ""):
            raise self.problem
        return self._answers.get(stage)

    def show(self, outputs: Sequence[str]) -> None:
        """Publish the small ones among `outputs`, as the experiment has them."""
        from dvc.api import DVCFileSystem

        files = DVCFileSystem(rev=self.name)
        with tempfile.TemporaryDirectory() as folder:
            for path in outputs:
                for file in files.find(path) if files.exists(path) else []:
                    if Path(file).suffix in SHOWN and (files.size(file) or 0) <= LARGEST_BYTES:
                        (Path(folder) / file).parent.mkdir(parents=True, exist_ok=True)
                        files.get_file(file, str(Path(folder) / file))
            publish([Path(path) for path in outputs], Path(folder))

    def _run(self, name: str, settings: Mapping[str, Any], targets: Sequence[str], force: bool) -> None:
        try:
            experiment(name, settings, targets, force=force, say=self._hand_on)
        except StageFailed as error:
            self.problem = error
        finally:
            for lines in self._lines.values():
                lines.put(None)

    def _hand_on(self, line: str) -> None:
        stage, outcome = answer_in(line)
        if outcome and stage in self._lines:
            if self._current:
                self._lines[self._current].put(None)
            self._current, self._answers[stage] = stage, outcome
        if self._current:
            self._lines[self._current].put(line)

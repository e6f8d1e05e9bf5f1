"""zeroshot: accuracy of one variant of the model on multiple-choice tasks, by lm-eval's definitions of them. Off by default."""

from __future__ import annotations

from importlib.util import find_spec
from typing import ClassVar, Literal

from pydantic import BaseModel, Field, model_validator

from pipeline.params import Section
from stages.decoder.compute import Compute
from stages.zeroshot.packaged import PACKAGED


class Zeroshot(Section):
    """Which tasks, where their examples come from, and how many are scored."""

    OFF_WHEN: ClassVar = ("tasks", [])

    tasks: list[str] = []  # lm-eval's names, or those of definitions of your own; none: the stage does nothing
    source: Literal["demo", "files", "hub"] = "demo"
    files: dict[str, str] = {}  # files: task -> .jsonl, .parquet or .arrow, looked for in data/tasks/
    definitions: str | None = None  # a folder with lm-eval definitions (.yaml) of your own
    limit: int | None = Field(default=None, ge=1)  # the first so many examples of each task; all of them
    shots: int = Field(default=0, ge=0)  # solved examples before each question
    batch_size: int = Field(default=32, ge=1)  # sequences in a batch at most; compute.batch_tokens bounds it too
    seed: int = Field(default=0, ge=0)  # draws the solved examples

    @model_validator(mode="after")
    def _tasks_have_what_they_need(self) -> Zeroshot:
        twice = sorted({task for task in self.tasks if self.tasks.count(task) > 1})
        if twice:
            raise ValueError(f"tasks names {twice[0]} twice")
        if self.tasks and find_spec("lm_eval") is None:
            raise ValueError("tasks need lm-eval, which is not installed; run: pip install -c constraints.txt -e '.[zeroshot]'")
        absent = [task for task in self.tasks if task not in PACKAGED]
        if self.source == "demo" and absent:
            there = f"source 'demo' has no examples of {absent[0]}, only of {', '.join(PACKAGED)}"
            raise ValueError(f"{there}; for others set source: files or hub")
        absent = [task for task in self.tasks if task not in self.files]
        if self.source == "files" and absent:
            raise ValueError(f"source 'files' needs files.{absent[0]}: the file with the examples of that task")
        return self


class Params(BaseModel):
    """Sections of params.yaml this stage reads."""

    compute: Compute
    zeroshot: Zeroshot

"""Which text: what params.yaml says of it, in `tokens` and in `training.text`."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import model_validator

from pipeline.params import Section


class Text(Section):
    """Two corpora, one to fit on (calibration, training) and one to measure on."""

    KEY: ClassVar[str] = "training.text"  # where in params.yaml, for messages

    READ_WHEN: ClassVar = {
        "calibration_files": ("source", ("files",)),
        "evaluation_files": ("source", ("files",)),
        "dataset": ("source", ("hub",)),
        "subset": ("source", ("hub",)),
        "revision": ("source", ("hub",)),
    }

    source: Literal["demo", "files", "hub"] = "demo"
    calibration_files: list[str] = []  # files: .txt, .jsonl or .parquet; put them in data/corpus/
    evaluation_files: list[str] = []
    field: str = "text"  # jsonl, parquet and hub: the column that holds the text
    dataset: str | None = None  # hub: owner/name
    subset: str | None = None
    revision: str = "main"
    calibration_split: str = "train"
    evaluation_split: str = "test"  # the demo has train, valid and test
    separator: str = "\n\n"  # joins documents

    @model_validator(mode="after")
    def _source_has_its_keys(self) -> Text:
        if self.source == "hub" and not self.dataset:
            raise ValueError("source 'hub' needs dataset to be set")
        if self.source == "files" and not (self.calibration_files and self.evaluation_files):
            raise ValueError("source 'files' needs calibration_files and evaluation_files to be set")
        if self.source != "files" and self.calibration_split == self.evaluation_split:
            raise ValueError(
                f"calibration_split and evaluation_split are both '{self.evaluation_split}': they must not share text"
            )
        return self

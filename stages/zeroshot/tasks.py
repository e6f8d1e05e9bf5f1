"""Tasks ready to be measured: definition and examples brought together, and every example tried, before any model is touched."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
from lm_eval.api.task import ConfigurableTask

from pipeline.console import say
from pipeline.errors import PalimpsestError
from stages.zeroshot import Zeroshot
from stages.zeroshot.definitions import read_definitions
from stages.zeroshot.sources import Examples, read_demo, read_files

SPLIT = "evaluation"
logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it tells of every step
datasets.disable_progress_bars()
SOURCES: dict[str, Callable[[Zeroshot, Path], dict[str, Examples]]] = {"demo": read_demo, "files": read_files}


@dataclass(frozen=True)
class Task:
    """A checked task. `terms` is what an accuracy on it must be quoted with, the model apart."""

    name: str
    harness: ConfigurableTask
    limit: int | None
    terms: dict[str, Any]


def load_tasks(wanted: Zeroshot, data: Path) -> list[Task]:
    """Every task of `wanted`, in its order.

    Raises PalimpsestError naming the task and what is wrong: no such task, one that is not scored by likelihoods, no data, data
    that does not fit the definition (with file and row).
    """
    folder = None if wanted.definitions is None else data.parent / Path(wanted.definitions).expanduser()
    definitions = read_definitions(wanted.tasks, folder)
    for name, (_, config) in definitions.items():
        _check_kind(name, config)
    examples = SOURCES[wanted.source](wanted, data) if wanted.source in SOURCES else {}
    tasks = []
    for name, (path, config) in definitions.items():
        harness = _build(name, config, examples.get(name), wanted)
        where = examples[name].where if name in examples else f"{config.get('dataset_path')}"
        count, digest = _check_examples(name, harness, where, wanted)
        version = (config.get("metadata") or {}).get("version", "")
        terms = {
            "task": name,
            "definition": f"{version} ({hashlib.sha256(path.read_bytes()).hexdigest()[:8]})".strip(),
            "data": examples[name].data if name in examples else f"{where}, {_split(harness)}",
            "examples": count,
            "examples_sha256": digest,
            "shots": wanted.shots,
            **({"seed": wanted.seed} if wanted.shots else {}),
        }
        say(f"{name}: {count:,} examples of {terms['data']}")
        tasks.append(Task(name, harness, wanted.limit, terms))
    return tasks


def _check_kind(name: str, config: dict[str, Any]) -> None:
    kind = config.get("output_type", "generate_until")
    if kind not in ("multiple_choice", "loglikelihood"):
        raise PalimpsestError(
            f"zeroshot.tasks: '{name}' is scored by {kind}, and only tasks scored by the likelihood of given answers are run here"
        )
    metrics = [one["metric"] for one in config.get("metric_list") or [{"metric": "acc"}]]
    if "acc" not in metrics:
        raise PalimpsestError(f"zeroshot.tasks: '{name}' has no accuracy (acc), only {', '.join(map(str, metrics))}")


def _build(name: str, config: dict[str, Any], examples: Examples | None, wanted: Zeroshot) -> ConfigurableTask:
    config = {**config, "num_fewshot": wanted.shots}
    where = f"zeroshot.tasks: '{name}'"
    if examples is not None:
        where = examples.where
        given = datasets.DatasetDict({SPLIT: _dataset(name, examples, config.pop("process_docs", None))})
        config |= {
            "custom_dataset": lambda **_: given, "dataset_path": None, "dataset_name": None, "dataset_kwargs": None,
            "training_split": None, "validation_split": None, "test_split": SPLIT,
            "fewshot_split": SPLIT if wanted.shots else None,  # the example in question is never among its own solved ones
        }  # fmt: skip
    try:
        task = ConfigurableTask(config=config)
    except Exception as error:  # lm-eval and `datasets` raise whatever their parts do
        if examples is None:
            hint = "check zeroshot.definitions, run this where there is network, or use local files: zeroshot.source: files"
        else:
            hint = "its columns, or the values in its first row, are not those that the definition reads"
        raise PalimpsestError(f"{where}: no data for task '{name}' ({_reason(error)}); {hint}") from None
    task.set_fewshot_seed(wanted.seed)
    return task


def _dataset(name: str, examples: Examples, process: Callable[[datasets.Dataset], datasets.Dataset] | None) -> datasets.Dataset:
    """The rows as lm-eval wants them, prepared by the definition's own function: once, where lm-eval would do it at each look."""
    for number, row in enumerate(examples.rows, 1):  # a column that is not there would be read as the word None
        absent = [key for key in examples.rows[0] if row.get(key) is None and examples.rows[0][key] is not None]
        if absent:
            raise PalimpsestError(f"{examples.where}, row {number}: not an example of task '{name}' (no '{absent[0]}')")
    try:
        rows = datasets.Dataset.from_list(examples.rows)
        return rows if process is None else process(rows)
    except Exception as error:  # pyarrow's, and whatever the definition's function raises
        raise PalimpsestError(f"{examples.where}: not rows as the definition reads them ({_reason(error)})") from None


def _check_examples(name: str, task: ConfigurableTask, where: str, wanted: Zeroshot) -> tuple[int, str]:
    """Number and SHA-256 of the examples that count, each of which must have a question, answers, and a right one among them."""
    if wanted.shots >= len(task.eval_docs) and task.config.fewshot_split == SPLIT:
        raise PalimpsestError(f"{where}: {len(task.eval_docs)} examples are too few for zeroshot.shots = {wanted.shots}")
    digest, count = hashlib.sha256(), 0
    for count, row in enumerate(_rows(task, wanted.limit), 1):
        try:
            problem = _problem(task, row)
        except Exception as error:  # of a template or a function of the definition
            problem = _reason(error)
        if problem:
            raise PalimpsestError(f"{where}, row {count}: not an example of task '{name}' ({problem}); mend or remove it")
        digest.update(json.dumps(row, sort_keys=True, default=str).encode())
    return count, digest.hexdigest()


def _rows(task: ConfigurableTask, limit: int | None) -> Iterator[dict[str, Any]]:
    rows: Any = task.eval_docs
    return islice(rows, limit)


def _problem(task: ConfigurableTask, row: dict[str, Any]) -> str:
    """What is wrong with an example, empty for nothing."""
    text, target = task.doc_to_text(row), task.doc_to_target(row)
    if task.OUTPUT_TYPE == "loglikelihood":
        return "" if str(target).strip() else "an empty continuation"
    choices = task.doc_to_choice(row)
    if len(choices) < 2 or not all(isinstance(one, str) and one.strip() for one in choices):
        return f"answers {choices!r}"
    right = text if task.multiple_input else target
    for one in right if isinstance(right, list) else [right]:
        place = choices.index(one) if isinstance(one, str) and one in choices else one
        if not isinstance(place, int) or not 0 <= place < len(choices):
            return f"right answer {one!r} of {len(choices)} answers"
    return ""


def _split(task: ConfigurableTask) -> str:
    return str(task.config.test_split or task.config.validation_split)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"

"""Tasks ready to be measured: definition and examples brought together, and every example tried, before any model is touched."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
from lm_eval.api.task import ConfigurableTask

from pipeline.console import say
from pipeline.errors import PalimpsestError
from stages.zeroshot import Zeroshot
from stages.zeroshot.definitions import read_definitions
from stages.zeroshot.oddities import Process, find_absent, find_odd, only_read, reason
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
        count, digest = _check_examples(name, harness, where, examples.get(name), wanted)
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
    config, given = {**config, "num_fewshot": wanted.shots}, datasets.Dataset.from_list([])
    if examples is not None:
        examples = replace(examples, rows=only_read(examples.rows, config))
        given = _dataset(name, examples, config.pop("process_docs", None))
        config |= {
            "custom_dataset": lambda **_: datasets.DatasetDict({SPLIT: given}),
            "dataset_path": None, "dataset_name": None, "dataset_kwargs": None,
            "training_split": None, "validation_split": None, "test_split": SPLIT,
            "fewshot_split": SPLIT if wanted.shots else None,  # the example in question is never among its own solved ones
        }  # fmt: skip
    try:
        task = ConfigurableTask(config=config)
    except Exception as error:  # lm-eval and `datasets` raise whatever their parts do
        if examples is not None:  # lm-eval has looked at the first of them
            raise _unfit(name, examples.at(0), _first_fault(config, given, error)) from None
        hint = "check zeroshot.definitions, run this where there is network, or use local files: zeroshot.source: files"
        raise PalimpsestError(f"zeroshot.tasks: no data for task '{name}' ({reason(error)}); {hint}") from None
    task.set_fewshot_seed(wanted.seed)
    return task


def _first_fault(config: dict[str, Any], given: datasets.Dataset, error: Exception) -> str:
    """What is wrong with the first row, in the words for any row; or that the next one is no better."""
    if len(given) < 2:
        return reason(error)
    others = datasets.DatasetDict({SPLIT: given.select(range(1, len(given)))})
    try:
        task = ConfigurableTask(config={**config, "custom_dataset": lambda **_: others})
    except Exception:  # whatever it is, the first row's fault is what is told
        return f"{reason(error)}; nor is the next one: are these the columns that the definition reads?"
    return _problem(task, given[0]) or reason(error)


def _dataset(name: str, examples: Examples, process: Process | None) -> datasets.Dataset:
    """The rows as lm-eval wants them, prepared by the definition's own function: once, where lm-eval would do it at each look."""
    absent = find_absent(examples.rows)  # a column that is not there would be read as the word None
    if absent:
        raise _unfit(name, examples.at(absent[0]), absent[1])
    try:
        rows = datasets.Dataset.from_list(examples.rows)
        return rows if process is None else process(rows)
    except Exception as error:  # pyarrow's, and whatever the definition's function raises
        odd = find_odd(examples.rows, process)
        place, problem = (examples.at(odd[0]), odd[1]) if odd else (examples.where, reason(error))
        raise _unfit(name, place, problem) from None


def _check_examples(
    name: str, task: ConfigurableTask, where: str, examples: Examples | None, wanted: Zeroshot
) -> tuple[int, str]:
    """Number and SHA-256 of the examples that count, each of which must have a question, answers, and a right one among them."""
    if wanted.shots >= len(task.eval_docs) and task.config.fewshot_split == SPLIT:
        raise PalimpsestError(f"{where}: {len(task.eval_docs)} examples are too few for zeroshot.shots = {wanted.shots}")
    whole = examples is not None and len(examples.rows) == len(task.eval_docs)  # a definition may leave some out
    digest, count = hashlib.sha256(), 0
    for count, row in enumerate(_rows(task, wanted.limit), 1):
        if problem := _problem(task, row):
            raise _unfit(name, examples.at(count - 1) if examples and whole else f"{where}, example {count}", problem)
        digest.update(json.dumps(row, sort_keys=True, default=str).encode())
    return count, digest.hexdigest()


def _unfit(name: str, place: str, problem: str) -> PalimpsestError:
    """What is said of a row, whichever it is and whoever found it."""
    return PalimpsestError(f"{place}: not an example of task '{name}' ({problem}); mend or remove it")


def _rows(task: ConfigurableTask, limit: int | None) -> Iterator[dict[str, Any]]:
    rows: Any = task.eval_docs
    return islice(rows, limit)


def _problem(task: ConfigurableTask, row: dict[str, Any]) -> str:
    """What is wrong with an example, empty for nothing."""
    try:
        return _mismatch(task, row)
    except Exception as error:  # of a template or a function of the definition
        return reason(error)


def _mismatch(task: ConfigurableTask, row: dict[str, Any]) -> str:
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

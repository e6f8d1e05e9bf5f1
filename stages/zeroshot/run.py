"""Accuracy of one variant of the model on zero-shot tasks. Without tasks, nothing."""

from __future__ import annotations

from pathlib import Path

from pipeline.console import say
from pipeline.files import Files
from stages.zeroshot import Params
from stages.zeroshot.results import Kept, summary, write_results


def run(params: Params, inputs: Files, outputs: Files) -> None:
    """Write `zeroshot/<variant>.json` (accuracies with standard errors, the contract of each task) and `.csv` (every example).

    A task that is done is kept beside the outputs until all are, so that a killed run goes on from there.
    """
    wanted, (summary_path, examples_path) = params.zeroshot, outputs.values()
    if not wanted.tasks:
        write_results(summary_path, examples_path, [])
        return
    # lm-eval and torch take seconds to import, and only a run with tasks needs them
    from stages.decoder.variant import read_variant
    from stages.zeroshot.fingerprint import fingerprint
    from stages.zeroshot.measure import Measurement
    from stages.zeroshot.tasks import load_tasks

    data = inputs["tasks"].parent
    tasks = load_tasks(wanted, data)
    variant = read_variant(inputs, params.compute)
    measurement = Measurement(variant, params.compute, wanted, summary_path.parent)
    done = []
    for task in tasks:
        contract = measurement.contract(task)
        kept = Kept(data / "zeroshot-kept", f"{summary_path.stem}-{task.name}", fingerprint(inputs, contract))
        result = kept.read()
        if result is None:
            result = measurement.measure(task, contract)
            kept.write(result)
        say(f"{summary_path.stem}, {task.name}: {summary(result)}")
        done.append(result)
    write_results(summary_path, examples_path, done)
    _clear(data / "zeroshot-kept", summary_path.stem)


def _clear(folder: Path, variant: str) -> None:
    """Forget what was kept of a variant that is whole."""
    for path in folder.glob(f"{variant}-*"):
        path.unlink()

"""One key changed: exactly these stages run again. Changed back: they are restored, and nothing runs. By the real DVC."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.graph import edges, read_graph
from pipeline.reproduce import changed_stages, descendants, reproduce
from tests.toy import REPOSITORY, run, set_key

ALL = set(read_graph(REPOSITORY / "dvc.yaml"))
EVALUATIONS = {"evaluation@dense", "evaluation@masked", "evaluation@removed", "evaluation@compressed"}
TASKS = {"zeroshot@dense", "zeroshot@masked", "zeroshot@removed", "zeroshot@compressed"}
AFTER_COMPRESS = {"compress", "evaluation@compressed", "zeroshot@compressed", "report"}
AFTER_MASKS = {"masking", "ghost", "evaluation@masked", "zeroshot@masked"} | AFTER_COMPRESS
AFTER_REMOVAL = {"removal", "ghost", "evaluation@removed", "zeroshot@removed"} | AFTER_COMPRESS
# Written out by hand, not computed from dvc.yaml: this table is what dvc.yaml is held against.
RERUNS: list[tuple[str, Any, set[str]]] = [
    ("training.seed", 7, ALL),
    ("model.dtype", "float32", ALL - {"training"}),
    ("tokens.seed", 7, ALL - {"training", "model", "zeroshot@dense"}),
    ("compute.batch_tokens", 1024, ALL - {"training", "model", "tokens"}),
    ("statistics.outlier", 6.0, {"statistics", "sensitivity", "allocation"} | AFTER_MASKS),
    ("sensitivity.length", 64, {"sensitivity", "allocation"} | AFTER_MASKS),
    ("allocation.sparsity", 0.4, {"allocation"} | AFTER_MASKS),
    ("allocation.pals.slope", 0.1, {"allocation"} | AFTER_MASKS),
    ("masking.method", "magnitude", AFTER_MASKS),
    ("redundancy.gap", 2, {"redundancy"} | AFTER_REMOVAL),
    ("search.steps", 3, {"search"} | AFTER_REMOVAL),
    ("removal.count", 5, AFTER_REMOVAL),
    ("ghost.ridge", 0.01, {"ghost"} | AFTER_COMPRESS),
    ("peeling.reach", [1], {"peeling", "report"}),
    ("yes.steps", 7, {"yes", "report"}),
    ("evaluation.resamples", 500, EVALUATIONS | {"report"}),
    ("zeroshot.limit", 100, TASKS | {"report"}),
    ("report.title", "Other", {"report"}),
]


def quietly(root: Path) -> dict[str, str]:
    return dict(reproduce(root=root, say=lambda line: None))


@pytest.mark.parametrize(("key", "value", "expected"), RERUNS, ids=[row[0] for row in RERUNS])
def test_what_dvc_sees_changed(finished_toy: Path, key: str, value: Any, expected: set[str]) -> None:
    """The cheap half for every row: what DVC sees changed at once, and all that lies below it."""
    before = (finished_toy / "params.yaml").read_bytes()
    try:
        set_key(finished_toy, key, value)
        changed = changed_stages(finished_toy)
    finally:
        (finished_toy / "params.yaml").write_bytes(before)
    assert descendants(changed, edges(read_graph(finished_toy / "dvc.yaml"))) == expected


RUN_IN_FULL = [row for row in RERUNS if row[0] in {"masking.method", "removal.count", "report.title"}]


@pytest.mark.parametrize(("key", "value", "expected"), RUN_IN_FULL, ids=[row[0] for row in RUN_IN_FULL])
def test_exact_reruns(toy: Path, key: str, value: Any, expected: set[str]) -> None:
    before = (toy / "params.yaml").read_bytes()
    set_key(toy, key, value)
    answers = quietly(toy)
    assert {stage for stage, answer in answers.items() if answer == "ran"} == expected
    assert {stage for stage, answer in answers.items() if answer == "unchanged"} == ALL - expected

    (toy / "params.yaml").write_bytes(before)
    answers = quietly(toy)
    assert {stage for stage, answer in answers.items() if answer == "restored"} == expected
    assert "ran" not in answers.values()


def test_the_table_has_a_row_for_every_section() -> None:
    from pipeline.params import section_models

    assert {key.split(".")[0] for key, _, _ in RERUNS} == set(section_models())


def test_the_promises_of_the_design() -> None:
    """Said in words in the design; here said of the table above, which the test above holds DVC to."""
    rows = {key: stages for key, _, stages in RERUNS}
    for key in ("masking.method", "allocation.sparsity", "allocation.pals.slope"):
        assert not rows[key] & {"redundancy", "removal"}
    assert "masking" not in rows["removal.count"]
    for key in ("masking.method", "allocation.sparsity", "removal.count", "ghost.ridge"):
        assert not rows[key] & {"evaluation@dense", "zeroshot@dense"}


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("stages/masking/run.py", AFTER_MASKS),
        ("stages/report/__init__.py", {"report"}),
    ],
)
def test_changed_code_reruns_the_stages_that_import_it(toy: Path, file: str, expected: set[str]) -> None:
    with (toy / file).open("a") as code:
        code.write("# a line\n")
    direct = {stage for stage in expected if file.split("/")[1] == stage.split("@")[0]}
    assert changed_stages(toy) == direct
    answers = quietly(toy)
    # The toy's outputs do not depend on its code: equal bytes, so that nothing below runs.
    assert {stage for stage, answer in answers.items() if answer == "ran"} == direct


def test_bytecode_is_no_change(toy: Path) -> None:
    (toy / "stages/model/__pycache__").mkdir(exist_ok=True)
    (toy / "stages/model/__pycache__/run.cpython-311.pyc").write_bytes(b"x")
    assert changed_stages(toy) == set()


def test_lost_output_is_restored(toy: Path) -> None:
    (toy / "data/removal.json").unlink()
    answers = quietly(toy)
    assert answers["removal"] == "restored" and "ran" not in answers.values()


def test_dvc_repro_by_hand_agrees(toy: Path) -> None:
    """`dvc repro` in the environment is all that the runs above are."""
    set_key(toy, "report.title", "Other")
    done = run(toy, "dvc", "repro")
    assert done.returncode == 0, done.stderr
    assert quietly(toy) == dict.fromkeys(answers_in_order(toy), "unchanged")


def answers_in_order(root: Path) -> list[str]:
    return list(read_graph(root / "dvc.yaml"))

"""The runner: a stage gets what dvc.yaml declares and nothing else; a user's mistake is one clear message, before any work."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.artifacts import read_json
from pipeline.runner import main
from pipeline.tensors import write_tensors
from tests.toy import REPOSITORY, set_key, write_removal_inputs

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """dvc.yaml, params.yaml and what the stage `removal` reads, for a model of six blocks."""
    for name in ("dvc.yaml", "params.yaml"):
        shutil.copy(REPOSITORY / name, tmp_path / name)
    write_removal_inputs(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    return tmp_path


@pytest.fixture
def run(project: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a stage as the command line does: (exit status, what was printed on stderr)."""

    def run_one(stage: str = "removal") -> tuple[int, str]:
        status = main([stage])
        return status, capsys.readouterr().err.strip()

    return run_one


def test_a_stage_runs(project: Path, run: Run) -> None:
    assert run() == (0, "")
    assert len(read_json(project / "data/removal.json")["removed"]) == 3


REFUSED: list[tuple[str, Any, str]] = [
    ("removal.count", "three", r"removal\.count = 'three': should be a valid integer"),
    ("removal.count", 0, r"removal\.count = 0: should be greater than or equal to 1"),
    ("removal.count", 2.0, r"removal\.count = 2\.0: should be a valid integer"),
    ("removal.method", "shortgtp", r"removal\.method = 'shortgtp': should be .*'streamline'.*'shortgpt'"),
    ("allocation.sparsity", 1.0, r"allocation\.sparsity = 1\.0: should be less than 1"),
    ("compute.device", "gpu", r"compute\.device = 'gpu'"),
    ("tokens.length", -1, r"tokens\.length = -1: should be greater than or equal to 2"),
    ("evaluation.confidence", True, r"evaluation\.confidence = True: should be a valid number"),
]


@pytest.mark.parametrize(("key", "value", "message"), REFUSED, ids=[f"{row[0]}={row[1]}" for row in REFUSED])
def test_a_wrong_value_of_any_stage_is_refused_before_any_work(
    project: Path, run: Run, monkeypatch: pytest.MonkeyPatch, key: str, value: Any, message: str
) -> None:
    set_key(project, key, value)
    monkeypatch.setattr(importlib.import_module("stages.removal.run"), "run", lambda *_: pytest.fail("the stage ran"))
    status, said = run()
    assert status == 1 and len(said.splitlines()) == 1
    assert re.match(rf"removal: params\.yaml: {message}", said), said
    assert not (project / "data/removal.json").exists()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "  count: 3",
            "  cuont: 3",
            "params.yaml: removal.cuont: unknown key; did you mean count? allowed: axis, blocks, count, credit, "
            "method, protect, seed, spacing",
        ),
        ("removal:\n", "removol:\n", "params.yaml: removol: unknown section; did you mean removal? allowed: allocation, "),
        (
            "    bound: 0.05",
            "    bnd: 0.05",
            "params.yaml: allocation.pals.bnd: unknown key; did you mean bound? allowed: bound, ",
        ),
        ("removal:\n", "removal: [\n", "params.yaml, line "),
    ],
)
def test_a_misspelt_key_is_named_with_what_is_allowed(project: Path, run: Run, old: str, new: str, message: str) -> None:
    text = (project / "params.yaml").read_text()
    assert old in text
    (project / "params.yaml").write_text(text.replace(old, new, 1))
    status, said = run()
    assert status == 1 and said.startswith(f"removal: {message}") and len(said.splitlines()) == 1


def test_a_key_that_stands_twice_is_named(project: Path, run: Run) -> None:
    text = (project / "params.yaml").read_text()
    (project / "params.yaml").write_text(text + "removal: {}\n")
    status, said = run()
    assert status == 1 and said == f"removal: params.yaml, line {len(text.splitlines()) + 1}: 'removal' stands twice"


def test_values_that_do_not_go_together_are_refused(project: Path, run: Run) -> None:
    set_key(project, "allocation.method", "pals")
    set_key(project, "allocation.sparsity", 0.02)
    status, said = run()
    assert status == 1 and "allocation" in said and "bound" in said and "0.02" in said
    assert len(said.splitlines()) == 1


def test_all_mistakes_are_told_at_once(project: Path, run: Run) -> None:
    set_key(project, "removal.count", 0)
    set_key(project, "report.title", 3)
    status, said = run()
    assert status == 1 and "removal.count" in said and "report.title" in said


def test_no_params_yaml(project: Path, run: Run) -> None:
    (project / "params.yaml").unlink()
    assert run() == (1, "removal: params.yaml: not found; run this from the project's folder")


def test_a_missing_input_names_the_stage_that_makes_it(project: Path, run: Run) -> None:
    (project / "data/redundancy_pairs.csv").unlink()
    status, said = run()
    assert status == 1
    assert said == "removal: data/redundancy_pairs.csv: needed by stage 'removal' and not there; run: dvc repro redundancy"


@pytest.mark.parametrize("mapping", ["inputs", "outputs"])
def test_an_undeclared_file_is_an_error(project: Path, run: Run, monkeypatch: pytest.MonkeyPatch, mapping: str) -> None:
    (project / "data/statistics.csv").write_text("block\n")  # there, but not declared

    def peeking(params: Any, inputs: Any, outputs: Any) -> None:
        (inputs if mapping == "inputs" else outputs)["statistics.csv"].read_text()

    monkeypatch.setattr(importlib.import_module("stages.removal.run"), "run", peeking)
    status, said = run()
    assert status == 1 and "stage 'removal' uses 'statistics.csv', which dvc.yaml does not declare" in said


def test_an_undeclared_parameter_is_not_there(project: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("stages.removal.run"), "run", lambda params, *_: params.masking.method)
    with pytest.raises(AttributeError, match="masking"):
        run()


@pytest.mark.parametrize(
    ("old", "new"), [("params: [removal]", "params: [removal, masking]"), ("params: [removal]", "params: []")]
)
def test_dvc_yaml_and_the_stage_have_to_agree_on_parameters(project: Path, run: Run, old: str, new: str) -> None:
    (project / "dvc.yaml").write_text((project / "dvc.yaml").read_text().replace(old, new))
    status, said = run()
    assert status == 1 and said.startswith("removal: dvc.yaml: stage 'removal' declares params ")


def test_a_stage_cannot_change_its_parameters(project: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        importlib.import_module("stages.removal.run"), "run", lambda params, *_: setattr(params.removal, "count", 1)
    )
    with pytest.raises(ValueError, match="frozen"):
        run()


def test_a_stage_that_leaves_an_output_out(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("stages.removal.run"), "run", lambda *_: None)
    assert run() == (
        1,
        "removal: stage 'removal' ended without writing data/removal.json, data/removal_scores.json, data/removal_choices.csv",
    )


def test_an_unknown_stage(run: Run) -> None:
    status, said = run("removl")
    assert status == 1 and said.startswith("removl: dvc.yaml: no stage 'removl'; there are training, model, tokens, ")


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2 and "usage: python -m pipeline.runner NAME" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"\x10\x00\x00\x00\x00\x00\x00\x00{", b"PK\x03\x04 a pickle in a zip", None])
def test_a_truncated_or_foreign_tape(project: Path, run: Run, content: bytes | None) -> None:
    tape = project / "data/tape.safetensors"
    write_tensors(tape, {"boundaries": torch.zeros(3, 2, 4, 8)})
    tape.write_bytes(tape.read_bytes()[:-64] if content is None else content)
    before = sorted((project / "data").rglob("*"))
    status, said = run("peeling")
    assert status == 1 and "data/tape.safetensors: not a whole safetensors file" in said
    assert len(said.splitlines()) == 1
    assert sorted((project / "data").rglob("*")) == before


@pytest.mark.skipif(os.geteuid() == 0 and not shutil.which("setpriv"), reason="root may write everywhere")
def test_no_permission_to_write(project: Path) -> None:
    as_others = ["setpriv", "--bounding-set", "-dac_override"] if os.geteuid() == 0 else []  # root, bound by permissions
    (project / "data").chmod(0o555)
    try:
        command = [*as_others, sys.executable, "-m", "pipeline.runner", "removal"]
        done = subprocess.run(command, cwd=project, capture_output=True, text=True)
    finally:
        (project / "data").chmod(0o755)
    assert done.returncode == 1
    assert done.stderr.strip() == "removal: data: no permission to write; check who owns the folder"
    assert not (project / "data/removal.json").exists()


def test_as_a_command(project: Path) -> None:
    """One message, no traceback, exit status 1; and neither Prefect nor torch is imported by who does not need them."""
    command = [sys.executable, "-X", "importtime", "-m", "pipeline.runner", "removal"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True)
    assert done.returncode == 0 and "removal: done in" in done.stdout
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "stages.removal.streamline" in imported and not imported & {"torch", "prefect", "dvc", "transformers"}

    set_key(project, "removal.count", 100)
    done = subprocess.run([*command[:1], *command[3:]], cwd=project, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr and "removal.count" in done.stderr

"""dvc.yaml, the flow and the code say the same about who depends on what."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel

from pipeline.flow import flow_edges, upstream
from pipeline.graph import edges, read_graph
from pipeline.params import params_model, read_params, section_models, stage_names
from tests.contract.closure import ROOT, differences, imported_files, with_code

GRAPH = read_graph(ROOT / "dvc.yaml")
STAGES = sorted({name.split("@")[0] for name in GRAPH})


def test_flow_has_the_edges_of_dvc_yaml() -> None:
    assert flow_edges() == edges(GRAPH)


def test_flow_has_the_stages_of_dvc_yaml() -> None:
    assert sorted(upstream([])) == sorted(GRAPH)


def test_the_edges_read_from_dvc_yaml_are_dvcs_own() -> None:
    command = [sys.executable, "-m", "dvc", "dag", "--dot"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [line.strip(' ;"').split('" -> "') for line in done.stdout.splitlines() if "->" in line]
    assert {(start, end) for start, end in lines} == edges(GRAPH)


@pytest.mark.parametrize("stage", GRAPH)
def test_code_dependencies_are_what_the_code_imports(stage: str) -> None:
    missing, needless = differences(GRAPH[stage])
    assert not missing and not needless, (
        f"dvc.yaml, deps of '{stage}': add {sorted(missing)}, remove {sorted(needless)}; "
        "or: python -m tests.contract.closure --fix"
    )


@pytest.mark.parametrize("stage", GRAPH)
def test_nothing_is_listed_twice(stage: str) -> None:
    node = GRAPH[stage]
    reads = node.reads[:-1] if stage.endswith("@dense") else node.reads  # there the variant is the model itself
    for listed in (reads, node.code, node.writes, node.params):
        assert len(set(listed)) == len(listed)


def test_fixing_dvc_yaml_changes_code_dependencies_only(tmp_path: Path) -> None:
    text = (ROOT / "dvc.yaml").read_text()
    broken = text.replace("pipeline/artifacts.py, ", "").replace("stages/removal,", "stages/removal, pipeline/flow.py,")
    assert broken != text
    (tmp_path / "dvc.yaml").write_text(with_code(broken))
    assert read_graph(tmp_path / "dvc.yaml") == GRAPH


@pytest.mark.parametrize("stage", STAGES)
def test_no_stage_imports_another(stage: str) -> None:
    for file in (ROOT / "stages" / stage).rglob("*.py"):
        for used in imported_files(file):
            package = used.relative_to(ROOT).parts[1]
            assert "stages" not in used.relative_to(ROOT).parts or package in {stage, "decoder", "corpus"}, (
                f"{file} imports {used}"
            )


def test_decoder_imports_no_stage() -> None:
    for file in (ROOT / "stages/decoder").rglob("*.py"):
        assert not [
            used for used in imported_files(file) if used.is_relative_to(ROOT / "stages") and used.parent.name != "decoder"
        ]


def test_pipeline_knows_no_stage() -> None:
    for file in (ROOT / "pipeline").rglob("*.py"):
        assert not [used for used in imported_files(file) if used.is_relative_to(ROOT / "stages")], file


@pytest.mark.parametrize("stage", GRAPH)
def test_declared_params_are_the_models_fields(stage: str) -> None:
    assert set(params_model(stage.split("@")[0]).model_fields) == set(GRAPH[stage].params)


def test_every_stage_package_is_in_dvc_yaml() -> None:
    assert stage_names() == STAGES


def test_params_yaml_states_every_key_with_its_default() -> None:
    stated = read_params(ROOT / "params.yaml")
    assert stated == {name: model().model_dump() for name, model in section_models().items()}


@pytest.mark.parametrize("stage", [name for name in STAGES if importlib.util.find_spec(f"stages.{name}.run")])
def test_every_allowed_method_exists(stage: str) -> None:
    allowed = _methods(params_model(stage))
    module = ROOT / "stages" / stage / "run.py"
    beside = module.with_name("methods.py")  # where the dict has a file of its own
    table = _method_table(beside if beside.exists() else module)
    if allowed is None:
        assert table is None, f"{module}: METHODS, but no key 'method' to choose with"
        return
    # "none" and "list" are no functions: `run` handles them by name
    by_name = {one.value for one in ast.walk(ast.parse(module.read_text())) if isinstance(one, ast.Constant)} & {"none", "list"}
    assert table is not None and set(table) | (by_name & allowed) == allowed


def _methods(model: type[BaseModel]) -> set[str] | None:
    for field in model.model_fields.values():
        section: Any = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel) and "method" in section.model_fields:
            literal = section.model_fields["method"].annotation
            assert get_origin(literal) is Literal
            return set(get_args(literal))
    return None


def _method_table(module: Path) -> list[str] | None:
    for statement in ast.parse(module.read_text()).body:
        target = statement.target if isinstance(statement, ast.AnnAssign) else getattr(statement, "targets", [None])[0]
        if isinstance(target, ast.Name) and target.id == "METHODS":
            value = statement.value  # type: ignore[union-attr]
            assert isinstance(value, ast.Dict)
            return [str(key.value) for key in value.keys if isinstance(key, ast.Constant)]
    return None

"""Studies: what a file may ask, which cells wait for which, how they are compared, and one of the toy project by real DVC."""

from __future__ import annotations

import json
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from ruamel.yaml import YAML
from scipy import stats

from pipeline import reproduce
from pipeline.errors import PalimpsestError
from pipeline.graph import read_graph
from pipeline.reproduce import overrides
from pipeline.study.cells import Job, Outcome, from_anywhere, read_result, run_cell
from pipeline.study.compare import compare
from pipeline.study.order import COMMON, common_settings, common_stages, run_in_order, waits
from pipeline.study.page import page
from pipeline.study.plan import Cell, Plan, Study, merged
from pipeline.study.reading import read_study
from pipeline.study.results import table, write_results
from pipeline.study.running import make_jobs
from tests.toy import REPOSITORY, make_toy, run

GOOD: dict[str, Any] = {
    "question": "Which?",
    "stages": ["evaluation@masked"],
    "result": "evaluation/masked.json",
    "fixed": {"allocation.sparsity": 0.4},
    "vary": {"masking.method": ["magnitude", "wanda"], "allocation.method": ["uniform", "pals"]},
    "seeds": {"tokens.seed": [0, 1, 2]},
    "baseline": {"allocation.method": "uniform"},
}


def project(root: Path, **changes: Any) -> Path:
    """The real dvc.yaml and params.yaml with one study; a change to None leaves the key out."""
    for name in ("dvc.yaml", "params.yaml"):
        (root / name).write_text((REPOSITORY / name).read_text())
    (root / "studies").mkdir()
    plan = {key: value for key, value in {**GOOD, **changes}.items() if value is not None}
    YAML().dump(plan, root / "studies/one.yaml")
    return root


def test_cells_are_every_combination_with_every_seed(tmp_path: Path) -> None:
    study = read_study("one", project(tmp_path))
    assert len(study.cells) == 2 * 2 * 3
    first, last = study.cells[0], study.cells[-1]
    assert first.name == "magnitude-uniform-seed0"
    assert last.settings == {"allocation.sparsity": 0.4, "masking.method": "wanda", "allocation.method": "pals", "tokens.seed": 2}
    assert study.baseline_of(last) == {"masking.method": "wanda", "allocation.method": "uniform"}
    assert study.baseline_of(first) is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"colour": 1}, ("one.yaml", "colour", "allowed", "question")),
        ({"least": ["other"], "curve": True}, ("one.yaml", "least: other is not drawn")),
        ({"least": ["perplexity"]}, ("one.yaml", "least: perplexity is not drawn")),
        ({"question": None}, ("question", "missing")),
        ({"stages": ["evaluate"]}, ("stages", "'evaluate'", "evaluation@masked")),
        ({"result": "evaluation/dense.json"}, ("result", "evaluation@dense")),
        ({"vary": {"masking.method": []}, "baseline": None}, ("vary.masking.method", "empty")),
        ({"seeds": {"tokens.seed": []}}, ("seeds.tokens.seed", "empty")),
        ({"vary": None, "baseline": None}, ("vary and cells", "empty")),
        ({"vary": {"masking.metod": ["wanda"]}, "baseline": None}, ("masking.metod", "unknown key", "did you mean method")),
        ({"vary": {"masking": ["wanda"]}, "baseline": None}, ("'masking'", "section")),
        ({"vary": {"masking.method": ["wando"]}, "baseline": None}, ("wando", "magnitude")),
        ({"vary": {"masking.method": ["wanda", "wanda"]}, "baseline": None}, ("the same",)),
        ({"measures": ["perplexity", "error"]}, ("one.yaml", "measures, show", "'error'")),
        ({"measures": ["perplexity", "perplexity"]}, ("measures, show", "'perplexity'", "twice")),
        ({"show": {"masking.method": "evaluation/masked.json"}}, ("measures, show", "'masking.method'")),
        ({"baseline": {"ghost.method": "none"}}, ("baseline.ghost.method", "not varied")),
        ({"baseline": {"masking.method": "sparsegpt"}}, ("baseline.masking.method = 'sparsegpt'", "no cell has that value")),
        ({"vary": {"allocation.sparsity": [0, 0.0]}, "baseline": None, "fixed": None}, ("the same",)),
        ({"seeds": {"tokens.seed": [0], "evaluation.seed": [0, 1]}}, ("seeds", "tokens.seed has 1", "evaluation.seed has 2")),
        ({"fixed": {"masking.method": "wanda"}}, ("masking.method", "twice")),
        ({"seeds": {"tokens.seed": ["a"]}}, ("seeds.tokens.seed", "integer")),
        (
            {"fixed": {"sensitivity.method": "none"}, "vary": {"allocation.method": ["measured"]}, "baseline": None},
            ("cell measured", "sensitivity.method"),
        ),
        ({"show": {"removed": "no.json"}}, ("show.removed", "data/no.json", "evaluation/masked.json (evaluation@masked)")),
        (
            {"show": {"perplexity": "evaluation/dense.json"}},
            ("show.perplexity", "none of the stages that run", "add 'evaluation"),
        ),
        ({"result": "masks.csv"}, ("result", "JSON file data/masks.csv", "name one that they write: evaluation/masked.json")),
        ({"vary": {"ghost.method": ["none"]}, "baseline": None}, ("vary.ghost.method", "evaluation@masked", "do: ghost, report")),
        ({"cells": [{"removal.count": 1}]}, ("cells.removal.count", "reads 'removal'", "change nothing")),
        (
            {"vary": {"allocation.pals.slope": [0.1, 0.2]}, "baseline": None},
            ("allocation.pals.slope", "allocation.method is uniform"),
        ),
        (
            {"vary": {"masking.sparsegpt.block": [64, 32]}, "baseline": None},
            ("masking.sparsegpt.block", "masking.method is wanda"),
        ),
        ({"seeds": {"allocation.random.seed": [0, 1]}}, ("allocation.random.seed", "nothing reads it in any cell")),
        (
            {"fixed": {"tokens.sampling": "first"}, "seeds": {"tokens.seed": [0, 1], "allocation.random.seed": [0, 1]}},
            ("seeds.tokens.seed, allocation.random.seed", "tokens.sampling is first"),
        ),
        ({"seeds": {"yes.seed": [0, 1]}}, ("seeds.yes.seed", "reads 'yes'", "stages that do: yes, report")),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], says: tuple[str, ...]) -> None:
    project(tmp_path, **changes)
    with pytest.raises(PalimpsestError) as error:
        read_study("one", tmp_path)
    for word in says:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "one.yaml: empty; a study needs question"),
        ("# nothing yet\n", "one.yaml: empty"),
        ("- question\n", "one.yaml: a mapping of keys is expected, found list"),
        ("question: q\nstages: [model]\nquestion: r\n", "one.yaml, line 3: 'question' stands twice"),
        ("question: q\nvary:\n  a.b: [1]\n  a.b: [2]\n", "one.yaml, line 4: 'a.b' stands twice"),
        ("question: q\nstages: [model\nresult: r\n", "one.yaml, line 3: not valid YAML"),
    ],
)
def test_a_file_that_is_no_study_is_named_in_one_sentence(tmp_path: Path, text: str, says: str) -> None:
    project(tmp_path)
    (tmp_path / "studies/one.yaml").write_text(text)
    with pytest.raises(PalimpsestError) as error:
        read_study("one", tmp_path)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_the_study_of_the_guide_can_be_run(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(question.*?)```", (REPOSITORY / "docs/evaluate.md").read_text(), re.DOTALL)
    project(tmp_path)
    (tmp_path / "studies/one.yaml").write_text(text)
    study = read_study("one", tmp_path)
    assert len(study.cells) == 6 and study.baseline_of(study.cells[-1]) == {"masking.method": "magnitude"}


def test_a_key_that_no_stage_reads_may_be_fixed(tmp_path: Path) -> None:
    """So that one that is checked with others can be set."""
    assert read_study("one", project(tmp_path, fixed={"removal.count": 2})).cells


def test_an_unknown_study_names_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(PalimpsestError, match=r"two\.yaml: no such study; there are: one"):
        read_study("two", project(tmp_path))


@pytest.mark.parametrize("name", sorted(path.stem for path in (REPOSITORY / "studies").glob("*.yaml")))
def test_the_studies_that_come_along_can_be_run(name: str) -> None:
    study = read_study(name, REPOSITORY)
    assert study.plan.curve or any(study.baseline_of(cell) for cell in study.cells)


def test_values_that_read_alike_get_names_of_their_own(tmp_path: Path) -> None:
    asked = {"stages": ["evaluation@removed"], "result": "evaluation/removed.json", "baseline": None, "seeds": None}
    root = project(
        tmp_path,
        vary={"removal.blocks": [[1, 2], [12]]},
        cells=[{"removal.blocks": [1, -2]}],
        fixed={"removal.method": "list"},
        **asked,
    )
    assert len({cell.name for cell in read_study("one", root).cells}) == 3


def test_merged_leaves_the_original_alone() -> None:
    params = {"a": {"b": {"c": 1}, "d": 2}}
    assert merged(params, {"a.b.c": 5, "e.f": 6}) == {"a": {"b": {"c": 5}, "d": 2}, "e": {"f": 6}}
    assert params == {"a": {"b": {"c": 1}, "d": 2}}


@pytest.mark.parametrize(
    "value",
    [
        "C:\\x\\",
        "a'b",
        "a\\'b",
        "x\\y",
        "${x}",
        "\\${x}",
        "a\\\\${x}'b",
        "",
        'a"b',
        "a,b",
        "é",
        1.5,
        True,
        None,
        [],
        [[1], "two"],
        {"boolq": "b.jsonl"},
        {"a-b.c": [1]},
        {"a": [{"b": "x:y"}]},
    ],
)
def test_dvc_sets_the_very_value_of_a_cell(value: Any, tmp_path: Path) -> None:
    from dvc.utils.hydra import apply_overrides

    for former in ({"old": 1}, {}) if isinstance(value, dict) else (None, "old"):
        path = tmp_path / "params.yaml"
        YAML().dump({"section": {"key": former, "other": 3}}, path)
        apply_overrides(path, overrides("section.key", value))
        assert YAML(typ="safe").load(path) == {"section": {"key": value, "other": 3}}


@pytest.mark.parametrize("name", ["a:b", "1", "true", "Null", "ä", "a,b", "", "a b", 1])
def test_names_that_dvc_would_read_as_something_else_are_refused(name: Any, tmp_path: Path) -> None:
    with pytest.raises(PalimpsestError, match=r"section\.key: .* as a name in a mapping cannot be handed to DVC"):
        overrides("section.key", [{"a": {name: 1}}])
    vary = {"zeroshot.files": [{"arc_easy": "x.jsonl", str(name): "y.jsonl"}]}
    with pytest.raises(PalimpsestError, match=r"one\.yaml: cell .*: zeroshot\.files: "):
        read_study("one", project(tmp_path, vary=vary, baseline=None))


def test_seeds_of_several_keys_go_together(tmp_path: Path) -> None:
    seeds = {"tokens.seed": [3, 4], "allocation.random.seed": [7, 8]}
    cells = read_study("one", project(tmp_path, seeds=seeds)).cells
    assert len(cells) == 4 * 2
    found = [(cell.seed, cell.settings["tokens.seed"], cell.settings["allocation.random.seed"]) for cell in cells]
    assert set(found) == {(3, 3, 7), (4, 4, 8)}


def test_a_cell_waits_for_the_first_that_shares_a_stage_and_no_other(tmp_path: Path) -> None:
    study, graph = read_study("one", project(tmp_path)), read_graph(REPOSITORY / "dvc.yaml")
    index = {cell.name: number for number, cell in enumerate(study.cells)}
    found = {cell.name: waits(study, graph)[index[cell.name]] - {COMMON} for cell in study.cells}
    assert common_stages(study, graph) == ["training", "model"] and common_settings(study, graph) == {}
    assert all(COMMON in needed for needed in waits(study, graph).values())
    assert found["magnitude-uniform-seed0"] == set()
    assert found["magnitude-pals-seed0"] == {index["magnitude-uniform-seed0"]}  # tokens to sensitivity
    assert found["wanda-pals-seed0"] == {index["magnitude-uniform-seed0"], index["magnitude-pals-seed0"]}  # and pals itself
    assert found["magnitude-uniform-seed1"] == set()


def test_cells_start_when_what_they_wait_for_has_ended_and_the_rest_goes_on() -> None:
    """Six jobs on two threads: 1 and 2 wait for 0, 4 for 3, which fails."""
    needs: dict[int, set[int]] = {0: {COMMON}, 1: {COMMON, 0}, 2: {COMMON, 0}, 3: {COMMON}, 4: {COMMON, 3}, 5: {COMMON}}
    jobs: Any = {index: f"job {index}" for index in [COMMON, *needs]}
    ended: list[int] = []

    def start(job: Any, after: Any) -> Any:
        index = int(job.split()[1])
        assert needs.get(index, set()) <= set(ended) and len(list(after)) == len(needs.get(index, ()))
        return pool.submit(lambda: f"{index} failed" if index == 3 else "")

    with ThreadPoolExecutor(2) as pool:
        finish: Any = lambda handle, job: Outcome(job, None if handle.result() else {}, handle.result())  # noqa: E731
        run_in_order(jobs, needs, start, finish, lambda index, _: ended.append(index))
    assert sorted(ended) == [COMMON, *needs]


def test_when_the_common_stages_fail_no_cell_is_tried() -> None:
    plan = Plan(question="q", stages=["s"], result="r")
    cells = {COMMON: Cell("common stages", {}, {}, None), 0: Cell("a", {}, {}, None)}
    jobs = {index: Job(cell.name, cell, plan, Path(), None) for index, cell in cells.items()}
    noted: dict[int, Outcome] = {}
    started: list[Any] = []

    def start(job: Any, after: Any) -> Any:
        started.append(job)
        return pool.submit(lambda: None)

    with ThreadPoolExecutor(1) as pool:
        finish: Any = lambda _, job: Outcome(job.cell, None, "model: gone")  # noqa: E731
        run_in_order(jobs, {0: {COMMON}}, start, finish, noted.__setitem__)
    assert started == [jobs[COMMON]] and noted[0].cell.name == "a" and noted[0].error == "model: gone"


def test_a_relative_path_still_means_the_projects_own(tmp_path: Path) -> None:
    """Set by the cell or in params.yaml; what is no path, lies in data/ or names a method stays as it is."""
    root = project(tmp_path)
    for folder in ("ckpt/step0", "demo", "data/own", "main"):
        (root / folder).mkdir(parents=True)
    (root / "data/corpus").mkdir()
    for file in ("text/a.txt", "data/corpus/b.txt", "b.txt"):
        (root / file).parent.mkdir(exist_ok=True)
        (root / file).write_text("text")
    files = ["text/a.txt", "b.txt", "/nowhere/c.txt", "missing.txt"]
    settings = {"model.source": "demo", "model.path": "ckpt/step0", "tokens.calibration_files": files, "removal.count": 2}
    found = from_anywhere(settings, root)
    assert found["model.path"] == str(root / "ckpt/step0") and found["model.source"] == "demo"
    assert found["tokens.calibration_files"] == [str(root / "text/a.txt"), *files[1:]]
    assert settings["model.path"] == "ckpt/step0", "what the study's files say stays free of this machine"
    assert from_anywhere({"model.path": "data/own"}, root)["model.path"] == "data/own"
    text = (root / "params.yaml").read_text()
    (root / "params.yaml").write_text(text.replace("model:\n", "model:\n  path: ckpt/step0\n") if "  path:" not in text
                                      else re.sub(r"(\n  path:) \S+", r"\1 ckpt/step0", text, count=1))  # fmt: skip
    assert from_anywhere({}, root)["model.path"] == str(root / "ckpt/step0"), "said in params.yaml itself"


def test_archives_fetched_once_come_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell's stages run in a folder of their own, and would fetch the demo's text for each model anew."""
    asked: list[str] = []
    monkeypatch.setattr(reproduce, "_follow", lambda arguments, *_: asked.extend(arguments) or {})
    reproduce.experiment("one", {}, ["tokens"], root=tmp_path)
    assert not any("demo" in word for word in asked)
    (tmp_path / "data/demo").mkdir(parents=True)
    reproduce.experiment("one", {}, ["tokens"], root=tmp_path)
    assert "--copy-paths=data/demo" in asked


def outcome(varied: dict[str, Any], seed: int | None, windows: list[float], corpus: str = "c") -> Outcome:
    cell = Cell(f"{varied}-{seed}", varied, varied, seed)
    value = float(np.exp(np.mean(windows)))
    return Outcome(
        cell, {"perplexity": value, "interval": [value - 1, value + 1], "windows": windows, "contract": {"corpus": corpus}}
    )


def study_of(outcomes: list[Outcome]) -> Study:
    plan = Plan(question="q", stages=["s"], result="r", baseline={"m": "a"}, vary={"m": ["a", "b", "c"]})
    return Study("one", plan, tuple(one.cell for one in outcomes))


def test_differences_are_paired_by_window_and_tested_over_seeds() -> None:
    rng = np.random.default_rng(0)
    base = rng.normal(3, 0.5, (5, 8))
    other, third = base + rng.normal(0.1, 0.05, (5, 8)), base + rng.normal(0.0, 0.05, (5, 8))
    rows = [("a", base), ("b", other), ("c", third)]
    outcomes = [outcome({"m": name}, seed, list(values[seed])) for name, values in rows for seed in range(5)]
    first, second, last = compare(study_of(outcomes), outcomes)
    assert first.difference is None and first.n == 5
    assert second.difference == pytest.approx((other - base).mean())
    assert second.difference_low is not None and second.difference_low > 0  # every window is worse by about 0.1
    p = [float(stats.ttest_rel(one.mean(1), base.mean(1))[1]) for one in (other, third)]  # type: ignore[arg-type]
    assert p[0] < p[1], "the test below expects this order"
    assert second.t_test == pytest.approx(min(1, 2 * p[0])) and last.t_test == pytest.approx(max(min(1, 2 * p[0]), p[1]))
    w = [float(stats.wilcoxon(one.mean(1), base.mean(1)).pvalue) for one in (other, third)]  # type: ignore[attr-defined]
    assert w[0] < w[1] and second.wilcoxon == pytest.approx(2 * w[0]) and last.wilcoxon == pytest.approx(max(2 * w[0], w[1]))
    d = (third - base).mean(1)
    assert last.effect == pytest.approx(d.mean() / np.sqrt(((d - d.mean()) ** 2).sum() / 4))
    text = table(study_of(outcomes), outcomes, [first, second, last])
    assert "5 seeds cannot give less than p = 0.12 by Wilcoxon, corrected for 2 settings" in text


def test_windows_count_by_the_tokens_scored_in_them() -> None:
    losses, scored = {"a": [3.0, 3.0, 3.0], "b": [2.9, 3.0, 4.0]}, [500, 250, 2]
    outcomes = [outcome({"m": name}, None, windows) for name, windows in losses.items()]
    for one in outcomes:
        assert isinstance(one.result, dict)
        one.result["scored"] = scored
    found = compare(study_of(outcomes), outcomes)[1]
    assert found.difference == pytest.approx((-0.1 * 500 + 1.0 * 2) / 752) and (found.difference or 0) < 0


def test_seeds_that_change_nothing_prove_nothing() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        base = rng.normal(3, 0.5, 8)
        rows = [("a", base), ("b", base + rng.normal(0.1, 0.05, 8))]
        outcomes = [outcome({"m": name}, seed, list(values)) for name, values in rows for seed in range(3)]
        found = compare(study_of(outcomes), outcomes)[1]
        assert (found.t_test, found.wilcoxon, found.effect) == (None, None, None)
        assert "its seeds gave the same result" in found.note


def test_cells_do_not_read_params_while_others_run(tmp_path: Path) -> None:
    """`dvc exp run` has one cell's values in params.yaml for an instant: all is read before the first."""
    root = project(tmp_path)
    jobs = make_jobs(read_study("one", root), read_graph(root / "dvc.yaml"), root, None)
    (root / "params.yaml").write_text("")
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.study.cells.experiment", lambda name, settings, *_, **__: said.append(settings) or {})
        patch.setattr("pipeline.study.cells.read_result", lambda *_: {})
        patch.setattr("pipeline.study.cells._read", lambda *_: {})
        assert not [answer.error for answer in map(run_cell, jobs.values()) if answer.error]
    assert len(said) == len(jobs)


def test_unlike_contracts_are_never_subtracted() -> None:
    outcomes = [outcome({"m": "a"}, None, [3.0, 3.1]), outcome({"m": "b"}, None, [3.0, 3.2], corpus="other")]
    compared = compare(study_of(outcomes), outcomes)[1]
    assert compared.difference is None and "without a baseline measured alike" in compared.note


def test_unlike_contracts_are_in_tables_and_pictures_of_their_own(tmp_path: Path) -> None:
    places = [("a", "x"), ("b", "y"), ("c", "x")]
    outcomes = [outcome({"m": name}, None, [3.0, 3.2], corpus=corpus) for name, corpus in places]
    compared = compare(study_of(outcomes), outcomes)
    text = table(study_of(outcomes), outcomes, compared)
    first, second = text.split("Contract: corpus x.")
    assert "NOT all measured alike" in first and [line[0] for line in first.splitlines()[2:4]] == ["a", "c"]
    assert second.splitlines()[2].startswith("m") and second.splitlines()[3].startswith("b")
    assert "Contract: corpus y." in second
    drawn = page(study_of(outcomes), outcomes, compared)
    assert drawn.count("<table>") == 2 and drawn.count('class="title"') == 3 and 'role="alert"' in drawn
    write_results(study_of(outcomes), outcomes, compared, tmp_path)
    words = pd.read_csv(tmp_path / "data/studies/one.csv").contract.tolist()
    assert words[0] == words[2] != words[1]


def test_seeds_of_unlike_contracts_have_no_mean() -> None:
    outcomes = [outcome({"m": "a"}, seed, [3.0, 3.1], corpus=f"corpus {seed}") for seed in (0, 1)]
    (compared,) = compare(study_of(outcomes), outcomes)
    assert compared.values == {} and "its seeds were not measured alike: no mean" in compared.note


TASKS = {
    "arc.easy": {"accuracy": 0.5, "contract": {"task": "arc.easy", "shots": 0}},
    "piqa": {"accuracy": 0.25, "contract": {"task": "piqa", "shots": 0}},
}


def read_toy(monkeypatch: pytest.MonkeyPatch, found: dict[str, Any], *measures: str) -> Any:
    monkeypatch.setattr("pipeline.study.cells._read", lambda *_: found)
    plan = Plan(question="q", stages=["s"], result="zeroshot/masked.json", measures=list(measures))
    return read_result("one", plan, Path())


def test_a_measure_may_be_an_inner_value_with_the_contract_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"variant": "masked", "tasks": TASKS}
    result = read_toy(monkeypatch, found, "tasks.piqa.accuracy")
    assert result["tasks.piqa.accuracy"] == 0.25 and result["contract"] == TASKS["piqa"]["contract"]
    result = read_toy(monkeypatch, found, "tasks.piqa.accuracy", "tasks.arc.easy.accuracy")
    assert result["tasks.arc.easy.accuracy"] == 0.5, "a key with a dot in it"
    names = {"task of tasks.arc.easy": "arc.easy", "task of tasks.piqa": "piqa"}
    assert result["contract"] == {"shots": 0, **names}
    result = read_toy(monkeypatch, {"perplexity": 2.0, "contract": {"corpus": "c"}, "tasks": TASKS}, "perplexity")
    assert result["contract"] == {"corpus": "c"}


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("accuracy", "no 'accuracy'; it has variant, tasks"),
        ("tasks.arc_easy.accuracy", "no 'tasks.arc_easy.accuracy'; did you mean arc.easy? tasks has arc.easy, piqa"),
        ("tasks.piqa.acc", "no 'tasks.piqa.acc'; tasks.piqa has accuracy, contract"),
        ("tasks.piqa.accuracy.low", "no 'tasks.piqa.accuracy.low': tasks.piqa.accuracy is 0.25, which has nothing below it"),
        ("tasks.piqa", "'tasks.piqa' is no number there"),
    ],
)
def test_a_path_that_leads_nowhere_says_what_is_there(monkeypatch: pytest.MonkeyPatch, path: str, says: str) -> None:
    with pytest.raises(PalimpsestError) as error:
        read_toy(monkeypatch, {"variant": "masked", "tasks": TASKS}, path)
    assert says in str(error.value) and "data/zeroshot/masked.json" in str(error.value)


def test_a_result_without_windows_is_compared_by_its_first_measure_over_seeds() -> None:
    values = {"a": [0.5, 0.6, 0.4], "b": [0.4, 0.45, 0.31]}
    outcomes = [
        Outcome(Cell(f"{name}{seed}", {"m": name}, {"m": name}, seed), {"x.accuracy": value, "contract": {"shots": 0}})
        for name, several in values.items()
        for seed, value in enumerate(several)
    ]
    plan = Plan(question="q", stages=["s"], result="r", measures=["x.accuracy"], baseline={"m": "a"}, vary={"m": ["a", "b"]})
    study = Study("one", plan, tuple(one.cell for one in outcomes))
    compared = compare(study, outcomes)
    first, second = compared
    assert first.difference is None and second.difference == pytest.approx((-0.1 - 0.15 - 0.09) / 3)
    assert second.difference_low is None and second.windows_worse is None
    assert second.t_test == pytest.approx(stats.ttest_rel(values["b"], values["a"]).pvalue)  # type: ignore[attr-defined]
    text = table(study, outcomes, compared)
    assert "Difference: x.accuracy less that of m = a, paired by seed." in text and "nats" not in text
    drawn = page(study, outcomes, compared)
    assert drawn.count("<svg") == 1 and "x.accuracy" in drawn and "Contract: shots 0." in drawn
    unlike = [*outcomes[:3], *(replace(one, result={**(one.result or {}), "contract": {"shots": 1}}) for one in outcomes[3:])]
    assert "without a baseline measured alike" in compare(study, unlike)[1].note


def test_a_curve_draws_every_measure_and_needs_no_windows() -> None:
    plan = Plan(question="q", stages=["s"], result="r", measures=["gap", "ratio"], curve=True, vary={"m": ["early", "late"]})
    cells = [Cell(name, {"m": name}, {"m": name}, None) for name in ("early", "late")]
    outcomes = [Outcome(cell, {"gap": gap, "ratio": 0.5}) for cell, gap in zip(cells, (0.1, 0.4), strict=True)]
    study = Study("one", plan, tuple(cells))
    compared = compare(study, outcomes)
    assert [one.values for one in compared] == [{"gap": 0.1, "ratio": 0.5}, {"gap": 0.4, "ratio": 0.5}]
    assert "early  0.1000  0.5000" in table(study, outcomes, compared)
    drawn = page(study, outcomes, compared)
    assert drawn.count('<path class="line ') - drawn.count('h14"') == 2 and "early: gap 0.1" in drawn


def test_a_curve_has_a_hole_where_a_cell_failed() -> None:
    plan = Plan(question="q", stages=["s"], result="r", measures=["gap"], curve=True, vary={"m": ["a1", "b2", "c3", "d4"]})
    cells = [Cell(name, {"m": name}, {"m": name}, None) for name in plan.vary["m"]]
    outcomes = [Outcome(cell, {"gap": 0.5}) if cell.name != "b2" else Outcome(cell, None, "model: gone") for cell in cells]
    study = Study("one", plan, tuple(cells))
    drawn = page(study, outcomes, compare(study, outcomes))
    (line,) = re.findall(r'<path class="line blue" d="([^"]+)"', drawn)
    assert line.count("M") == 2 and line.count("L") == 1, "a alone, then c to d"
    assert all(f">{name}</text>" in drawn for name in plan.vary["m"])


def test_a_curve_has_a_panel_for_each_setting_of_the_other_keys_and_a_line_for_the_least_so_far() -> None:
    vary = {"kind": ["full", "low"], "epoch": [1, 2, 3]}
    plan = Plan(question="q", stages=["s"], result="r", measures=["loss", "bound"], least=["bound"], curve=True, vary=vary)
    cells = [Cell(f"{kind}-{epoch}", {}, {"kind": kind, "epoch": epoch}, None) for kind in vary["kind"] for epoch in (1, 2, 3)]
    outcomes = [
        Outcome(cell, {"loss": 9.0, "bound": bound}) for cell, bound in zip(cells, (7, 8, 6, 7, 8, 8), strict=True) if bound
    ]
    study = Study("one", plan, tuple(cells))
    drawn = page(study, outcomes, compare(study, outcomes))
    assert drawn.count("Along epoch: full") == drawn.count("Along epoch: low") == 1
    places = [re.findall(r"[ML]([\d.]+) ([\d.]+)", path) for path in re.findall(r'class="line rust dashed" d="([^"]+)"', drawn)]
    assert len(places) == 2
    heights = [[float(y) for _, y in one] for one in places]
    assert heights[0][0] == heights[0][1] < heights[0][2] and heights[1] == [heights[0][0]] * 3, "7 7 6 and 7 7 7, downward"
    assert 'text-anchor="end">0</text>' not in drawn, "no zero where values are far from it"


def test_what_the_plan_shows_is_a_column() -> None:
    plan = Plan(question="q", stages=["s"], result="r", vary={"m": ["a", "b"]}, show={"removed": "removal.json"})
    made = [(name, seed, [seed, 3] if name == "b" else [7]) for name in ("a", "b") for seed in (0, 1)]
    outcomes = [
        Outcome(Cell(f"{name}{seed}", {"m": name}, {"m": name}, seed), {"perplexity": 2.0}, shown={"removed": removed})
        for name, seed, removed in made
    ]
    study = Study("one", plan, tuple(one.cell for one in outcomes))
    text = table(study, outcomes, compare(study, outcomes)).splitlines()
    assert text[0].split()[-1] == "removed" and text[1].endswith("  7") and text[2].endswith("  0 3 / 1 3")


def test_a_failed_cell_is_a_row_that_says_why() -> None:
    outcomes = [
        outcome({"m": "a"}, None, [3.0, 3.1]),
        Outcome(Cell("b", {"m": "b"}, {"m": "b"}, None), None, "masking: too small"),
    ]
    text = table(study_of(outcomes), outcomes, compare(study_of(outcomes), outcomes))
    assert "1 of 1 failed: masking: too small" in text


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy project with two studies, in git."""
    root = make_toy(tmp_path_factory.mktemp("study"))
    (root / "studies").mkdir()
    vary = {"masking.method": ["wanda", "magnitude"]}
    plan = {key: value for key, value in GOOD.items() if key != "seeds"} | {"vary": vary, "baseline": {"masking.method": "wanda"}}
    plan["show"] = {"word": "evaluation/masked.json"}
    YAML().dump(plan, root / "studies/one.yaml")
    (root / "data/corpus/mine.txt").write_text("text\n")
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    for command in (["add", "."], [*identity, "commit", "--quiet", "-m", "start"]):
        subprocess.run(["git", *command], cwd=root, check=True)
    return root


def test_a_study_runs_shared_stages_once_and_again_finds_everything(toy: Path) -> None:
    before = (toy / "params.yaml").read_bytes()
    first = run(toy, "pipeline", "study", "one", "--workers", "2")
    assert first.returncode == 0, first.stdout + first.stderr
    lines = [line for line in first.stdout.splitlines() if line.startswith("[")]
    assert "common stages (ran training, model, tokens, capture, statistics" in first.stdout
    assert all("(ran masking, evaluation@masked)" in line for line in lines)
    table = pd.read_csv(toy / "data/studies/one.csv")
    assert list(table.cell) == ["wanda", "magnitude"] and table.perplexity[0] != table.perplexity[1]
    summary = json.loads((toy / "data/studies/one.json").read_text())
    assert [one["difference"] is None for one in summary["comparison"]] == [True, False]
    shown = run(toy, "dvc", "exp", "list", "--name-only").stdout.split()
    assert set(shown) == {f"one-{cell}" for cell in table.cell} | {"one-common-stages"}
    assert (toy / "params.yaml").read_bytes() == before
    page = (toy / "data/studies/one.html").read_text()
    assert page.count("<svg") == 2 and "magnitude" in page and "corpus toy" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")

    assert table.word.nunique() == 2 and set(table.word.str.len()) == {64}

    again = run(toy, "pipeline", "study", "one", TOY_FAILS="masking")  # would fail if anything ran again
    assert again.returncode == 0 and again.stdout.count("all from the cache") == 3
    assert (toy / "data/studies/one.csv").read_text() == table.to_csv(index=False, lineterminator="\n")


def test_a_study_in_which_every_cell_fails_fails(toy: Path) -> None:
    plan = {key: value for key, value in GOOD.items() if key not in ("seeds", "baseline")}
    YAML().dump(plan | {"vary": {"masking.method": ["sparsegpt"]}}, toy / "studies/two.yaml")
    done = run(toy, "pipeline", "study", "two", TOY_FAILS="masking")
    assert done.returncode == 1 and "Every cell failed (1 of 1)" in done.stderr and "no column 'y'" in done.stderr
    assert pd.read_csv(toy / "data/studies/two.csv").error[0].startswith("masking")

"""Stage `zeroshot`: the same numbers as lm-eval's own model, for every variant; and every way a task can be wrong."""

from __future__ import annotations

import json
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pyarrow import parquet, table
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.errors import PalimpsestError
from pipeline.params import ParamsError, check_sections
from stages.zeroshot import Zeroshot, definitions, measure
from stages.zeroshot.packaged import PACKAGED
from tests.plain import plain_variant, read_masks
from tests.project import Project
from tests.stages.conftest import Finished
from tests.vocabulary import save_tokenizer

CHOOSE = """\
task: choose
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: "{{right}}"
doc_to_choice: "{{answers}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
metadata: {version: 3}
"""
GO_ON = """\
task: go_on
output_type: loglikelihood
doc_to_text: "{{question}}"
doc_to_target: " {{last}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
WORDS = re.findall(r"\w+", "the cat sat on a mat while seven dogs ran over one hill and then all was well")
VARIANTS = ("dense", "masked", "removed", "compressed")


def rows(count: int = 9, seed: int = 0) -> list[dict[str, Any]]:
    """Questions of several lengths; some with answers of one token, which share what the model reads."""
    draw = np.random.default_rng(seed)
    made = []
    for index in range(count):
        question = " ".join(draw.choice(WORDS, 2 + index % 4))
        answers = [str(one) for one in (draw.choice(list("abcdef"), 3, replace=False) if index % 3 else draw.choice(WORDS, 3))]
        made.append({"question": question, "answers": answers, "right": index % 3, "last": answers[0]})
    return made


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here may open a connection."""

    def refuse(*_: Any) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def few_definitions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Two definitions of our own, beside few of lm-eval's: looking through all of them takes seconds."""
    monkeypatch.setattr(definitions, "BUILT_IN", definitions.BUILT_IN / "arc")
    folder = tmp_path / "definitions"
    folder.mkdir()
    (folder / "choose.yaml").write_text(CHOOSE)
    (folder / "go_on.yaml").write_text(GO_ON)
    yield folder


def prepare(project: Project, folder: Path, data: list[dict[str, Any]] | None = None) -> None:
    """Tokenizer, examples, and the section of params.yaml."""
    for model in ("model", "compressed"):
        save_tokenizer(project.data / model)
    (project.data / "tasks").mkdir(exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in data or rows())
    (project.data / "tasks/rows.jsonl").write_text(lines)
    project.params["zeroshot"] = {
        "tasks": ["choose", "go_on"], "source": "files", "files": {"choose": "rows.jsonl", "go_on": "rows.jsonl"},
        "definitions": str(folder),
    }  # fmt: skip


def run(project: Project, variant: str = "dense", **keys: Any) -> tuple[dict[str, Any], pd.DataFrame]:
    path = project.run(f"zeroshot@{variant}", zeroshot=keys)
    return json.loads(path.read_text())["tasks"], pd.read_csv(path.with_suffix(".csv"), keep_default_na=False)


def by_harness(project: Project, model: Any, shots: int = 0) -> dict[str, Any]:
    """The same tasks through lm-eval's own class for models of transformers."""
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM

    from stages.zeroshot.tasks import load_tasks

    wanted = Zeroshot(**{**project.params["zeroshot"], "shots": shots})
    tasks = {task.name: task.harness for task in load_tasks(wanted, project.data)}
    theirs: Any = HFLM
    asked: Any = {"tasks": tasks}
    tokenizer = AutoTokenizer.from_pretrained(project.data / "model")
    found = evaluate(theirs(pretrained=model, tokenizer=tokenizer, batch_size=4), asked, bootstrap_iters=100)
    assert found is not None
    return dict(found)


def plain(project: Project, variant: str) -> Any:
    if variant == "compressed":
        return AutoModelForCausalLM.from_pretrained(project.data / "compressed", trust_remote_code=True, dtype="float32").eval()
    masks = read_masks(project.data / "masks.safetensors", project.model) if variant == "masked" else None
    return plain_variant(project.model, masks=masks, removed=[1, 2] if variant == "removed" else [])


@pytest.mark.parametrize(
    ("family", "variant", "shots"),
    [*(("llama", variant, 0) for variant in VARIANTS), ("gpt2", "masked", 2), ("gemma2", "compressed", 1)],
)
def test_the_numbers_of_lm_evals_own_model(
    family: str, variant: str, shots: int, copied: Finished, few_definitions: Path
) -> None:
    project = copied(family)
    prepare(project, few_definitions)
    tasks, examples = run(project, variant, shots=shots, batch_size=3)
    expected = by_harness(project, plain(project, variant), shots)
    for task in ("choose", "go_on"):
        mine = examples[examples.task == task]
        theirs = expected["samples"][task]
        assert len(mine) == len(theirs) == 9
        for (_, row), sample in zip(mine.iterrows(), theirs, strict=True):
            likely = [one for one, _ in sample["filtered_resps"]]
            np.testing.assert_allclose([float(one) for one in str(row.loglikelihoods).split()], likely, rtol=1e-4)
            assert row.correct == sample["acc"]
            assert row.correct_normalised == (str(int(sample["acc_norm"])) if "acc_norm" in sample else "")
        result = expected["results"][task]
        assert tasks[task]["accuracy"] == pytest.approx(result["acc,none"])
        assert tasks[task]["error"] == pytest.approx(result["acc_stderr,none"])
    assert tasks["choose"]["normalised"] == pytest.approx(expected["results"]["choose"]["acc_norm,none"])
    assert tasks["choose"]["normalised_error"] == pytest.approx(expected["results"]["choose"]["acc_norm_stderr,none"])
    assert "normalised" not in tasks["go_on"]


def test_what_a_number_is_quoted_with(copied: Finished, few_definitions: Path) -> None:
    project = copied("llama")
    prepare(project, few_definitions)
    contract = run(project, limit=5)[0]["choose"]["contract"]
    assert contract["definition"].startswith("3 (") and contract["harness"].startswith("lm-eval 0.")
    assert {key: contract[key] for key in ("task", "data", "examples", "shots", "special_tokens", "max_length", "dtype")} == {
        "task": "choose", "data": "rows.jsonl", "examples": 5, "shots": 0, "special_tokens": "<s>", "max_length": 64,
        "dtype": "float32",
    }  # fmt: skip
    changed = rows()
    changed[3]["question"] += " now"
    prepare(project, few_definitions, changed)
    assert run(project, limit=5)[0]["choose"]["contract"]["examples_sha256"] != contract["examples_sha256"]
    assert run(project, limit=3)[0]["choose"]["examples"] == 3


def test_long_questions_lose_their_beginning(copied: Finished, few_definitions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    project = copied("gpt2")  # 64 positions and no more
    data = rows(4)
    data[1]["question"] = " ".join(WORDS * 2)
    prepare(project, few_definitions, data)
    _, examples = run(project)
    theirs = by_harness(project, project.model)["samples"]["choose"]
    likely = [one for one, _ in theirs[1]["filtered_resps"]]
    np.testing.assert_allclose([float(one) for one in str(examples.loglikelihoods[1]).split()], likely, rtol=1e-4)
    assert "choose: 3 answers are judged behind a context cut at its beginning" in capsys.readouterr().out


def test_without_tasks_nothing_is_loaded(tmp_path: Path) -> None:
    """No model, no lm-eval: the folder has no weights at all."""
    project = Project(tmp_path, "llama", blocks=1)
    (project.data / "model/model.safetensors").unlink()
    before = set(sys.modules)
    tasks, examples = run(project)
    assert tasks == {} and list(examples.columns)[:2] == ["task", "example"] and not len(examples)
    assert not [name for name in set(sys.modules) - before if name.startswith("lm_eval")]


def test_a_killed_run_goes_on(copied: Finished, few_definitions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = copied("llama")
    prepare(project, few_definitions)
    whole = run(project)
    measured: list[str] = []
    real = measure.Measurement.measure

    def killed_at(name: str) -> Any:
        def one(self: Any, task: Any, contract: Any) -> Any:
            measured.append(task.name)
            if task.name == name:
                raise KeyboardInterrupt
            return real(self, task, contract)

        return one

    monkeypatch.setattr(measure.Measurement, "measure", killed_at("go_on"))
    with pytest.raises(KeyboardInterrupt):
        run(project)
    for output in (project.data / "zeroshot").glob("dense.*"):
        output.unlink()  # as DVC does before it runs a stage
    monkeypatch.setattr(measure.Measurement, "measure", killed_at(""))
    again = run(project)
    assert measured == ["choose", "go_on", "go_on"]
    assert again[0] == whole[0] and again[1].equals(whole[1])
    assert not list((project.data / "zeroshot-kept").iterdir()), "forgotten when the variant is whole"

    with pytest.raises(KeyboardInterrupt):
        monkeypatch.setattr(measure.Measurement, "measure", killed_at("go_on"))
        run(project)
    project.run("masking", masking={"method": "magnitude"})
    monkeypatch.setattr(measure.Measurement, "measure", killed_at(""))
    measured.clear()
    run(project, limit=4)
    assert measured == ["choose", "go_on"], "what was measured under another contract is of no use"


def test_two_runs_give_equal_bytes(copied: Finished, few_definitions: Path) -> None:
    project = copied("llama")
    prepare(project, few_definitions)
    folder = project.data / "zeroshot"

    def written() -> list[bytes]:
        run(project, "masked", shots=1, seed=3)
        return [(folder / name).read_bytes() for name in ("masked.json", "masked.csv")]

    assert written() == written()
    run(project, "masked", seed=4)
    assert (folder / "masked.csv").read_bytes() != written()[1]


GENERATE = "task: generate\noutput_type: generate_until\ndoc_to_text: x\ndoc_to_target: y\n"
WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"tasks": ["choos"]}, "", r"zeroshot\.tasks: no task 'choos'; did you mean choose\?"),
    ({"tasks": ["generate"]}, "", r"'generate' is scored by generate_until"),
    ({"tasks": ["many"]}, "", r"'many' is a group of tasks; name its tasks"),
    ({"tasks": ["broken"]}, "", r"broken\.yaml: no definition of a task"),
    ({"tasks": ["rated"]}, "", r"'rated' has no accuracy \(acc\), only f1, brier_score"),
    ({"definitions": "nowhere"}, "", r"zeroshot\.definitions: no \.yaml file in"),
    ({"files": {"choose": "gone.jsonl"}}, "", r"zeroshot\.files\.choose: no file gone\.jsonl, neither in"),
    ({"files": {"choose": "rows.csv"}}, "x", r"only \.jsonl.*are read"),
    ({"files": {"choose": "rows.parquet"}}, "x", r"rows\.parquet: not a whole parquet file"),
    ({"files": {"choose": "rows.arrow"}}, "x", r"rows\.arrow: not a whole arrow file"),
    ({"files": {"choose": "rows.jsonl.gz"}}, "x", r"rows\.jsonl\.gz: cannot be read"),
    ({}, "{]\n", r"rows\.jsonl, line 1: not JSON"),
    ({}, "3\n", r"rows\.jsonl, line 1: expected an object"),
    ({}, "\n", r"rows\.jsonl: no examples in it"),
    (
        {},
        '{"question": "a"}\n',
        r"rows\.jsonl, line 1: not an example of task 'choose' \(.*\); mend or remove it",
    ),
    (
        {},
        '{"question": "q", "answers": ["a", "b"], "right": 0}\n{"question": "q", "right": 0}\n',
        r"rows\.jsonl, line 2: not an example of task 'choose' \(no 'answers'\); mend or remove it",
    ),
    (
        {},
        '{"question": 1}\n\n{"question": [2]}\n',
        r"line 3: not an example .*'question' is a list of a number, elsewhere a n",
    ),
    ({}, '{"question": "q"}\n{"question": "r"}\n', r"line 1: not an example .*; nor is the next one: are these the columns"),
    ({"shots": 9}, "", r"9 examples are too few for zeroshot\.shots = 9"),
    ({"source": "hub"}, "", r"no data for task 'choose' .*use local files"),
]


@pytest.mark.parametrize(("keys", "content", "message"), WRONG, ids=range(len(WRONG)))
def test_what_cannot_be_measured_is_named_before_any_work(
    keys: dict[str, Any], content: str, message: str, tmp_path: Path, few_definitions: Path
) -> None:
    project = Project(tmp_path / "project", "llama", blocks=1)
    prepare(project, few_definitions)
    (project.data / "model/model.safetensors").unlink()  # whoever touches the model finds nothing
    (few_definitions / "generate.yaml").write_text(GENERATE)
    (few_definitions / "many.yaml").write_text("group: many\ntask: [choose]\n")
    (few_definitions / "broken.yaml").write_text("task: broken\noutput_type: [\n")
    rated = (
        CHOOSE.replace("task: choose", "task: rated").replace("acc_norm", "brier_score").replace("metric: acc,", "metric: f1,")
    )
    (few_definitions / "rated.yaml").write_text(rated)
    keys = {"tasks": ["choose"], "files": {"choose": "rows.jsonl"}, **keys}
    keys["files"] = {**dict.fromkeys(keys["tasks"], "rows.jsonl"), **keys["files"]}
    if content:
        (project.data / "tasks" / keys["files"]["choose"]).write_text(content)
    with pytest.raises(PalimpsestError, match=message):
        run(project, **keys)
    assert not (project.data / "zeroshot").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"right": 3}, "right answer 3 of 3 answers"),
        ({"right": -1}, "right answer '-1' of 3 answers"),
        ({"right": "two"}, "'right' is text, elsewhere a number"),
        ({"answers": ["a", " ", "b"]}, "answers "),
        ({"answers": ["a"]}, "answers "),
        ({"answers": ["a", "b", 3]}, "'answers' is a list of a number, text, elsewhere a list of text"),
        ({"question": None}, "no 'question'"),
    ],
)
@pytest.mark.parametrize("place", [0, 4])
def test_a_bad_row_is_named(place: int, change: dict[str, Any], message: str, tmp_path: Path, few_definitions: Path) -> None:
    """In the same words wherever it stands; lines are those of the file, blank ones too."""
    project = Project(tmp_path / "project", "llama", blocks=1)
    data = rows()
    data[place] |= change
    prepare(project, few_definitions, data)
    path = project.data / "tasks/rows.jsonl"
    path.write_text("\n" + path.read_text())
    expected = rf"rows\.jsonl, line {place + 2}: not an example of task 'choose' \({message}.*\); mend or remove it"
    with pytest.raises(PalimpsestError, match=expected):
        run(project, tasks=["choose"])


def test_what_a_definition_does_not_read_may_be_anything() -> None:
    from stages.zeroshot.oddities import only_read

    data = [{"q": "a", "id": 1, "note": None}, {"q": "b", "id": "two"}]
    read = {"doc_to_text": "{{q}} of the candidate", "doc_to_choice": ["no", "yes"], "doc_to_target": 0}
    assert only_read(data, read) == [{"q": "a"}, {"q": "b"}]
    for decides in ({"process_docs": len}, {"doc_to_text": str}):
        assert only_read(data, read | decides) == data
    assert only_read(data, {"doc_to_text": "{{other}}"}) == data


def test_a_bad_row_of_a_table_is_named_by_its_number(tmp_path: Path, few_definitions: Path) -> None:
    project = Project(tmp_path / "project", "llama", blocks=1)
    data = rows()
    data[2]["answers"] = ["a", " "]
    prepare(project, few_definitions, data)
    parquet.write_table(table({key: [row[key] for row in data] for key in data[0]}), project.data / "tasks/rows.parquet")
    with pytest.raises(PalimpsestError, match=r"rows\.parquet, row 3: not an example of task 'choose' \(answers "):
        run(project, tasks=["choose"], files={"choose": "rows.parquet"})


@pytest.mark.parametrize("place", [0, 2])
def test_a_row_that_the_definitions_own_function_cannot_prepare_is_named(place: int) -> None:
    from datasets import Dataset

    from stages.zeroshot.oddities import find_odd

    def process(given: Dataset) -> Dataset:
        return given.map(lambda row: {"third": row["text"].split()[2]})

    data = [{"text": "a b" if index == place else "a b c"} for index in range(4)]
    assert find_odd(data, process) == (place, "IndexError: list index out of range")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tasks": ["boolq", "boolq"]}, "names boolq twice"),
        ({"tasks": ["mmlu"]}, "no examples of mmlu, only of arc_challenge"),
        ({"tasks": ["choose"], "source": "files"}, r"needs files\.choose"),
        ({"limit": 0}, "greater than or equal to 1"),
    ],
)
def test_params_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        check_sections({"zeroshot": keys}, {"zeroshot": Zeroshot})


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.zeroshot.find_spec", lambda name: None)
    check_sections({"zeroshot": {}}, {"zeroshot": Zeroshot})
    with pytest.raises(ParamsError, match=r"pip install -c constraints.txt -e '\.\[zeroshot\]'"):
        check_sections({"zeroshot": {"tasks": ["boolq"]}}, {"zeroshot": Zeroshot})


SAMPLES: dict[str, dict[str, Any]] = {
    "arc_easy": {"question": "a?", "choices": {"text": ["b", "c"], "label": ["A", "B"]}, "answerKey": "B"},
    "boolq": {"question": "is it", "passage": "it is.", "answer": True},
    "lambada_openai": {"request": {"context": "so it", "continuation": " goes"}},
    "winogrande": {"sentence": "a or b as _ is late", "option1": "a", "option2": "b", "answer": "2"},
}  # fmt: skip


def test_examples_of_the_package_fit_lm_evals_definitions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with the package's columns, some of which are not the definition's; and the place each is fetched to."""
    from stages.zeroshot import sources
    from stages.zeroshot.tasks import load_tasks

    def fetched(files: Any) -> None:
        for path, file in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            task = next(name for name in SAMPLES if path.name.startswith(name))
            assert file.member.endswith(PACKAGED[task][0]) and file.sha256 == PACKAGED[task][2]
            if path.suffix == ".arrow":
                import pyarrow

                with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table_of(task).schema) as writer:
                    writer.write_table(table_of(task))
            else:
                import gzip

                path.write_bytes(gzip.compress(json.dumps(SAMPLES[task]).encode()))

    def table_of(task: str) -> Any:
        return table({key: [value] * 2 for key, value in SAMPLES[task].items()})

    monkeypatch.setattr(sources, "fetch_all", fetched)
    tasks = {task.name: task.harness for task in load_tasks(Zeroshot(tasks=list(SAMPLES)), tmp_path)}
    first: dict[str, Any] = {name: next(iter(task.eval_docs)) for name, task in tasks.items()}
    assert tasks["boolq"].doc_to_target(first["boolq"]) == 1
    assert tasks["lambada_openai"].doc_to_target(first["lambada_openai"]) == " goes"
    assert tasks["arc_easy"].doc_to_target(first["arc_easy"]) == 1
    assert tasks["winogrande"].doc_to_text(first["winogrande"]) == 1


def test_an_export_runs_under_lm_eval(copied: Finished, few_definitions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`lm_eval run --model hf` on a task of local files, with operators, and so with trust_remote_code."""
    from lm_eval.__main__ import cli_evaluate

    project = copied("llama")
    prepare(project, few_definitions)
    examples = run(project, "compressed", tasks=["choose"])[1]
    data = json.dumps({"data_files": {"test": str(project.data / "tasks/rows.jsonl")}, "cache_dir": str(project.root / "cache")})
    local = f"{CHOOSE}dataset_path: json\ndataset_kwargs: {data}\ntest_split: test\n"
    (few_definitions / "choose.yaml").write_text(local.replace("task: choose", "task: choose_here"))
    model = f"pretrained={project.data / 'compressed'},trust_remote_code=True,dtype=float32"
    words = f"lm_eval run --model hf --model_args {model} --tasks choose_here --include_path {few_definitions} --device cpu"
    words += f" --batch_size 4 --output_path {project.root / 'out'} --log_samples"
    monkeypatch.setattr(sys, "argv", words.split())
    monkeypatch.setattr("lm_eval.tasks._index.TaskIndex._iter_yaml_files", lambda root: sorted(few_definitions.glob("*.yaml")))
    cli_evaluate()
    (found,) = (project.root / "out").rglob("samples_*.jsonl")
    theirs = [json.loads(line) for line in found.read_text().splitlines()]
    assert [one["acc"] for one in theirs] == examples.correct.tolist()
    assert [[float(likely) for likely, _ in one["filtered_resps"]] for one in theirs] == [
        pytest.approx([float(one) for one in str(row).split()], rel=1e-4) for row in examples.loglikelihoods
    ]


def test_parquet_and_arrow_give_the_same_rows(tmp_path: Path) -> None:
    import pyarrow

    from stages.zeroshot.files import read_rows

    whole = table({key: [row[key] for row in rows()] for key in rows()[0]})
    parquet.write_table(whole, tmp_path / "rows.parquet")
    with pyarrow.OSFile(str(tmp_path / "rows.arrow"), "wb") as sink, pyarrow.ipc.new_stream(sink, whole.schema) as writer:
        writer.write_table(whole)
    expected = {f"row {number}": row for number, row in enumerate(rows(), 1)}
    assert read_rows(tmp_path / "rows.parquet") == read_rows(tmp_path / "rows.arrow") == expected

"""Stage `training`: what it keeps is what it measured, a killed run goes on as if nothing had been, bad input is named."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from ruamel.yaml import YAML
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.checking import check_params
from pipeline.errors import PalimpsestError
from pipeline.files import Files
from pipeline.params import ParamsError, check_sections
from pipeline.tensors import TensorFile
from stages.decoder.checkpoint import Checkpoint
from stages.decoder.matrices import prunable_matrices
from stages.decoder.skeleton import Decoder
from stages.model import Model
from stages.model import Params as ModelParams
from stages.model.run import run as run_model
from stages.tokens import Params as TokensParams
from stages.tokens import Tokens
from stages.tokens.run import run as run_tokens
from stages.training import MATRICES, Params, Training, series
from stages.training import run as stage
from tests.models import save_model
from tests.project import REPOSITORY

WORDS = "the cat sat on a mat and saw one fox run over seven green hills until it slept in old warm hay".split()  # noqa: SIM905
SMALL: dict[str, Any] = {
    "source": "files", "calibration_files": ["train.txt"], "evaluation_files": ["test.txt"], "vocabulary": 280, "tokens": 480,
    "test_tokens": 96, "length": 16, "blocks": 2, "width": 16, "heads": 2, "epochs": 3, "checkpoints": [0, 1, 3],
    "batch_windows": 8, "learning_rate": 5e-3, "warmup": 2, "device": "cpu",
}  # fmt: skip
LINEARS = {"llama": ("_proj.weight",), "gpt2": ("c_attn.weight", "c_proj.weight", "c_fc.weight")}


def text(words: int, seed: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words)) + ".\n"


def project(root: Path) -> Path:
    corpus = root / "data" / "corpus"
    corpus.mkdir(parents=True)
    (corpus / "train.txt").write_text(text(600, 0))
    (corpus / "test.txt").write_text(text(200, 1))
    return root


def train(root: Path, **keys: Any) -> Path:
    params = Params(training=Training(**{**SMALL, **keys}))
    outputs = Files("training", "outs", ("training",), root)
    stage.run(params, Files("training", "deps", ("corpus",), root), outputs)
    return outputs["training"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A finished training of each kind. Do not change it."""
    return {
        f"{method}-{grid}": train(project(tmp_path_factory.mktemp("project")), method=method, grid=grid)
        for method, grid in [("llama", "none"), ("llama", "ternary"), ("gpt2", "binary")]
    }


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def plain_loss(folder: Path, text: str, tokens: int, length: int = 16) -> float:
    """As anybody would measure it who has only transformers."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor(tokenizer(text.strip() if text.endswith(" ") else text, add_special_tokens=False)["input_ids"][:tokens])
    windows = ids.reshape(-1, length)
    with torch.no_grad():
        logits = model(windows).logits[:, :-1]
    return float(cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()))


KINDS = ["llama-none", "llama-ternary", "gpt2-binary"]


@pytest.mark.parametrize("kind", KINDS)
def test_plain_transformers_gives_the_losses_of_the_table(trained: dict[str, Path], kind: str) -> None:
    table = pd.read_csv(trained[kind] / "losses.csv")
    assert table["epoch"].tolist() == [0, 1, 3] and table["step"].tolist() == [0, 4, 12]
    for row in table.to_dict("records"):
        folder = trained[kind] / f"epoch-{row['epoch']:04d}"
        assert plain_loss(folder, text(600, 0), 480) == pytest.approx(row["train_loss"], rel=1e-5)
        assert plain_loss(folder, text(200, 1), 96) == pytest.approx(row["test_loss"], rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns(trained: dict[str, Path], kind: str) -> None:
    table = pd.read_csv(trained[kind] / "losses.csv")
    assert table["train_loss"].is_monotonic_decreasing and table["test_loss"].iloc[-1] < table["test_loss"].iloc[0] - 0.1
    assert abs(table["train_loss"].iloc[0] - torch.tensor(280.0).log()) < 0.2, "at first every token is as likely as any other"


@pytest.mark.parametrize("kind", ["llama-ternary", "gpt2-binary"])
def test_checkpoints_of_few_bits_are_stored_on_their_grid(trained: dict[str, Path], kind: str) -> None:
    method, grid = kind.split("-")
    tensors = load_file(trained[kind] / "epoch-0003" / "model.safetensors")
    low = {name: value for name, value in tensors.items() if name.endswith(LINEARS[method])}
    assert len(low) == {"llama": 14, "gpt2": 8}[method]
    for value in low.values():
        for channel in value.T if method == "gpt2" else value:
            values = channel.unique().abs().unique()
            assert len(values) == 1 if grid == "binary" else len(values[values > 0]) <= 1
    full = [value for name, value in tensors.items() if "embed" in name or "wte" in name]
    assert full and all(len(value.unique()) > value.numel() // 2 for value in full)


def test_only_the_matrices_named_are_of_few_bits(tmp_path: Path) -> None:
    out = train(project(tmp_path), method="llama", grid="binary", matrices=["mlp.*"], epochs=1, checkpoints=[1])
    for name, value in load_file(out / "epoch-0001" / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            assert (len(value[0].abs().unique()) == 1) is ("mlp" in name), name


def test_a_second_run_gives_the_same_bytes(trained: dict[str, Path], tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    again = everything(train(project(tmp_path), method="llama", grid="ternary"))
    assert again == everything(trained["llama-ternary"])
    assert torch.equal(torch.random.get_rng_state(), before), "global randomness is nobody's to take from"
    other = everything(train(tmp_path, method="llama", grid="ternary", seed=1))
    assert other["epoch-0000/model.safetensors"] != again["epoch-0000/model.safetensors"]


@pytest.mark.parametrize("at", [0, 5, 11], ids=["in the first epoch", "in the second", "in the last step"])
def test_a_killed_run_goes_on(
    trained: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], at: int
) -> None:
    project(tmp_path)
    rate = series.learning_rate

    def killed(training: Training, step: int) -> float:
        if step == at:
            raise KeyboardInterrupt
        return rate(training, step)

    with monkeypatch.context() as patch:
        patch.setattr(series, "learning_rate", killed)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path, method="gpt2", grid="binary")
    assert not (tmp_path / "data" / "training").exists()
    steps: list[int] = []
    monkeypatch.setattr(series, "learning_rate", lambda training, step: steps.append(step) or rate(training, step))
    capsys.readouterr()
    assert everything(train(tmp_path, method="gpt2", grid="binary")) == everything(trained["gpt2-binary"])
    assert steps == list(range(at // 4 * 4, 12)), "what was done is not done again"
    assert ("going on behind epoch" in capsys.readouterr().out) is (at >= 4)


def test_what_was_left_of_another_training_is_not_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(stage, "finish", lambda *_: None)  # leaves the state of the last epoch behind
        train(tmp_path, method="llama")
    assert (tmp_path / "data" / ".training.partial" / stage.STATE).exists()
    (tmp_path / "data" / "corpus" / "train.txt").write_text(text(600, 5))
    steps: list[int] = []
    rate = series.learning_rate
    monkeypatch.setattr(series, "learning_rate", lambda training, step: steps.append(step) or rate(training, step))
    out = train(tmp_path, method="llama")
    assert len(steps) == 12
    assert sorted(path.name for path in out.iterdir()) == [
        "epoch-0000", "epoch-0001", "epoch-0003", "losses.csv", "training.json",
    ]  # fmt: skip


def test_off_it_leaves_next_to_nothing_whatever_the_other_keys(tmp_path: Path) -> None:
    project(tmp_path)
    first = everything(train(tmp_path))
    assert sorted(first) == ["losses.csv", "training.json"] and first["losses.csv"].count(b"\n") == 1
    assert everything(train(tmp_path, width=32, tokens=10**9, source="demo")) == first


def test_the_losses_that_dvc_yaml_draws_are_there(trained: dict[str, Path], tmp_path: Path) -> None:
    entries = YAML(typ="safe").load(REPOSITORY / "dvc.yaml")["plots"]
    (plot,) = [plot for entry in entries for plot in entry.values() if "data/training/losses.csv" in plot["y"]]
    for folder in (trained["llama-none"], train(project(tmp_path))):
        assert {plot["x"], *plot["y"]["data/training/losses.csv"]} <= set(pd.read_csv(folder / "losses.csv").columns)


def test_learning_rate() -> None:
    training = Training(**{**SMALL, "epochs": 2, "checkpoints": [2], "warmup": 4, "learning_rate": 1.0})
    rates = [series.learning_rate(training, step) for step in range(9)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0] and rates[6] == pytest.approx(0.5) and rates[8] == pytest.approx(0.0)
    level = training.model_copy(update={"decay": "none"})
    assert [series.learning_rate(level, step) for step in (3, 7)] == [1.0, 1.0]


# Bad input


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"heads": 3}, "width = 16: 3 heads do not divide it"),
        ({"heads": 16}, "rotary positions need an even width per head"),
        ({"checkpoints": [4]}, r"checkpoints = \[4\]: should be different epochs from 0 to epochs = 3"),
        ({"checkpoints": [1, 1]}, "different epochs"),
        ({"test_tokens": 15}, "test_tokens = 15: not one window of length = 16"),
        ({"warmup": 12}, "warmup = 12 steps: the whole training has 12"),
        ({"vocabulary": 200}, r"training\.vocabulary = 200: should be greater than or equal to 257"),
        ({"grid": "1bit"}, r"training\.grid = '1bit': should be 'none', 'binary'"),
        ({"matrices": []}, r"training\.matrices"),
        ({"evaluation_files": []}, "needs calibration_files and evaluation_files"),
    ],
)
def test_keys_that_do_not_go_together_are_refused_before_any_work(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        check_sections({"training": {**SMALL, "method": "llama", **keys}}, {"training": Training})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tokens": 10**6}, r"training\.tokens = 1000000: 'train\.txt' has [\d,]+ tokens of a vocabulary of 280; lower it"),
        ({"test_tokens": 10**5}, r"training\.test_tokens = 100000: 'test\.txt' has"),
        ({"vocabulary": 5000}, r"training\.vocabulary = 5000: the training text gives \d+ tokens at most"),
        ({"grid": "binary", "matrices": ["c_fc"]}, r"training\.matrices: 'c_fc' fits no matrix of a block; there are self_attn"),
        ({"calibration_files": ["gone.txt"]}, r"training\.calibration_files: no file gone\.txt"),
        ({"learning_rate": 1e9, "warmup": 0}, r"the loss is (nan|inf) at step \d+ .*; lower training\.learning_rate"),
    ],
)
def test_bad_input_is_named(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(PalimpsestError, match=message):
        train(project(tmp_path), method="llama", **keys)
    assert not (tmp_path / "data" / "training").exists()


# What later stages make of it


def take(root: Path, **keys: Any) -> Path:
    outputs = Files("model", "outs", ("model",), root)
    run_model(ModelParams(model=Model(**keys)), Files("model", "deps", ("training",), root), outputs)
    return outputs["model"]


def test_the_model_is_the_checkpoint_asked_for(trained: dict[str, Path], tmp_path: Path) -> None:
    project(tmp_path)
    shutil.copytree(trained["llama-ternary"], tmp_path / "data" / "training")
    for asked, epoch in ((1, 1), ("last", 3)):
        checkpoint = Checkpoint(take(tmp_path, source="scratch", checkpoint=asked))
        weights = (trained["llama-ternary"] / f"epoch-{epoch:04d}" / "model.safetensors").read_bytes()
        assert (checkpoint.folder / "model.safetensors").read_bytes() == weights
        assert checkpoint.manifest["grid"] == "ternary" and checkpoint.manifest["matrices"] == ["*"]


def test_tokens_makes_the_windows_that_were_trained_on(
    trained: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project(tmp_path)
    seen: list[torch.Tensor] = []
    measure = stage.mean_loss
    monkeypatch.setattr(stage, "mean_loss", lambda model, ids, batch: seen.append(ids) or measure(model, ids, batch))
    train(tmp_path, method="llama", epochs=1, checkpoints=[1])
    take(tmp_path, source="scratch")
    tokens = Tokens(
        source="files", calibration_files=["train.txt"], evaluation_files=["test.txt"], length=16, calibration_windows=30,
        evaluation_windows=6, sampling="first",
    )  # fmt: skip
    outputs = Files("tokens", "outs", ("tokens.safetensors",), tmp_path)
    run_tokens(TokensParams(tokens=tokens), Files("tokens", "deps", ("model", "corpus"), tmp_path), outputs)
    windows = TensorFile(outputs["tokens.safetensors"])
    assert torch.equal(windows.read("calibration"), seen[0]) and torch.equal(windows.read("evaluation"), seen[1])


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"source": "scratch"}}, r"model\.source = 'scratch': nothing is trained; set training\.method"),
        (
            {"model": {"source": "scratch", "checkpoint": 3}, "training": {"method": "llama"}},
            r"model\.checkpoint = 3: not kept; training\.checkpoints has 1, 2, 4, 8",
        ),
        (
            {"model": {"source": "scratch", "grid": "binary"}, "training": {"method": "llama", "grid": "ternary"}},
            r"model\.grid = 'binary': this model is trained with training\.grid = 'ternary' already",
        ),
        ({"model": {"checkpoint": "first"}}, r"model\.checkpoint"),
    ],
)
def test_what_model_and_training_ask_of_each_other(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        check_params(sections)
    check_params(SERIES | {"model": {"source": "scratch", "checkpoint": 2}})


SERIES: dict[str, Any] = {
    "training": {"method": "llama"},
    "model": {"source": "scratch"},
    "tokens": {"length": 128},
    "removal": {"count": 2},
}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"tokens": {"length": 129}}, r"tokens\.length = 129: the model that is trained reads training\.length = 128"),
        ({"tokens": {"length": 64, "contract": "wanda"}}, r"tokens\.contract = wanda: windows of 2048 tokens: the model"),
        ({"removal": {"count": 3}}, r"removal\.count = 3: of training\.blocks = 4 can 2 go \(removal\.protect = \[0, -1\]\)"),
        ({"removal": {"count": 4, "protect": [0, -4]}}, r"of training\.blocks = 4 can 3 go"),
        (
            {"training": {"method": "gpt2", "grid": "binary", "matrices": ["mlp.gate"]}},
            r"training\.matrices: 'mlp\.gate' fits no",
        ),
        ({"yes": {"maps": "prefix_9"}}, r"yes\.maps: no map 'prefix_9' in a model of 4 blocks"),
        ({"training": {"method": "llama", "blocks": 9}, "yes": {"maps": "staircases"}}, r"yes\.maps = 'staircases': 256 maps"),
    ],
)
def test_what_later_stages_ask_of_a_small_model(sections: dict[str, Any], message: str) -> None:
    check_params(SERIES)
    with pytest.raises(ParamsError, match=message):
        check_params(SERIES | sections)
    if "yes" in sections:
        check_params(SERIES | sections | {"yes": {}})


@pytest.mark.parametrize("method", ["llama", "gpt2"])
def test_the_matrices_that_may_be_named_are_those_of_the_model(method: str, tmp_path: Path) -> None:
    save_model(tmp_path, method, 1)
    assert {one.name for one in prunable_matrices(Decoder(tmp_path).blocks[0])} == set(MATRICES[method])


def test_the_series_says_what_it_is(trained: dict[str, Path]) -> None:
    about = json.loads((trained["gpt2-binary"] / "training.json").read_text())
    assert about == {
        "method": "gpt2", "grid": "binary", "matrices": ["*"], "checkpoints": [0, 1, 3], "tokens": 480, "test_tokens": 96,
    }  # fmt: skip

"""References beside the model: fitted as said, shared without a trace, resumable, on the grid, kept for anyone to load."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from pipeline.errors import PalimpsestError
from pipeline.tensors import write_tensors
from stages.decoder.lowbit import quantise
from stages.decoder.skeleton import Decoder
from stages.report.columns import Columns
from stages.report.sections.yes import _stones, _verdict
from stages.yes import Yes, chain
from stages.yes import run as yes_run
from stages.yes.block import fresh_weights
from stages.yes.controls import same_compute
from stages.yes.head import own_head
from tests.models import save_model
from tests.plain import plain_logits
from tests.project import Project
from tests.stages.conftest import Finished, copy_project

QUICK: dict[str, Any] = {"steps": 6, "check": 3, "batch_tokens": 64, "head_steps": 4, "head_positions": 32, "learning_rate": 0.01}
OUTPUTS = ("yes.csv", "yes_layers.csv", "yes_blocks.csv", "yes.json", "yes.safetensors")


def solve(project: Project, **wanted: Any) -> pd.DataFrame:
    project.run("yes", yes={**QUICK, **wanted})
    return pd.read_csv(project.data / "yes.csv").set_index("net")


def plain_losses(model: Any, project: Project, split: str) -> np.ndarray:
    """Mean loss of each window by the plain model."""
    ids = load_file(project.data / "tokens.safetensors")[split]
    logits = plain_logits(model, ids)[:, :-1].double()
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].long().flatten(), reduction="none")
    return losses.view(len(ids), -1).mean(1).detach().numpy()


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Three blocks, the tape recorded. Do not change it: `fresh` gives a copy."""
    project = Project(tmp_path_factory.mktemp("yes"), blocks=3)
    project.run("capture")
    return project


@pytest.fixture
def fresh(captured: Project, tmp_path: Path) -> Project:
    return copy_project(captured, tmp_path / "copy")


def test_off_by_default_and_then_the_model_is_not_even_opened(fresh: Project) -> None:
    shutil.rmtree(fresh.data / "model")
    (fresh.data / ".yes").mkdir()
    fresh.run("yes")
    assert not (fresh.data / ".yes").exists(), "what a killed run left goes"
    assert not len(pd.read_csv(fresh.data / "yes.csv")) and json.loads((fresh.data / "yes.json").read_text()) == {"maps": 0}
    assert [file.name for file in (fresh.data / "yes_best").iterdir()] == ["reference.json"]


def test_all_staircases_with_every_control(fresh: Project) -> None:
    table = solve(fresh, maps="staircases", shuffled=True, continued=True, test="both", windows=5)
    maps = ["3-3-3", "2-2-3", "1-3-3", "1-2-3"]
    assert list(table.index) == ["model", "model, head refitted", *maps, "shuffled targets", "model, trained on"]
    assert table.role.tolist() == ["model", "control", *["bound"] * 4, "control", "control"]
    losses = load_file(fresh.data / "yes.safetensors")
    assert losses["train"].shape == (8, 4) and losses["test"].shape == (8, 5), "4 to fit, 1 held out, 4 of evaluation"
    for part in ("train", "test"):
        assert table[part].tolist() == pytest.approx(losses[part].mean(1).tolist())
        gains = losses[part][1] - losses[part]
        name = "gain" if part == "train" else "test_gain"
        assert table[name].tolist() == pytest.approx(gains.mean(1).tolist(), abs=1e-12)
        errors = gains.std(1) / gains.shape[1] ** 0.5
        assert table[f"{name}_error"].tolist() == pytest.approx(errors.tolist(), abs=1e-12)
    own = plain_losses(fresh.model, fresh, "calibration"), plain_losses(fresh.model, fresh, "evaluation")
    assert losses["train"][0].tolist() == pytest.approx(own[0][:4].tolist(), rel=1e-5)
    assert losses["test"][0].tolist() == pytest.approx([own[0][4], *own[1]], rel=1e-5)
    verdict = json.loads((fresh.data / "yes.json").read_text())
    assert verdict["maps"] == 4 and verdict["best"] == min(maps, key=lambda name: table.train[name])
    assert verdict["yes0_train"] == pytest.approx(table.train["3-3-3"]) and verdict["yes_train"] <= verdict["yes0_train"]
    assert verdict["gain"] == pytest.approx(table.gain[verdict["best"]])
    assert verdict["shuffled_targets_train"] == table.train["shuffled targets"]
    fits = pd.read_csv(fresh.data / "yes_blocks.csv")
    assert len(fits) == 11 and set(fits.steps) <= {3, 6}
    rows = pd.read_csv(fresh.data / "yes_layers.csv")
    assert rows.block.tolist() == [0, 1] and rows.skipped.tolist() == [0.5, 0.5]
    direct = fits[fits.prefix.isin(["1", "1-2"])].heldout_error.tolist()
    assert rows.error.tolist() == pytest.approx(direct)
    assert not (fresh.data / ".yes").exists(), "nothing is left behind"


def test_the_model_is_trained_on_at_the_rate_of_the_blocks_with_the_compute_of_a_chain(fresh: Project) -> None:
    name = "model, trained on"
    own = solve(fresh, maps=["direct"], continued=True, patience=0)
    assert own.head_steps[name] == 7, "4 steps of a head on 32 positions are less than one of the model on 64 tokens"
    same = solve(fresh, continued_learning_rate=0.01)
    assert same.train[name] == own.train[name]
    assert solve(fresh, continued_learning_rate=0.0001).train[name] != own.train[name]
    # by hand: 4 x 32 x 3 weights and tokens of head steps, each step of the model 64 x (9 + 3)
    assert same_compute(Yes(steps=10, head_steps=4, head_positions=32, batch_tokens=64), 9, 3) == 10 + 1
    assert same_compute(Yes(steps=10, head_steps=40, head_positions=32, batch_tokens=64), 9, 3) == 10 + 5


def test_losses_may_be_taken_on_some_of_the_windows(fresh: Project) -> None:
    every, some = solve(fresh, maps=["direct"]), solve(fresh, maps=["direct"], scored=2)
    losses = load_file(fresh.data / "yes.safetensors")["train"]
    own = plain_losses(fresh.model, fresh, "calibration")
    assert losses[0].tolist() == pytest.approx([own[0], own[2]], rel=1e-5), "of five windows the first and the middle one"
    assert some.test.tolist() == every.test.tolist() and some.head_steps.tolist() == every.head_steps.tolist()


def test_what_maps_share_gives_what_separate_fits_give(fresh: Project) -> None:
    together = solve(fresh, maps=["1-2-3", "1-3-3", "1-3", "3-3-3"])
    for name in together.index[2:]:
        alone, columns = solve(fresh, maps=[name]), ["train", "test", "head_steps"]
        assert alone.loc[name, columns].tolist() == together.loc[name, columns].tolist()
        assert alone.train["model, head refitted"] == together.train["model, head refitted"]


def test_fits_get_nearer_and_depend_on_the_seed(fresh: Project) -> None:
    solve(fresh, maps=["direct"], steps=1)
    short = pd.read_csv(fresh.data / "yes_blocks.csv")
    solve(fresh, maps=["direct"], steps=40, patience=0)
    long = pd.read_csv(fresh.data / "yes_blocks.csv")
    assert (long.train_error < short.train_error - 0.02).all()
    solve(fresh, maps=["direct"], steps=1, seed=1)
    assert (pd.read_csv(fresh.data / "yes_blocks.csv").train_error != short.train_error).all()


def test_a_killed_run_goes_on_where_it_was(fresh: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = copy_project(fresh, tmp_path / "whole")
    wanted = {"maps": ["direct", "first_last", "all_last"]}
    solve(whole, **wanted)
    real, calls = chain.fit_block, []

    def fit(*arguments: Any) -> Any:
        calls.append(arguments[1])
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(chain, "fit_block", fit)
    with pytest.raises(KeyboardInterrupt):
        solve(fresh, **wanted)
    assert len(calls) == 4 and (fresh.data / ".yes").is_dir()
    solve(fresh, **wanted)
    assert len(calls) == 4 + 5, "of eight fits three were there"
    for name in (*OUTPUTS, "yes_best/model.safetensors", "yes_best/reference.json"):
        assert (fresh.data / name).read_bytes() == (whole.data / name).read_bytes(), name


def test_fits_made_with_other_parameters_are_not_taken(fresh: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0
    real = yes_run.Judge

    def judge(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == 1:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(yes_run, "Judge", judge)
    with pytest.raises(KeyboardInterrupt):
        solve(fresh, maps=["direct"], steps=1)
    solve(fresh, maps=["direct"], steps=2)
    assert set(pd.read_csv(fresh.data / "yes_blocks.csv").steps) == {2}


def test_another_checkpoint_under_the_same_path_takes_no_fits(fresh: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    other, marks = fresh.data / "other", []
    real = yes_run.fingerprint
    monkeypatch.setattr(yes_run, "fingerprint", lambda *arguments: marks.append(real(*arguments)) or marks[-1])
    for seed in (5, 5, 6):
        shutil.rmtree(other, ignore_errors=True)
        save_model(other, "llama", 3, seed=seed)
        solve(fresh, maps=["direct"], initial="pretrained", pretrained=str(other), steps=1)
    assert marks[0] == marks[1] != marks[2]


@pytest.mark.parametrize("grid", ["3bit", "8bit"])
def test_references_kept_in_bfloat16_lie_on_the_grid(grid: str, tmp_path: Path) -> None:
    project = Project(tmp_path, blocks=2)
    project.model.bfloat16().save_pretrained(project.data / "model")
    project.run("capture")
    solve(project, maps=["direct"], grid=grid)
    kept = load_file(project.data / "yes_best/model.safetensors")
    matrices = [value for name, value in kept.items() if "_proj" in name]
    assert len(matrices) == 14 and all(value.dtype == torch.bfloat16 for value in matrices)
    assert all(torch.equal(quantise(value, grid), value) for value in matrices)


@pytest.mark.parametrize(
    ("family", "wanted"),
    [
        ("llama", {"maps": ["direct", "first_last"]}),
        ("llama_tied", {"maps": ["first_last"]}),
        ("llama_tied", {"maps": ["first_last"], "head": "norm"}),
        ("gpt2", {"maps": ["skip_2"]}),
        ("gemma3", {"maps": ["skip_2"]}),
        ("mixtral", {"maps": ["all_last"]}),
    ],
)
def test_the_best_reference_loads_anywhere_with_the_losses_said(family: str, wanted: dict[str, Any], tmp_path: Path) -> None:
    project = Project(tmp_path, family, blocks=3)
    project.run("capture")
    table = solve(project, **wanted)
    note = json.loads((project.data / "yes_best/reference.json").read_text())
    said = [note[key] for key in ("dtype", "train_windows", "train_tokens", "test_windows", "test_tokens")]
    assert said == ["float32", 5, 5 * 15, 4, 4 * 15]
    assert note["map"] in wanted["maps"] and note["role"] == ("reference, not bound" if "skip_2" in wanted["maps"] else "bound")
    loaded: Any = AutoModelForCausalLM.from_pretrained(project.data / "yes_best", output_loading_info=True)
    model, report = loaded
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert plain_losses(model.eval(), project, "evaluation").mean() == pytest.approx(table.test[note["map"]], rel=1e-4)
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert tied == (family == "llama_tied" and wanted.get("head") == "norm")


@pytest.mark.parametrize("grid", ["binary", "ternary"])
def test_references_obey_the_grid(grid: str, fresh: Project) -> None:
    solve(fresh, maps=["first_last"], grid=grid, matrices=["mlp.*", "*.o_proj"])
    kept = load_file(fresh.data / "yes_best/model.safetensors")
    levels = {"binary": (2,), "ternary": (1, 2, 3)}[grid]
    for name, weight in kept.items():
        if not name.startswith("model.layers.") or weight.ndim < 2:
            continue
        counts = {len(row.unique()) for row in weight}
        if "mlp" in name or "o_proj" in name:
            assert counts <= set(levels), name
            assert all(torch.allclose(row.abs()[row != 0], row.abs().max()) for row in weight), name
        else:
            assert min(counts) > 3, name
    with pytest.raises(PalimpsestError, match=r"yes\.matrices: 'attention' fits no matrix of a block; there are self_attn"):
        solve(fresh, maps=["direct"], grid=grid, matrices=["attention"])


def test_the_grid_that_stage_model_knows_of_is_the_references(fresh: Project) -> None:
    solve(fresh, maps=["first_last"], grid="ternary", matrices=["mlp.*"])
    asked = (fresh.data / "yes_best/model.safetensors").read_bytes()
    (fresh.data / "model/manifest.json").write_text(json.dumps({"folder": ".", "grid": "ternary", "matrices": ["mlp.*"]}))
    solve(fresh, maps=["first_last"], grid="none", matrices=["*"])
    assert (fresh.data / "yes_best/model.safetensors").read_bytes() == asked
    note = fresh.data / "yes_best/reference.json"
    assert json.loads(note.read_text())["role"] == "bound"
    same = solve(fresh, maps=["first_last"], grid="ternary", matrices=["mlp.gate_proj", "mlp.up_proj", "mlp.d*"])
    assert same.role["first_last"] == "bound", "the same matrices by other names"


@pytest.mark.parametrize(("grid", "matrices"), [("8bit", ["mlp.*"]), ("binary", ["mlp.up_proj"]), ("ternary", ["mlp.*"])])
def test_a_net_on_another_grid_than_the_models_is_no_bound(
    grid: str, matrices: list[str], fresh: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    (fresh.data / "model/manifest.json").write_text(json.dumps({"folder": ".", "grid": "binary", "matrices": ["mlp.*"]}))
    table = solve(fresh, maps=["all_last", "direct"], grid=grid, matrices=matrices)
    assert table.role.tolist() == ["model", "control", "reference", "reference"], "a grid that is asked for goes first"
    verdict = json.loads((fresh.data / "yes.json").read_text())
    assert verdict["verdict"] == "none" and verdict["reference"] in ("all_last", "direct")
    said = f"references and no bounds: yes.grid = {grid}, yes.matrices = {matrices[0]}, while the model lies on binary, mlp.*"
    assert capsys.readouterr().out.replace("\n", " ").count(said) == 1
    assert json.loads((fresh.data / "yes_best/reference.json").read_text())["role"] == "reference, not bound"


def test_started_from_the_checkpoint_direct_is_the_model(fresh: Project) -> None:
    table = solve(fresh, maps=["direct"], initial="checkpoint", learning_rate=1e-9)
    assert pd.read_csv(fresh.data / "yes_blocks.csv").heldout_error.max() < 1e-9
    assert table.gain["direct"] == pytest.approx(0, abs=1e-4)
    other = fresh.data / "other"
    save_model(other, "llama", 3, seed=5)
    moved = solve(fresh, maps=["direct"], initial="pretrained", pretrained="data/other", learning_rate=1e-9)  # of the project
    assert abs(moved.gain["direct"]) > 1e-3
    save_model(fresh.data / "short", "llama", 2)
    with pytest.raises(PalimpsestError, match=r"yes\.pretrained = 'gone': no such folder"):
        solve(fresh, maps=["direct"], initial="pretrained", pretrained="gone")
    (fresh.data / "empty").mkdir()
    with pytest.raises(PalimpsestError, match=r"yes\.pretrained = '.*empty': .*"):
        solve(fresh, maps=["direct"], initial="pretrained", pretrained=str(fresh.data / "empty"))
    with pytest.raises(PalimpsestError, match=r"yes\.pretrained = .*: its blocks are not those of the model"):
        solve(fresh, maps=["direct"], initial="pretrained", pretrained=str(fresh.data / "short"))


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "neox", "gemma2", "mixtral", "bloom", "falcon"])
def test_fresh_blocks_are_as_the_model_draws_them(family: str, finished: Finished, tmp_path: Path) -> None:
    save_model(tmp_path, family, 2)
    decoder = Decoder(tmp_path)
    before = torch.random.get_rng_state()
    first, again, other = (fresh_weights(decoder, 1, seed) for seed in (3, 3, 4))
    assert torch.equal(torch.random.get_rng_state(), before), "the global generator is left alone"
    large = [name for name, value in first.items() if value.numel() > 200]
    assert large and all(torch.equal(first[name], again[name]) and not torch.equal(first[name], other[name]) for name in large)
    assert all(0.001 < float(first[name].std()) < 0.1 for name in large), "the usual initialisation"
    assert all(p.is_meta for p in decoder.blocks[1].parameters()), "nothing stays in the block"


def test_the_head_is_what_lies_behind_the_last_block(tmp_path: Path) -> None:
    expected = {
        "llama_tied": {"model.norm.weight", "lm_head.weight"},
        "gpt2": {"transformer.ln_f.weight", "transformer.ln_f.bias", "lm_head.weight"},
        "opt": {
            *(f"model.decoder.{name}" for name in ("final_layer_norm.weight", "final_layer_norm.bias", "project_out.weight")),
            "lm_head.weight",
        },
    }
    for family, names in expected.items():
        save_model(tmp_path / family, family, 1)
        decoder = Decoder(tmp_path / family)
        decoder.calls(1, 4)
        with decoder.trunk(head=True):
            assert set(own_head(decoder, "full")) == names
            assert set(own_head(decoder, "norm")) == names - {"lm_head.weight"}


def test_what_the_model_has_not_is_refused_before_any_work(fresh: Project) -> None:
    with pytest.raises(PalimpsestError, match=r"yes\.maps: no map 'prefix_9' in a model of 3 blocks"):
        solve(fresh, maps=["prefix_9"])
    with pytest.raises(PalimpsestError, match=r"yes\.maps.*no map 'best'; allowed: direct, all_last"):
        solve(fresh, maps=["best"])
    assert not (fresh.data / ".yes").exists()


def test_the_report_says_what_was_proved(copied: Finished) -> None:
    project = copied("llama")
    solve(project, maps=["direct", "first_last", "without_1"], continued=True, shuffled=True)
    page = project.run("report").read_text()
    light = json.loads((project.data / "yes.json").read_text())["verdict"]
    assert "How good the layers could have been" in page and f"head refitted on both sides: {light}: " in page
    assert (
        "The model, trained on for 7 steps at a learning rate of 0.01, has a loss of" in page
        and "targets of other windows has a loss" in page
    )
    assert "What the direct map loses by each target" in page and "nan" not in page.split('id="yes"')[1].split("</section>")[0]
    solve(project, maps=["skip_2"], continued=False, shuffled=False)
    page = project.run("report").read_text()
    assert (
        "a net of fewer blocks, or on another grid, is no bound on it" in page
        and "The best net of another class than the model's (skip 2, not a bound) has a loss" in page.replace("&#39;", "'")
    )


def test_what_was_not_tried_is_not_claimed() -> None:
    (said,) = _stones(Columns.of(pd.DataFrame({"block": [0, 1, 2], "stepping_stone": ["", "fine", ""]})))
    assert said.startswith("None of 1 inner boundary that maps skip is a poor") and said.endswith("; 2 were not tried.")
    amber = {"verdict": "amber", "best": "direct", "gain": 0.2, "gain_error": 0.01, "gain_test": 0.1, "gain_test_error": None}
    assert "(YES0) was not tried, so red cannot be told" in _verdict(amber, 3.0)
    assert "YES0 is no better, but another map" in _verdict({**amber, "yes0_train": 3.0}, 3.0)
    assert "a single window of the fit" in _verdict({**amber, "verdict": "none"}, 3.0)
    assert "no reference of the model's class was fitted" in _verdict({"verdict": "none"}, 3.0)


def test_one_window_to_judge_on_gives_no_verdict(fresh: Project) -> None:
    solve(fresh, maps=["direct", "first_last"], windows=2)
    verdict = json.loads((fresh.data / "yes.json").read_text())
    assert (verdict["verdict"], verdict["verdict_with_head"], verdict["gain_error"]) == ("none", "none", None)
    assert verdict["verdict_test"] != "none" and verdict["gain_test_error"] > 0
    assert pd.read_csv(fresh.data / "yes_layers.csv").stepping_stone.isna().all()


def test_overlapping_evaluation_windows_are_refused(fresh: Project) -> None:
    """A contract that scores some tokens alone: a loss over whole windows would count the others twice."""
    path = fresh.data / "tokens.safetensors"
    tensors = load_file(path)
    write_tensors(path, {**tensors, "scored": torch.ones_like(tensors["evaluation"], dtype=torch.uint8)})
    with pytest.raises(PalimpsestError, match=r"evaluation windows overlap.*yes\.test: held_out"):
        solve(fresh, maps=["direct"])

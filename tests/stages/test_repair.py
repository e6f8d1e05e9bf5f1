"""Every kind of operator from the tape to the export: ends, blocks one by one, sinks, folds, the student's own stream."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from pipeline.errors import PalimpsestError
from pipeline.params import ParamsError, check_sections
from pipeline.tensors import TensorFile, write_tensors
from stages.ghost import Ghost
from stages.ghost.run import METHODS
from tests.models import FAMILIES
from tests.plain import (
    blocks_of,
    matrix_of,
    plain_boundaries,
    plain_logits,
    plain_losses,
    plain_variant,
    read_masks,
    relative_gap,
)
from tests.project import Project
from tests.stages.conftest import Finished, copy_project
from tests.stages.test_families import PROMPT, reload
from tests.stages.test_ghost import oracle, rows_of

FIRST, INNER = 5, 6  # tokens that the planted models make sinks of: the first of each window, and one inside some


def repaired(project: Project, removed: list[int], **ghost: Any) -> Path:
    """Fit and export; returns the exported folder."""
    project.run("removal", removal={"method": "list", "blocks": removed})
    project.run("ghost", ghost=ghost)
    return project.run("compress")


def plain_operators(project: Project) -> dict[tuple[int, int], Callable[[Tensor], Tensor]]:
    """Run -> what its operator does to a stream, sinks left out, from the tensors on disk. A fold does nothing here."""
    file = load_file(project.data / "ghost.safetensors")
    runs: dict[tuple[int, int], Callable[[Tensor], Tensor]] = {}
    for detail in TensorFile(project.data / "ghost.safetensors").metadata["operators"].values():
        name = f"runs.{detail['start']}-{detail['stop']}"
        width = 32
        m = file.get(name, torch.zeros(width, width))
        if f"{name}.scale" in file:
            m = torch.diag(file[f"{name}.scale"])
        if f"{name}.down" in file:
            m = file[f"{name}.down"] @ file[f"{name}.up"]
        bias = file.get(f"{name}.bias", torch.zeros(width))
        runs[detail["start"], detail["stop"]] = lambda x, m=m, bias=bias: x + x @ m + bias
    return runs


def expected(project: Project, removed: list[int], operators: Any) -> Any:
    return plain_variant(project.model, read_masks(project.data / "masks.safetensors", project.model), removed, operators)


def same_with_cache(model: Any, prompt: Tensor, **more: Any) -> Tensor:
    settings = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, **more}
    text = model.generate(prompt, use_cache=True, **settings)
    assert torch.equal(text, model.generate(prompt, use_cache=False, **settings))
    return text


@pytest.mark.parametrize("removed", [[1, 2], [0, 3]])
@pytest.mark.parametrize("method", [name for name in METHODS if name != "replaceme"])
def test_every_operator_is_exported_as_it_was_fitted(method: str, removed: list[int], copied: Finished) -> None:
    project = copied("llama")
    model = reload(repaired(project, removed, method=method, ridge=1e-2, rank=5, growth=False), trust_remote_code=True)
    logits = plain_logits(model, PROMPT)
    assert relative_gap(logits, plain_logits(expected(project, removed, plain_operators(project)), PROMPT)) < 1e-5
    same_with_cache(model, PROMPT)
    table = pd.read_csv(project.data / "ghost.csv")
    assert (table.operator == method).all() and len(table) == len(model.config.ghosts) == 2 - (
        0 not in removed or 3 not in removed
    )
    assert np.isfinite(table.drop(columns=["operator", "sink_error"]).to_numpy(dtype=float)).all()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_blocks_one_by_one(family: str, copied: Finished) -> None:
    """Each removed block has the map of its own step; adjacent ones act in their order behind the same kept block."""
    project = copied(family)
    removed = [0, 1, 3]
    model = reload(repaired(project, removed, per="block", ridge=1e-2), trust_remote_code=True)
    operators = plain_operators(project)
    assert list(operators) == [(0, 1), (1, 2), (3, 4)]
    file = load_file(project.data / "ghost.safetensors")
    for start in removed:
        exact = oracle(rows_of(project, start, 0, 5), rows_of(project, start + 1, 0, 5), 1e-2)
        torch.testing.assert_close(file[f"runs.{start}-{start + 1}"].double(), exact, rtol=1e-5, atol=1e-6)
    assert relative_gap(plain_logits(model, PROMPT), plain_logits(expected(project, removed, operators), PROMPT)) < 1e-5
    same_with_cache(model, PROMPT)
    assert list(pd.read_csv(project.data / "ghost_growth.csv").boundary) == [2, 3, 4]


def test_the_sequential_fit_sees_what_the_student_sees(copied: Finished) -> None:
    """Inputs are those of the masked and already repaired model, by hooks on the plain one; targets are dense."""
    project = copied("gpt2")
    removed, ids = [1, 3], load_file(project.data / "tokens.safetensors")["calibration"]
    model = reload(repaired(project, removed, fit="sequential", ridge=1e-2), trust_remote_code=True)
    file, operators = load_file(project.data / "ghost.safetensors"), plain_operators(project)
    for start in removed:
        earlier = {run: one for run, one in operators.items() if run[0] < start}
        x = plain_boundaries(expected(project, removed, earlier), ids)[start][:5].flatten(0, 1).double()
        exact = oracle(x, rows_of(project, start + 1, 0, 5), 1e-2)
        torch.testing.assert_close(file[f"runs.{start}-{start + 1}"].double(), exact, rtol=1e-4, atol=1e-5)
    assert relative_gap(plain_logits(model, PROMPT), plain_logits(expected(project, removed, operators), PROMPT)) < 1e-5
    growth = pd.read_csv(project.data / "ghost_growth.csv")
    dense = plain_boundaries(project.model, ids)[-1][5:]
    for name, some in (("restored", operators), ("removed", None)):
        # the last block is removed: what the stage writes is the stream behind its operator
        student = plain_boundaries(expected(project, removed, some), ids)[-1][5:]
        told = float(growth[growth.boundary == 4][name].item())
        assert told == pytest.approx(float((student - dense).norm() / dense.norm()), rel=1e-4)


def test_one_run_without_masks_is_the_same_at_once_and_sequentially(copied: Finished) -> None:
    project = copied("llama")
    project.run("allocation", allocation={"sparsity": 0.0})
    project.run("masking")
    found = []
    for fit in ("at_once", "sequential"):
        repaired(project, [1, 2], fit=fit)
        found.append(load_file(project.data / "ghost.safetensors")["runs.1-3"])
    assert torch.equal(*found)


def test_growth_is_that_of_the_export_whatever_the_fit_reads(copied: Finished) -> None:
    """Fitted at once from the dense tape, but followed through the masked blocks that the export has."""
    project = copied("llama")
    model = reload(repaired(project, [1], ridge=1e-2), trust_remote_code=True)
    ids = load_file(project.data / "tokens.safetensors")["calibration"]
    growth = pd.read_csv(project.data / "ghost_growth.csv")
    dense = plain_boundaries(project.model, ids)[-1][5:]
    student = plain_boundaries(expected(project, [1], plain_operators(project)), ids)[-1][5:]
    assert float(growth.restored.iloc[-1]) == pytest.approx(float((student - dense).norm() / dense.norm()), rel=1e-4)
    assert relative_gap(plain_boundaries(model, ids)[-1][5:], student) < 1e-5


@pytest.mark.parametrize(
    ("ridge", "said"),
    [
        ({"ridge_rule": "relative", "ridge": 0.0}, r"ridge raised from 0 to 1e-\d+\n"),
        ({"ridge_rule": "absolute", "ridge": 1e-12}, r"ridge raised from 1e-12 to \S+ \(absolute\)\n"),
        ({"ridge_rule": "held_out", "ridge_grid": [0.0]}, r"ridge raised from 0 to 1e-\d+\n"),
    ],
)
def test_a_ridge_that_had_to_be_raised_is_said(ridge: dict[str, Any], said: str, copied: Finished, capsys: Any) -> None:
    """Fifteen tokens for 32 channels: the Gram is singular."""
    project = copied("llama")
    repaired(project, [1], held_out=0.9, growth=False, **ridge)
    assert re.search(said, capsys.readouterr().out)
    repaired(project, [1], held_out=0.9, growth=False, ridge_rule="absolute", ridge=1.0)
    assert "raised" not in capsys.readouterr().out


@pytest.mark.parametrize("fit", ["at_once", "sequential"])
@pytest.mark.parametrize(
    ("family", "matrix"), [("llama", "mlp.down_proj"), ("gpt2", "mlp.c_proj"), ("neox", "mlp.dense_4h_to_h")]
)
def test_replaceme_changes_one_matrix_and_adds_nothing(family: str, matrix: str, fit: str, copied: Finished) -> None:
    project = copied(family)
    removed = [1, 2]
    model = reload(repaired(project, removed, method="replaceme", ridge=1e-2, fit=fit), trust_remote_code=False)
    assert type(model) is type(project.model)
    detail = TensorFile(project.data / "ghost.safetensors").metadata["operators"]["runs.1-3"]
    assert detail["into"] == matrix
    fold = load_file(project.data / "ghost.safetensors")["runs.1-3.fold"]

    ids = load_file(project.data / "tokens.safetensors")["calibration"]
    source = expected(project, removed, None) if fit == "sequential" else project.model
    seen: list[Tensor] = []
    module: Any = blocks_of(source)[0].get_submodule(matrix)
    handle = module.register_forward_hook(lambda _, args, out: seen.append(out))
    before = plain_boundaries(source, ids)[1][:5].flatten(0, 1).double()
    handle.remove()
    a, y = seen[0].view(*ids.shape, -1)[:5].flatten(0, 1).double(), rows_of(project, 3, 0, 5)
    exact = oracle(a, a + y - before, 1e-2)
    torch.testing.assert_close(fold.double(), exact, rtol=1e-3, atol=1e-4)

    twin = expected(project, removed, None)
    inner: Any = blocks_of(twin)[0].get_submodule(matrix)
    weight = matrix_of(blocks_of(twin)[0], matrix)
    weight += fold.T @ weight
    if inner.bias is not None:
        inner.bias.data += inner.bias.data @ fold
    assert relative_gap(plain_logits(model, PROMPT), plain_logits(twin, PROMPT)) < 1e-5
    project.run("evaluation@compressed")
    told = json.loads((project.data / "evaluation" / "compressed.json").read_text())
    windows = load_file(project.data / "tokens.safetensors")["evaluation"]
    np.testing.assert_allclose(told["windows"], plain_losses(twin, windows), rtol=1e-5)
    growth = pd.read_csv(project.data / "ghost_growth.csv")
    assert list(growth.boundary) == [1, 3, 4] and np.isfinite(growth.to_numpy()).all()
    card = (project.data / "compressed" / "README.md").read_text()
    assert f"the matrix `{matrix}` of block 0 was changed" in card and "trust_remote_code" not in card
    masks = pd.read_csv(project.data / "masks.csv").query("block in [0, 3]")
    zeros = (masks.sparsity * masks.parameters)[~((masks.block == 0) & (masks.matrix == matrix))]
    assert f"- {zeros.sum() / masks.parameters.sum():.4f} of the prunable weights" in card, "a fold fills its matrix"


@pytest.mark.parametrize(("family", "why"), [("gemma2", "a norm behind it"), ("olmo2", "a norm"), ("mixtral", "experts")])
def test_replaceme_says_where_it_cannot_fold(family: str, why: str, copied: Finished) -> None:
    with pytest.raises(PalimpsestError, match=rf"replaceme has nothing to fold into: no matrix of block 0 .*{why}"):
        repaired(copied(family), [1], method="replaceme")


def planted(root: Path, family: str) -> Project:
    """A model in which two tokens have enormous embeddings; one opens every window, the other stands inside most of them."""
    project = Project(root, family)
    embedding = project.model.get_input_embeddings().weight.data
    embedding[[FIRST, INNER]] *= 200
    project.model.save_pretrained(project.data / "model")
    tokens = load_file(project.data / "tokens.safetensors")
    for ids in tokens.values():
        ids[(ids == FIRST) | (ids == INNER)] = 8
        ids[:, 0] = FIRST
        for window in range(len(ids) - 1):
            ids[window, 3 + window] = INNER
    write_tensors(project.data / "tokens.safetensors", tokens, {"evaluation": {"corpus": "random"}})
    project.run_until("masking")
    return project


def restoring(project: Project, removed: list[int], ids: Tensor, action: str = "restore") -> dict[tuple[int, int], Any]:
    """The operators as functions of a whole stream of tokens `ids`, sinks put back by hand."""
    file, plain = load_file(project.data / "ghost.safetensors"), plain_operators(project)
    runs = {}
    for (start, stop), step in plain.items():
        targets = file.get(f"runs.{start}-{stop}.targets")

        def act(x: Tensor, step: Any = step, targets: Any = targets) -> Tensor:
            y, inner = step(x), (ids == INNER).clone()
            inner[:, 0] = False
            y[:, 0] = x[:, 0] if action == "bypass" else targets[0]
            y[inner] = x[inner] if action == "bypass" else targets[1]
            return y

        runs[start, stop] = act
    return runs


@pytest.fixture(scope="module")
def with_sinks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Project]:
    """`with_sinks(family)`: a planted project; copy it before changing it."""
    made: dict[str, Project] = {}

    def make(family: str) -> Project:
        if family not in made:
            made[family] = planted(tmp_path_factory.mktemp(family), family)
        return made[family]

    return make


TEXT = PROMPT.clone()
TEXT[:, 0], TEXT[0, 4], TEXT[1, 7] = FIRST, INNER, INNER
SINK_FAMILIES = ["llama", "gpt2", "gemma2", "falcon", "opt", "mistral_sliding", "qwen3_moe"]


@pytest.mark.parametrize("family", SINK_FAMILIES)
def test_restored_sinks_in_every_way_the_model_runs(family: str, with_sinks: Any, tmp_path: Path) -> None:
    """Streamed by `evaluation`, whole, with a cache, with texts padded on the left, saved and loaded again: always the same."""
    project = copy_project(with_sinks(family), tmp_path / "copy")
    removed = [1, 2]
    folder = repaired(project, removed, sinks="restore", ridge=1e-2)
    apart = TensorFile(project.data / "ghost.safetensors").metadata["operators"]["runs.1-3"]["sinks"]
    assert apart == {"action": "restore", "first": True, "ids": [INNER]}
    target = load_file(project.data / "ghost.safetensors")["runs.1-3.targets"]
    dense = load_file(project.data / "tape.safetensors")["boundary.0003"][:5]
    torch.testing.assert_close(target[0], dense[:, 0].mean(0), rtol=1e-4, atol=1e-4)

    model = reload(folder, trust_remote_code=True)
    logits = plain_logits(model, TEXT)
    assert relative_gap(logits, plain_logits(expected(project, removed, restoring(project, removed, TEXT)), TEXT)) < 1e-5
    assert relative_gap(logits, plain_logits(expected(project, removed, plain_operators(project)), TEXT)) > 1e-3
    project.run("evaluation@compressed")
    told = json.loads((project.data / "evaluation" / "compressed.json").read_text())["windows"]
    ids = load_file(project.data / "tokens.safetensors")["evaluation"]
    np.testing.assert_allclose(told, plain_losses(expected(project, removed, restoring(project, removed, ids)), ids), rtol=1e-5)

    text = same_with_cache(model, TEXT)
    same_with_cache(model, TEXT, sequence_bias={(INNER,): 1e9})  # every token made is a sink
    if family != "opt":  # its positions count from the mask; all others are given position_ids by generate
        padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), TEXT], 1)
        mask = (torch.arange(12) >= 3).long().expand(2, -1)
        assert torch.equal(same_with_cache(model, padded, attention_mask=mask)[:, 3:], text)
    model.save_pretrained(tmp_path / "again")
    again = reload(tmp_path / "again", trust_remote_code=True)
    assert torch.equal(plain_logits(again, TEXT), logits)


@pytest.mark.parametrize("family", SINK_FAMILIES)
def test_the_bare_model_gives_what_the_whole_one_has_inside(family: str, with_sinks: Any, tmp_path: Path) -> None:
    project = copy_project(with_sinks(family), tmp_path / "copy")
    folder = repaired(project, [1, 2], sinks="restore", ridge=1e-2)
    bare, report = transformers.AutoModel.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
    assert not report["missing_keys"] and "CausalLM" not in type(bare).__name__
    with torch.no_grad():
        inside = reload(folder, trust_remote_code=True).base_model(TEXT).last_hidden_state
        assert torch.equal(bare.eval()(TEXT).last_hidden_state, inside)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "falcon", "mistral_sliding"])
def test_the_first_token_is_known_however_masks_and_positions_come(family: str, with_sinks: Any, tmp_path: Path) -> None:
    """Padded texts with a static cache (the model is given masks [batch, head, token, key]), and packed ones."""
    project = copy_project(with_sinks(family), tmp_path / "copy")
    model = reload(repaired(project, [1, 2], sinks="restore", ridge=1e-2), trust_remote_code=True)
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), TEXT], 1)
    mask = (torch.arange(12) >= 3).long().expand(2, -1)
    settings: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    settings |= {"return_dict_in_generate": True, "output_logits": True}
    alone = model.generate(TEXT, attention_mask=torch.ones_like(TEXT), **settings)
    static = model.generate(padded, attention_mask=mask, cache_implementation="static", **settings)
    assert torch.equal(static.sequences[:, 3:], alone.sequences)
    for one, other in zip(static.logits, alone.logits, strict=True):
        assert relative_gap(one, other) < 1e-4

    wanted, length = plain_logits(model, TEXT), TEXT.shape[1]
    packed, places = TEXT.reshape(1, -1), torch.arange(length).repeat(2)[None]
    text = torch.arange(2).repeat_interleave(length)
    blocks = (text[:, None] == text) & torch.ones(2 * length, 2 * length, dtype=torch.bool).tril()
    with torch.no_grad():
        gaps = []
        if family in ("llama", "gpt2"):  # the others make masks of their own beside the one they are given
            gaps.append(model(packed, attention_mask=blocks[None, None], position_ids=places, use_cache=False).logits)
        if family == "llama":
            gaps.append(model(packed, position_ids=places, use_cache=False).logits)
            additive = torch.zeros(blocks.shape).masked_fill(~blocks, torch.finfo(torch.float32).min)
            gaps.append(model(packed, additive[None, None], places, use_cache=False).logits)
            shifted = model(padded, mask, use_cache=False).logits[:, 3:]  # not by name, and rotary positions are relative
            gaps.append(shifted.reshape(1, 2 * length, -1))
    for found in gaps:
        assert relative_gap(found.view(wanted.shape), wanted) < 1e-4


def test_a_mask_that_does_not_tell_the_first_token_is_refused(with_sinks: Any, tmp_path: Path) -> None:
    project = copy_project(with_sinks("llama"), tmp_path / "copy")
    model = reload(repaired(project, [1, 2], sinks="restore", ridge=1e-2), trust_remote_code=True)
    with pytest.raises(ValueError, match="does not say which one it is: give position_ids, a mask"):
        model.note_inputs(input_ids=TEXT, attention_mask=object())
    model.note_inputs(input_ids=TEXT, attention_mask=object(), position_ids=torch.arange(TEXT.shape[1])[None])
    assert model.noted_inputs.first.nonzero().tolist() == [[0, 0]]


@pytest.mark.parametrize("removed", [[0], [3], [0, 2]])
@pytest.mark.parametrize("action", ["restore", "bypass"])
def test_sinks_at_the_ends(removed: list[int], action: str, with_sinks: Any, tmp_path: Path) -> None:
    project = copy_project(with_sinks("llama"), tmp_path / "copy")
    model = reload(repaired(project, removed, sinks=action, ridge=1e-2, fit="sequential"), trust_remote_code=True)
    operators = restoring(project, removed, TEXT, action)
    assert relative_gap(plain_logits(model, TEXT), plain_logits(expected(project, removed, operators), TEXT)) < 1e-5
    same_with_cache(model, TEXT)


def test_sinks_are_restored_without_an_operator(with_sinks: Any, tmp_path: Path) -> None:
    project = copy_project(with_sinks("llama"), tmp_path / "copy")
    model = reload(repaired(project, [1, 2], method="none", sinks="restore"), trust_remote_code=True)
    operators = restoring(project, [1, 2], TEXT)
    assert relative_gap(plain_logits(model, TEXT), plain_logits(expected(project, [1, 2], operators), TEXT)) < 1e-5
    assert pd.read_csv(project.data / "ghost.csv").rest_error.item() == pytest.approx(1)


@pytest.mark.parametrize(("fit", "per"), [("at_once", "run"), ("sequential", "block")])
def test_no_operator_where_there_is_no_sink_to_restore(fit: str, per: str, copied: Finished, capsys: Any) -> None:
    """Nothing stands in for any run, or for one of them; the stages that follow take it as it is."""
    project = copied("llama")
    model = reload(repaired(project, [1, 3], method="none", sinks="restore", fit=fit, per=per), trust_remote_code=False)
    assert "block 1: no sink that a rule tells, so no operator" in capsys.readouterr().out
    assert relative_gap(plain_logits(model, TEXT), plain_logits(expected(project, [1, 3], None), TEXT)) < 1e-5
    project.run("evaluation@compressed")
    assert not len(pd.read_csv(project.data / "ghost.csv")) and not len(pd.read_csv(project.data / "ghost_growth.csv"))


def test_one_run_has_sinks_and_the_other_none(with_sinks: Any, tmp_path: Path) -> None:
    project = copy_project(with_sinks("llama"), tmp_path / "copy")
    tape = load_file(project.data / "tape.safetensors")
    for boundary in (3, 4):  # as if block 2 had put its sinks away
        tape[f"boundary.000{boundary}"] *= 0.5 / tape[f"boundary.000{boundary}"].norm(dim=-1, keepdim=True)
    write_tensors(project.data / "tape.safetensors", tape, TensorFile(project.data / "tape.safetensors").metadata)
    model = reload(repaired(project, [1, 3], method="none", sinks="restore"), trust_remote_code=True)
    assert list(pd.read_csv(project.data / "ghost.csv").start) == [1] and len(model.config.ghosts) == 1
    operators = restoring(project, [1, 3], TEXT)
    assert list(operators) == [(1, 2)]
    assert relative_gap(plain_logits(model, TEXT), plain_logits(expected(project, [1, 3], operators), TEXT)) < 1e-5
    project.run("evaluation@compressed")


def test_restored_sinks_that_are_worse_than_left_alone_are_named(with_sinks: Any, tmp_path: Path, capsys: Any) -> None:
    """The held-out window's first token is another than in the windows that the targets are from."""
    project = copy_project(with_sinks("llama"), tmp_path / "copy")
    tape = load_file(project.data / "tape.safetensors")
    tape["boundary.0003"][:5, 0] *= -1
    write_tensors(project.data / "tape.safetensors", tape, TensorFile(project.data / "tape.safetensors").metadata)
    repaired(project, [1, 2], sinks="restore", ridge=1e-2, growth=False)
    assert "blocks 1 to 2: restored sinks are off by" in capsys.readouterr().out
    assert pd.read_csv(project.data / "ghost.csv").sink_error.item() > 1


def test_errors_of_sinks_and_of_the_rest(with_sinks: Any, tmp_path: Path) -> None:
    """Kept in the fit, out of it, or light in it: errors are over held-out windows, by the tokens' own numbers."""
    project = copy_project(with_sinks("gpt2"), tmp_path / "copy")
    ids = load_file(project.data / "tokens.safetensors")["calibration"][5:]
    apart = (ids == INNER).clone()
    apart[:, 0] = True
    x, y = (load_file(project.data / "tape.safetensors")[f"boundary.000{b}"][5:].double() for b in (1, 3))
    for sinks in ("keep", "weight", "bypass", "restore"):
        repaired(project, [1, 2], sinks=sinks, ridge=1e-2)
        row = pd.read_csv(project.data / "ghost.csv").iloc[0]
        operator = plain_operators(project)[1, 3] if sinks in ("keep", "weight") else restoring(project, [1, 2], ids, sinks)[1, 3]
        gap = operator(x.float()).double() - y
        assert row.rest_error == pytest.approx(float(gap[~apart].norm() / (y - x)[~apart].norm()), rel=1e-4)
        assert row.sink_error == pytest.approx(float(gap[apart].norm() / (y - x)[apart].norm()), rel=1e-4)
        every = float(gap.norm() / (y - x).norm())
        assert row.heldout_error == pytest.approx(every if sinks in ("keep", "weight") else row.rest_error, rel=1e-4)
        assert row.sinks == 6 + 5


def test_float32_accumulation_is_asked_for_and_done(tmp_path: Path) -> None:
    project = Project(tmp_path, "llama", blocks=3)
    project.model.to(torch.bfloat16).save_pretrained(project.data / "model")
    project.run_until("masking")
    logits = {}
    for accumulate in ("model", "float32"):
        model = reload(repaired(project, [1], accumulate=accumulate), trust_remote_code=True)
        ghost = blocks_of_export(model)[0].ghost_after[0]
        hidden = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
        weight = ghost.linear.weight
        whole = hidden.float() + hidden.float() @ weight.float().T
        logits[accumulate] = ghost(hidden)
        gap = float((logits[accumulate].float() - whole).abs().max())
        assert weight.dtype == torch.bfloat16 and gap < 0.1
        if accumulate == "float32":
            assert torch.equal(logits[accumulate], whole.bfloat16())
    assert not torch.equal(logits["model"], logits["float32"])


def blocks_of_export(model: Any) -> Any:
    return model.model.layers


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": "replaceme", "sinks": "restore"}, "replaceme is folded into the weights and cannot treat tokens apart"),
        ({"method": "replaceme", "per": "block"}, "per should be run"),
        ({"ridge_grid": [0.1, -1.0]}, r"ghost\.ridge_grid.*ridges should be 0 or more"),
        ({"sink_threshold": 1.0}, r"ghost\.sink_threshold = 1\.0: should be greater than 1"),
        ({"method": "ghosts"}, r"ghost\.method = 'ghosts'.*'linearpatch_diag'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        check_sections({"ghost": values}, {"ghost": Ghost})


def test_what_this_model_cannot_have_is_refused_before_any_work(copied: Finished) -> None:
    project = copied("llama")
    with pytest.raises(PalimpsestError, match=r"ghost\.rank = 33: the stream has 32 channels; allowed: 1 to 32"):
        repaired(project, [1], method="ghost_lowrank", rank=33)
    with pytest.raises(PalimpsestError, match=r"replaceme.*block 0 is removed, and no block before it"):
        repaired(project, [0, 2], method="replaceme")


def test_a_width_without_a_hadamard_matrix_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = lambda blocks: transformers.GPT2Config(vocab_size=96, n_embd=30, n_layer=blocks, n_head=3, n_positions=64)  # noqa: E731
    monkeypatch.setitem(FAMILIES, "odd", odd)
    project = Project(tmp_path, "odd", blocks=3)
    project.run_until("masking")
    for method in ("linearpatch_rotate", "least_squares_rotate"):
        with pytest.raises(PalimpsestError, match="no Hadamard matrix for a stream of 30 channels"):
            repaired(project, [1], method=method)
    assert math.isfinite(repaired(project, [1], method="linearpatch_diag").stat().st_size)


def test_a_tape_of_other_windows_is_refused(copied: Finished) -> None:
    project = copied("llama")
    tokens = load_file(project.data / "tokens.safetensors")
    tokens["calibration"] = tokens["calibration"][:4]
    write_tensors(project.data / "tokens.safetensors", tokens)
    with pytest.raises(PalimpsestError, match=r"6 windows of 16 tokens, but there are 4 calibration windows of 16"):
        project.run("ghost")

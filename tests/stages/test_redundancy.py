"""Cosines of the tape, window by window, against torch's own."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.tensors import write_tensors
from stages.decoder.tape import Tape
from stages.decoder.wavefront import Prompts
from stages.redundancy import Redundancy
from stages.redundancy.run import SWAPS, _pair_rows, _verdict
from tests.project import Project
from tests.stages.conftest import Finished
from tests.stages.test_wavefront import plain_kl, rewired


def boundaries(project: Project) -> torch.Tensor:
    """[boundary, window, token, channel]."""
    return torch.stack([value for _, value in sorted(load_file(project.data / "tape.safetensors").items())]).double()


def check(project: Project) -> None:
    tape = boundaries(project)
    pairs = pd.read_csv(project.data / "redundancy_pairs.csv")
    assert list(pairs.columns[:3]) == ["i", "j", "cosine"]
    assert list(zip(pairs.i, pairs.j, strict=True)) == list(combinations(range(len(tape)), 2))
    windows = {
        (i, j): torch.cosine_similarity(tape[i], tape[j], dim=-1).mean(-1).numpy() for i, j in combinations(range(len(tape)), 2)
    }
    np.testing.assert_allclose(pairs.cosine, [windows[i, j].mean() for i, j in zip(pairs.i, pairs.j, strict=True)], atol=1e-6)
    blocks = pd.read_csv(project.data / "redundancy_blocks.csv")
    assert list(blocks.columns[:3]) == ["block", "influence", "influence_error"] and list(blocks.block) == list(
        range(len(tape) - 1)
    )
    steps = [windows[block, block + 1] for block in blocks.block]
    np.testing.assert_allclose(blocks.influence, [1 - step.mean() for step in steps], atol=1e-6)
    errors = [step.std(ddof=1) / len(step) ** 0.5 if len(step) > 1 else 0 for step in steps]
    np.testing.assert_allclose(blocks.influence_error, errors, atol=1e-6)
    stored = load_file(project.data / "redundancy.safetensors")["cosine"]
    assert stored.shape == (tape.shape[1], len(tape), len(tape))
    for (i, j), expected in windows.items():
        np.testing.assert_allclose(stored[:, i, j], expected, atol=1e-6)
        np.testing.assert_allclose(stored[:, j, i], expected, atol=1e-6)


@pytest.mark.parametrize("batch_tokens", [1, 32, 10**6])
def test_cosines_are_per_token_and_averaged(batch_tokens: int, copied: Finished) -> None:
    project = copied("llama")
    project.run("redundancy", compute={"batch_tokens": batch_tokens})
    check(project)


def test_a_single_window_has_no_error(tmp_path: Path) -> None:
    project = Project(tmp_path, blocks=2, windows=1)
    project.run("capture")
    project.run("redundancy")
    check(project)
    assert (pd.read_csv(project.data / "redundancy_blocks.csv").influence_error == 0).all()


def test_a_block_that_does_nothing_has_no_influence(copied: Finished) -> None:
    project = copied("llama")
    path = project.data / "model" / "model.safetensors"
    tensors = load_file(path)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"model.layers.2.{name}.weight"].zero_()
    save_file(tensors, path, metadata={"format": "pt"})
    project.run("capture")
    project.run("redundancy")
    influence = pd.read_csv(project.data / "redundancy_blocks.csv").influence
    assert 0 <= influence[2] < 1e-6 and influence.drop(2).min() > 1e-3
    for method in ("streamline", "shortgpt"):
        project.run("removal", removal={"method": method, "count": 1})
        assert '"removed": [\n  2\n ]' in (project.data / "removal.json").read_text()


def test_a_zero_stream_is_like_nothing(copied: Finished) -> None:
    """An embedding of zero, say for padding, must not become NaN."""
    project = copied("llama")
    tape = load_file(project.data / "tape.safetensors")
    tape["boundary.0000"][:, 0] = 0
    write_tensors(project.data / "tape.safetensors", tape)
    project.run("redundancy")
    check(project)


def swaps(project: Project) -> tuple[pd.DataFrame, pd.DataFrame, dict[str, Any]]:
    """The pairs that were measured, the blocks, and the verdict."""
    pairs = pd.read_csv(project.data / "redundancy_pairs.csv")
    verdict = json.loads((project.data / "redundancy.json").read_text())
    return pairs.loc[pairs.interchange.notna()], pd.read_csv(project.data / "redundancy_blocks.csv"), verdict


def test_swaps_are_those_of_the_plain_model(copied: Finished) -> None:
    """Means over prompts of KL(dense || variant), each against the plain model rewired."""
    project = copied("llama")
    project.run("redundancy", redundancy={"gap": 3, "prompts": 4, "length": 10})
    pairs, blocks, verdict = swaps(project)
    ids = load_file(project.data / "tokens.safetensors")["calibration"][:4, :10]
    assert list(zip(pairs.i, pairs.j, strict=True)) == list(combinations(range(4), 2))
    stored = load_file(project.data / "redundancy.safetensors")
    for row, (i, j) in enumerate(combinations(range(4), 2)):
        for column, slots in (("replacement_ij", {i: j}), ("replacement_ji", {j: i}), ("interchange", {i: j, j: i})):
            kl = plain_kl(project.model, rewired(project.model, [slots.get(slot, slot) for slot in range(4)]), ids)
            assert pairs[column].iloc[row] == pytest.approx(float(kl.mean()), rel=1e-4, abs=1e-5)
            torch.testing.assert_close(stored[column][row], kl, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(pairs.replacement, pairs[["replacement_ij", "replacement_ji"]].max(axis=1))
    np.testing.assert_allclose(pairs.gap, pairs.replacement - pairs.interchange)
    assert (pairs.interchange_low <= pairs.interchange).all() and (pairs.interchange <= pairs.interchange_high).all()
    for block in range(4):
        kl = plain_kl(project.model, rewired(project.model, [None if slot == block else slot for slot in range(4)]), ids)
        assert blocks.deletion[block] == pytest.approx(float(kl.mean()), rel=1e-4, abs=1e-5)
    assert verdict["prompts"] == 4 and set(verdict["half_against_all"]) == {*swap_names, "deletion"}
    assert verdict["pairs"] == 1, "inner neighbours alone: blocks 1 and 2"


swap_names = ("replacement_ij", "replacement_ji", "interchange")


def test_duplicated_blocks_are_interchangeable(copied: Finished) -> None:
    """Blocks 1 and 2 of equal weights: no swap of them changes anything; their neighbours do."""
    project = copied("llama")
    path = project.data / "model" / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.startswith("model.layers.1.")]:
        tensors[name.replace("layers.1.", "layers.2.")] = tensors[name].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    project.run("capture")
    project.run("redundancy")
    pairs, _, verdict = swaps(project)
    twins = (pairs.i == 1) & (pairs.j == 2)
    assert float(pairs.loc[twins, list(swap_names)].to_numpy().max()) < 1e-6
    assert float(pairs.loc[~twins, list(swap_names)].to_numpy().min()) > 1e-4
    assert verdict["regime"] == "tied"


def test_unlike_blocks_are_named_and_not_swapped(copied: Finished) -> None:
    project = copied("gemma3")
    project.run("redundancy", redundancy={"gap": 2})
    pairs, blocks, verdict = swaps(project)
    assert (blocks.type.to_numpy()[pairs.i] == blocks.type.to_numpy()[pairs.j]).all()
    unlike = {(one["i"], one["j"]) for one in verdict["unlike_pairs"]}
    assert len(unlike) and unlike | set(zip(pairs.i, pairs.j, strict=True)) == {
        (i, j) for i, j in combinations(range(4), 2) if j - i < 3
    }
    assert all(one["types"][0] != one["types"][1] for one in verdict["unlike_pairs"])


def test_a_model_without_alike_neighbours_says_that(copied: Finished) -> None:
    project = copied("gemma3")
    table = pd.DataFrame({"i": [1, 1], "j": [2, 3], "replacement": [float("nan"), 1.0], "interchange": [float("nan"), 1.0]})
    prompts = Prompts(Tape(project.data / "tape.safetensors"), 1, 4)
    blocks = pd.DataFrame({"block": range(4), "sink": ""})
    empty = np.zeros((1, 0))
    found = _verdict(table, blocks, empty, np.zeros((1, len(SWAPS), 0)), [(1, 2)], ["a", "b", "c", "d"], prompts, Redundancy())
    assert found["note"] == "regime and gap are not known: the model has no two adjacent inner blocks of one type"


def test_without_swaps_only_streams_are_compared(copied: Finished) -> None:
    project = copied("llama")
    project.run("redundancy", redundancy={"swaps": False})
    check(project)
    pairs, blocks, verdict = swaps(project)
    assert not len(pairs) and blocks.deletion.isna().all() and not verdict["measured"]
    assert set(load_file(project.data / "redundancy.safetensors")) == {"cosine"}


def test_other_comparisons_of_streams(finished: Finished) -> None:
    """Cosines along tokens, angles and alignments against formulas in the space of tokens."""
    project = finished("llama")
    tape = torch.stack([value for _, value in sorted(load_file(project.data / "tape.safetensors").items())])
    pairs = pd.read_csv(project.data / "redundancy_pairs.csv")
    blocks = pd.read_csv(project.data / "redundancy_blocks.csv")
    for row in pairs.to_dict("records"):
        one, other = tape[row["i"]], tape[row["j"]]
        cosine = torch.cosine_similarity(one, other, dim=-1)
        assert row["cosine_channel"] == pytest.approx(float(torch.cosine_similarity(one, other, dim=1).mean()), abs=1e-5)
        assert row["angular"] == pytest.approx(float(cosine.clamp(-1, 1).double().arccos().mean() / np.pi), abs=1e-5)
    for row in blocks.to_dict("records"):
        x, y = (
            one.flatten(0, 1).double() - one.flatten(0, 1).double().mean(0)
            for one in (tape[row["block"]], tape[row["block"] + 1])
        )
        k, l = x @ x.T, y @ y.T  # noqa: E741
        assert row["cka"] == pytest.approx(float((k * l).sum() / (k.norm() * l.norm())), rel=1e-4)


def test_sink_tokens_are_left_out_of_one_cosine(copied: Finished) -> None:
    """A first token of enormous norm from boundary 2 to boundary 3."""
    project = copied("llama")
    tape = load_file(project.data / "tape.safetensors")
    for boundary in ("boundary.0002", "boundary.0003"):
        tape[boundary][:, 0, 5] = 5000.0
    write_tensors(project.data / "tape.safetensors", tape)
    project.run("redundancy", redundancy={"swaps": False})
    pairs, blocks = (pd.read_csv(project.data / f"redundancy_{name}.csv") for name in ("pairs", "blocks"))
    one, other = tape["boundary.0001"][:, 1:], tape["boundary.0002"][:, 1:]
    row = pairs[(pairs.i == 1) & (pairs.j == 2)].iloc[0]
    assert row.cosine_sinkless == pytest.approx(float(torch.cosine_similarity(one, other, dim=-1).mean()), abs=1e-6)
    assert list(blocks.sink.fillna("")) == ["", "makes", "", "ends"]
    assert json.loads((project.data / "redundancy.json").read_text())["sink_made_by"] == [1]


def test_a_channel_large_in_all_tokens_is_no_sink(copied: Finished) -> None:
    project = copied("llama")
    tape = load_file(project.data / "tape.safetensors")
    for boundary in ("boundary.0002", "boundary.0003"):
        tape[boundary][:, :, 5] = 5000.0
    write_tensors(project.data / "tape.safetensors", tape)
    project.run("redundancy", redundancy={"swaps": False})
    assert pd.read_csv(project.data / "redundancy_blocks.csv").sink.isna().all()
    assert json.loads((project.data / "redundancy.json").read_text())["sink_made_by"] == []


@pytest.mark.parametrize("lost", [0, 1])
def test_a_pair_with_one_direction_that_is_not_finite_has_no_replacement(lost: int) -> None:
    swapped = np.full((1, 3, 4), 0.25)
    swapped[0, lost, 2] = np.nan
    square = torch.ones(4, 4, dtype=torch.float64)
    alike = {"windows": square[None], "sinkless": square, "channel": square, "angular": square}
    row = _pair_rows(alike, 4, [(1, 2)], swapped, Redundancy()).set_index(["i", "j"]).loc[(1, 2)]
    assert np.isnan(row[["replacement", "replacement_low", "replacement_high", "gap", "ratio"]].to_numpy(float)).all()
    assert row.interchange == 0.25 and row[f"replacement_{'ji' if lost == 0 else 'ij'}"] == 0.25

"""Masks and mended weights are those of the published algorithms on the whole, plain model, entry by entry."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pipeline.errors import PalimpsestError
from pipeline.tensors import TensorFile, write_tensors
from stages.decoder.masks import HEAD, apply_masks, mask_name, read_mask
from stages.masking.memory import gram_bytes
from stages.masking.methods import METHODS
from tests.models import FAMILIES, _config
from tests.plain import blocks_of, matrix_inputs, matrix_of, plain_losses, plain_variant, read_masks, relative_gap
from tests.project import Project
from tests.published import prune_matrix
from tests.stages.conftest import Finished

MASKING: dict[str, Any] = {"pattern": "unstructured", "comparison": "published", "rounding": "exact", "activations": "pruned"}
Masks = dict[tuple[int, str], torch.Tensor]


def plain_masks(
    project: Project, share: float, sequential: bool, method: str = "wanda", exact: bool = True, **settings: Any
) -> tuple[Masks, Masks]:
    """(masks, matrices after pruning). Block by block: the whole model forward, prune; if sequential, go on with what is left."""
    model = copy.deepcopy(project.model)
    dense = copy.deepcopy(project.model)
    ids = load_file(project.data / "tokens.safetensors")["calibration"]
    names = [name for block, name in read_masks(project.data / "masks.safetensors", model) if block == 0]
    masks: Masks = {}
    pruned: Masks = {}
    for index, block in enumerate(blocks_of(model)):
        inputs = matrix_inputs(model if sequential else dense, index, ids, names)
        for name in names:
            weight = matrix_of(block, name).clone()
            gone, pruned[index, name] = prune_matrix(weight, inputs[name], len(ids), method, share, exact=exact, **settings)
            masks[index, name] = ~gone
        for name in names:
            matrix_of(block, name).copy_(pruned[index, name])
    return masks, pruned


def pruned_model(project: Project, path: Path) -> Any:
    """The whole, plain model with the blocks that a file of masks makes."""
    twin = plain_variant(project.model, masks=read_masks(path, project.model))
    for key, value in load_file(path).items():
        if key.startswith("weights.blocks."):
            _, _, block, name = key.split(".", 3)
            matrix_of(blocks_of(twin)[int(block)], name).copy_(value)
    return twin


def assert_equal(found: Masks, expected: Masks) -> None:
    assert set(found) == set(expected)
    for key, keep in expected.items():
        assert torch.equal(found[key], keep), f"{key}: {int((found[key] != keep).sum())} of {keep.numel()} differ"


WAYS: list[dict[str, Any]] = [
    {"method": "magnitude"},
    {"method": "magnitude", "comparison": "row"},
    {"method": "magnitude", "pattern": "2:4"},
    {"method": "wanda"},
    {"method": "wanda", "comparison": "layer"},
    {"method": "wanda", "pattern": "2:4"},
    {"method": "wanda", "pattern": "4:8"},
    {"method": "wanda_variant"},
    {"method": "sparsegpt"},
    {"method": "sparsegpt", "pattern": "2:4"},
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(way.values()))
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
def test_every_method_is_the_published_one(family: str, way: dict[str, Any], copied: Finished) -> None:
    """Entry by entry, and the weights that SparseGPT mends; from pruned and from dense inputs, in both roundings."""
    project = copied(family)
    group = tuple(map(int, way["pattern"].split(":"))) if "pattern" in way else None
    comparison = way.get("comparison", {"magnitude": "layer", "wanda": "row"}.get(way["method"], ""))
    for share, exact, activations in ((0.5, True, "pruned"), (0.5 if group else 0.37, bool(group), "tape")):
        if activations == "tape" and way["method"] == "magnitude":
            activations = "pruned"
        project.run("allocation", allocation={"sparsity": share})
        project.run(
            "masking", masking={**MASKING, **way, "rounding": "exact" if exact else "published", "activations": activations}
        )
        masks, pruned = plain_masks(
            project, share, activations == "pruned", way["method"], exact, group=group, comparison=comparison
        )
        path = project.data / "masks.safetensors"
        assert_equal(read_masks(path, project.model), masks)
        table = pd.read_csv(project.data / "masks.csv").set_index(["block", "matrix"])
        assert set(table.index) == set(masks) and set(table.method) == {way["method"]}
        for key, keep in masks.items():
            row = table.loc[key]
            weight = matrix_of(blocks_of(project.model)[key[0]], key[1]).abs().double()
            assert row["parameters"] == keep.numel() and row["sparsity_asked"] == share
            assert row["sparsity"] == pytest.approx(1 - int(keep.sum()) / keep.numel(), abs=1e-12)
            assert row["kept_magnitude"] == pytest.approx(float(weight[keep].sum() / weight.sum()), rel=1e-5)
            assert 0 < row["kept_score"] <= 1
        for (block, name), new in pruned.items() if way["method"] == "sparsegpt" else []:
            found = load_file(path)[f"weights.blocks.{block}.{name}"]
            assert relative_gap(found, new) < 3e-5  # the kernel's 1e-5, and float32 inputs that were added up in another order
        block = blocks_of(copy.deepcopy(project.model))[1]
        apply_masks(block, TensorFile(path), 1)
        for name in [name for index, name in masks if index == 1]:
            assert relative_gap(matrix_of(block, name), pruned[1, name]) < 3e-5


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
def test_what_weights_alone_decide_is_the_same_in_any_precision_of_forward_passes(family: str, copied: Finished) -> None:
    project = copied(family)
    single, half = (
        project.run("masking", compute={"dtype": dtype}, masking={"method": "magnitude"}).read_bytes()
        for dtype in ("float32", "bfloat16")
    )
    assert single == half


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
def test_mended_weights_are_as_precise_as_the_checkpoint_whatever_forward_passes_run_in(family: str, copied: Finished) -> None:
    """The first column is never mended: what stays of it is untouched. The last one is, and lies between bfloat16's numbers."""
    project = copied(family)
    path = project.run("masking", compute={"dtype": "bfloat16"}, masking={"method": "sparsegpt"})
    masks, stored = read_masks(path, project.model), load_file(path)
    for (block, name), keep in masks.items():
        new, old = stored[f"weights.blocks.{block}.{name}"], matrix_of(blocks_of(project.model)[block], name)
        assert new.dtype == torch.float32 and torch.equal(new[:, 0], old[:, 0] * keep[:, 0]), name
        last = new[:, -1][keep[:, -1]]
        assert not (last == last.bfloat16().float()).all(), name


def test_a_checkpoint_in_half_precision_gets_weights_in_its_own_dtype(copied: Finished) -> None:
    project = copied("llama")
    folder = project.data / "model" / "model.safetensors"
    half = {name: value.bfloat16() for name, value in load_file(folder).items()}
    save_file(half, folder, metadata={"format": "pt"})
    path = project.run("masking", compute={"dtype": "float16"}, masking={"method": "sparsegpt"})
    new = load_file(path)["weights.blocks.0.self_attn.q_proj"]
    keep = read_mask(TensorFile(path), mask_name(0, "self_attn.q_proj"), tuple(new.shape))
    old = half["model.layers.0.self_attn.q_proj.weight"]
    assert new.dtype == torch.bfloat16 and torch.equal(new[:, 0], old[:, 0] * keep[:, 0])


@pytest.mark.parametrize("batch_tokens", [1, 80, 10**6])
def test_the_size_of_batches_does_not_matter(batch_tokens: int, copied: Finished) -> None:
    project = copied("llama")
    before = read_masks(project.data / "masks.safetensors", project.model)
    project.run("masking", compute={"batch_tokens": batch_tokens})
    assert_equal(read_masks(project.data / "masks.safetensors", project.model), before)


@pytest.mark.parametrize("method", ["magnitude", "wanda", "wanda_variant", "sparsegpt"])
def test_without_sparsity_all_stay(method: str, copied: Finished) -> None:
    project = copied("llama")
    project.run("allocation", allocation={"sparsity": 0.0})
    masks = read_masks(project.run("masking", masking={"method": method}), project.model)
    assert all(keep.all() for keep in masks.values())
    project.run("evaluation@masked")
    dense, masked = ((project.data / "evaluation" / f"{name}.json").read_text() for name in ("dense", "masked"))
    assert masked.replace('"masked"', '"dense"') == dense


def test_a_share_per_matrix_wins_over_that_of_its_block(copied: Finished) -> None:
    """allocation.csv may be written by hand: `matrix` names the matrix, or is empty for the rest of the block."""
    project = copied("llama")
    rows: list[dict[str, Any]] = [{"block": block, "matrix": "", "sparsity": 0.25 * block} for block in range(4)]
    rows += [{"block": 2, "matrix": "mlp.up_proj", "sparsity": 0.75}, {"block": 0, "matrix": "self_attn.q_proj", "sparsity": 0.5}]
    pd.DataFrame(rows).to_csv(project.data / "allocation.csv", index=False)
    masks = read_masks(project.run("masking"), project.model)
    for (block, name), keep in masks.items():
        share = {(2, "mlp.up_proj"): 0.75, (0, "self_attn.q_proj"): 0.5}.get((block, name), 0.25 * block)
        assert int((~keep).sum()) == round(keep.numel() * share), (block, name)


def test_an_allocation_for_another_number_of_blocks_is_refused(copied: Finished) -> None:
    project = copied("llama")
    table = pd.read_csv(project.data / "allocation.csv")
    table[table.block < 3].to_csv(project.data / "allocation.csv", index=False)
    with pytest.raises(PalimpsestError, match=r"allocation\.csv has blocks \[0, 1, 2\], the model has 4"):
        project.run("masking")


def test_widths_that_fill_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, Any] = {"hidden_size": 20, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 27}
    monkeypatch.setitem(FAMILIES, "odd", _config("LlamaConfig", **sizes))
    project = Project(tmp_path, "odd", blocks=2)
    project.run_until("masking", allocation={"sparsity": 0.37})
    expected, _ = plain_masks(project, 0.37, sequential=True, comparison="row")
    assert_equal(read_masks(project.data / "masks.safetensors", project.model), expected)


def test_no_scratch_file_is_left(copied: Finished) -> None:
    project = copied("llama")
    before = sorted(path.name for path in project.data.rglob("*"))
    project.run("masking")
    project.run("evaluation@masked")
    assert sorted(path.name for path in project.data.rglob("*")) == before


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"method": "sparsegpt", "comparison": "row"}, "sparsegpt has no comparison by row; allowed: published"),
    ({"method": "wanda_variant", "comparison": "layer"}, "wanda_variant has no comparison by layer"),
    ({"method": "wanda_variant", "pattern": "2:4"}, "wanda_variant is unstructured"),
    ({"pattern": "2:4", "comparison": "layer"}, "compares within 4 inputs of a row"),
    ({"pattern": "4:4"}, "n below m"),
    ({"pattern": "two of four"}, "pattern"),
    ({"method": "sparsegpt", "pattern": "2:5"}, "multiple of 5"),
    ({"method": "hessian"}, "'magnitude', 'wanda', 'wanda_variant' or 'sparsegpt'"),
    ({"sparsegpt": {"damping": 0.0}}, "damping = 0.0: should be greater than 0"),
]


@pytest.mark.parametrize(("masking", "message"), REFUSED, ids=lambda one: str(one)[:30])
def test_what_does_not_go_together_is_refused(masking: dict[str, Any], message: str, copied: Finished) -> None:
    with pytest.raises(PalimpsestError, match=f"params.yaml: masking.*{message}"):
        copied("llama").run("masking", masking=masking)


@pytest.mark.parametrize(
    ("pattern", "share", "message"),
    [
        ("2:4", 0.6, r"'2:4' removes 0.5 of the weights, but the allocation's mean is 0.6; set allocation.sparsity: 0.5"),
        ("16:32", 0.5, r"mlp.down_proj of block 0 has 48 inputs, no multiple of 32"),
        ("32:64", 0.5, r"self_attn.q_proj of block 0 has 32 inputs, narrower than 64"),
    ],
)
def test_a_pattern_that_does_not_fit_is_refused_before_any_work(
    pattern: str, share: float, message: str, copied: Finished
) -> None:
    project = copied("llama")
    project.run("allocation", allocation={"sparsity": share})
    (project.data / "masks.safetensors").unlink()
    with pytest.raises(PalimpsestError, match=message):
        project.run("masking", masking={"pattern": pattern})
    assert not list(project.data.glob("*masks.safetensors*"))


def test_an_uneven_allocation_becomes_whole_n_of_m(copied: Finished) -> None:
    project = copied("llama")
    shares = [0.25, 0.75, 0.45, 0.55]
    pd.DataFrame({"block": range(4), "matrix": "", "sparsity": shares}).to_csv(project.data / "allocation.csv", index=False)
    masks = read_masks(project.run("masking", masking={"pattern": "2:4"}), project.model)
    for (block, _), keep in masks.items():
        gone = (~keep).view(len(keep), -1, 4).sum(2)
        assert (gone == [1, 3, 2, 2][block]).all()


def test_a_pattern_that_changes_the_allocation_says_so(copied: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    project = copied("llama")
    path = project.data / "allocation.csv"
    for shares, became in (
        ([0.45, 0.55, 0.48, 0.52], "0.4500 to 0.5500 became 2 of 4 everywhere, which is uniform"),
        ([0.3, 0.7, 0.5, 0.5], "0.3000 to 0.7000 became 1 to 3 of 4"),
        ([0.25, 0.75, 0.5, 0.5], None),
    ):
        pd.DataFrame({"block": range(4), "matrix": "", "sparsity": shares}).to_csv(path, index=False)
        capsys.readouterr()
        project.run("masking", masking={"pattern": "2:4"})
        said = capsys.readouterr().out
        assert became in said if became else "became" not in said
        table = pd.read_csv(project.data / "masks.csv")
        assert f"{float(np.average(table.sparsity, weights=table.parameters)):.6f} of" in said


def test_a_pattern_that_cannot_remove_what_the_allocation_asks_is_refused(copied: Finished) -> None:
    project = copied("llama")
    shares = [1.0, 1.0, 0.0, 0.0]
    pd.DataFrame({"block": range(4), "matrix": "", "sparsity": shares}).to_csv(project.data / "allocation.csv", index=False)
    with pytest.raises(
        PalimpsestError, match=r"masking\.pattern = '2:4': with 3 of 4 .* up to 1 come to 0\.375 .* instead of 0\.5"
    ):
        project.run("masking", masking={"pattern": "2:4"})


def test_a_faithful_allocation_and_a_pattern_name_the_remedy(copied: Finished) -> None:
    project = copied("llama")
    project.run("allocation", allocation={"method": "owl", "projection": "faithful", "granularity": "linear"})
    with pytest.raises(PalimpsestError, match=r"set allocation\.sparsity: 0\.5 with allocation\.projection: projected"):
        project.run("masking", masking={"pattern": "2:4"})


def test_fewer_tokens_than_channels_are_said_before_work_starts(copied: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    project = copied("llama")
    tokens = load_file(project.data / "tokens.safetensors")
    for windows, few in ((2, True), (3, False)):  # of 16 tokens: 32 and 48, and the widest matrix has 48 inputs
        write_tensors(project.data / "tokens.safetensors", {**tokens, "calibration": tokens["calibration"][:windows].clone()})
        capsys.readouterr()
        project.run("masking", masking={"method": "sparsegpt"})
        said = capsys.readouterr().out
        note = "32 calibration tokens are fewer than the 48 inputs of mlp.down_proj"
        assert (note in said) == few and (not few or said.index(note) < said.index("plan:"))


def test_experts_with_fewer_tokens_than_channels_are_named_in_a_line(
    copied: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    project = copied("qwen3_moe")
    capsys.readouterr()
    project.run("masking", masking={"method": "sparsegpt"})
    table, said = pd.read_csv(project.data / "masks.csv"), capsys.readouterr().out
    widths = table.matrix.map(lambda name: 24 if "down_proj" in name else 32)
    thin = table[table.matrix.str.contains("experts") & (table.tokens < widths)]
    assert (
        len(thin)
        and f"{len(thin)} of {len(table)} matrices saw fewer tokens than they have inputs ({thin.matrix.iloc[0]}" in said
    )


def test_a_share_that_the_published_search_cannot_reach_is_named(copied: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    project = copied("llama")
    project.run("allocation", allocation={"sparsity": 0.97})
    for rounding, named in (("published", True), ("exact", False)):
        capsys.readouterr()
        project.run("masking", masking={"method": "wanda_variant", "rounding": rounding})
        assert ("matrices miss their share by more than 0.001" in capsys.readouterr().out) == named


def test_the_plan_counts_the_grams_of_the_largest_block() -> None:
    small = {(0, "mlp.up"): (4, 8)}
    assert gram_bytes({**small, (1, "mlp.up"): (4, 100), (1, "mlp.down"): (8, 10)}) == 8 * (100**2 + 10**2 + 2 * 100**2)
    assert gram_bytes(small) == 8 * 3 * 8**2


def test_matrices_of_one_input_and_unlike_budgets(copied: Finished) -> None:
    """Query and key share a Hessian; one is left alone, the others lose other shares."""
    project = copied("llama")
    rows: list[dict[str, Any]] = [{"block": block, "matrix": "", "sparsity": 0.5} for block in range(4)]
    rows += [
        {"block": 0, "matrix": "self_attn.q_proj", "sparsity": 0.0},
        {"block": 0, "matrix": "self_attn.k_proj", "sparsity": 0.25},
    ]
    pd.DataFrame(rows).to_csv(project.data / "allocation.csv", index=False)
    path = project.run("masking", masking={"method": "sparsegpt"})
    masks, table = read_masks(path, project.model), pd.read_csv(project.data / "masks.csv").set_index(["block", "matrix"])
    assert masks[0, "self_attn.q_proj"].all() and table.method[0, "self_attn.q_proj"] == "none"
    assert "weights.blocks.0.self_attn.q_proj" not in load_file(path)
    assert int((~masks[0, "self_attn.k_proj"]).sum()) == round(0.25 * masks[0, "self_attn.k_proj"].numel())
    assert table.sparsity[0, "self_attn.v_proj"] == 0.5


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_experts_that_see_few_tokens_are_masked_by_magnitude(
    method: str, copied: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    project = copied("qwen3_moe")
    project.run("masking", masking={"method": method})
    table = pd.read_csv(project.data / "masks.csv")
    experts = table[table.matrix.str.contains("experts")]
    assert set(table.method) == {method} and experts.tokens.nunique() > 3
    floor = int(experts.tokens.median())
    path = project.run("masking", masking={"method": method, "expert_tokens": floor})
    again, masks = pd.read_csv(project.data / "masks.csv"), read_masks(path, project.model)
    fallen = again[again.method == "magnitude"]
    assert 0 < len(fallen) < len(again) and (fallen.tokens < floor).all()
    assert (again[again.method == method].tokens >= floor).all()
    assert f"{len(fallen)} of {len(again)} matrices saw fewer than masking.expert_tokens = {floor}" in capsys.readouterr().out
    for block, name in list(zip(fallen.block, fallen.matrix, strict=True))[:4]:
        weight = matrix_of(blocks_of(project.model)[block], name)
        gone, _ = prune_matrix(
            weight, weight, 1, "magnitude", 0.5, comparison="row" if method == "wanda" else "layer", exact=True
        )
        assert torch.equal(masks[block, name], ~gone)


def test_experts_that_no_token_reaches(copied: Finished) -> None:
    """A router that always chooses experts 0 and 1."""
    project = copied("qwen3_moe")
    state = load_file(project.data / "model" / "model.safetensors")
    for name in [name for name in state if name.endswith("mlp.gate.weight")]:
        state[name][2:] = state[name][:1] * 0
        state[name][:2] = 0
        state[name][2:] = 0
    save_file(state, project.data / "model" / "model.safetensors", metadata={"format": "pt"})
    project.run_until("allocation")
    for activations in ("pruned", "tape"):
        project.run("masking", masking={"activations": activations})
        table = pd.read_csv(project.data / "masks.csv")
        unseen = table[table.matrix.str.contains("experts") & (table.tokens.isna() | (table.tokens == 0))]
        assert len(unseen) == 4 * 2 * 2 and set(unseen.method) == {"magnitude"}
        assert set(table.method[table.index.difference(unseen.index)]) == {"wanda"}
        assert (table.sparsity == 0.5).all()


def test_nan_in_one_expert_is_named(copied: Finished) -> None:
    project = copied("qwen3_moe")
    state = load_file(project.data / "model" / "model.safetensors")
    name = "model.layers.2.mlp.experts.3.down_proj.weight"
    state[name][1, 2] = float("nan")
    save_file(state, project.data / "model" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PalimpsestError, match=r"block 2, mlp\.experts\.down_proj\.3: NaN or infinite weights"):
        project.run("masking")


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_what_is_not_a_matrix_of_a_block_is_not_touched(method: str, copied: Finished) -> None:
    """Embeddings, tied head, norms: the export holds their very bytes."""
    project = copied("llama_tied")
    project.run("removal", removal={"method": "none"})
    project.run("masking", masking={"method": method})
    for stage in ("ghost", "compress"):
        project.run(stage)
    before, after = (load_file(project.data / name / "model.safetensors") for name in ("model", "compressed"))
    assert set(before) == set(after) and "lm_head.weight" not in after
    touched = {name for name in before if not torch.equal(before[name], after[name])}
    assert touched == {name for name in before if name.startswith("model.layers.") and "norm" not in name}


def test_mended_weights_are_what_is_evaluated_and_exported(copied: Finished) -> None:
    project = copied("llama")
    project.run("removal", removal={"method": "none"})
    path = project.run("masking", masking={"method": "sparsegpt"})
    losses = plain_losses(pruned_model(project, path), load_file(project.data / "tokens.safetensors")["evaluation"])
    for stage in ("ghost", "compress", "evaluation@masked", "evaluation@compressed"):
        project.run(stage)
    for variant in ("masked", "compressed"):
        found = json.loads((project.data / "evaluation" / f"{variant}.json").read_text())
        assert found["windows"] == pytest.approx(losses, rel=1e-5) and found["sparsity"] == 0.5


def test_damaged_masks_are_named(copied: Finished) -> None:
    project = copied("llama")
    path = project.run("masking", masking={"method": "sparsegpt"})
    whole = load_file(path)

    def damage(name: str, value: torch.Tensor | None) -> None:
        some = {key: one for key, one in whole.items() if key != name}
        save_file(some if value is None else {**some, name: value}, path)

    flipped, broken = whole["blocks.1.mlp.up_proj"].clone(), whole["weights.blocks.2.mlp.up_proj"].clone()
    flipped[3, 1] ^= 4
    broken[0, 0] = float("inf")
    for name, value, message in (
        ("blocks.1.mlp.up_proj", flipped, r"'blocks\.1\.mlp\.up_proj' is damaged: \d+ weights stay, not 768"),
        ("blocks.1.mlp.up_proj", flipped[:, :-1].contiguous(), r"'blocks\.1\.mlp\.up_proj' has shape \(48, 3\)"),
        ("blocks.0.mlp.up_proj", None, r"no tensor 'blocks\.0\.mlp\.up_proj'"),
        ("weights.blocks.2.mlp.up_proj", broken, r"'weights\.blocks\.2\.mlp\.up_proj'.*NaN or infinite"),
        ("weights.blocks.2.mlp.up_proj", broken[:-1].clone(), r"'weights\.blocks\.2\.mlp\.up_proj' has shape \(47, 32\)"),
    ):
        damage(name, value)
        with pytest.raises(PalimpsestError, match=f"masks.safetensors: .*{message}"):
            project.run("evaluation@masked")


def test_the_same_bytes_twice(copied: Finished) -> None:
    project = copied("gpt2")
    first, second = (project.run("masking", masking={"method": "sparsegpt"}).read_bytes() for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    "way", [*({"method": one} for one in METHODS), {"method": "wanda", "pattern": "2:4"}, {"activations": "tape"}]
)
def test_the_head_is_pruned_where_asked(way: dict[str, Any], copied: Finished) -> None:
    """As any other matrix: by the inputs it has behind the pruned blocks and the final norm, or in the dense model."""
    project = copied("llama")
    group = (2, 4) if "pattern" in way else None
    share, tape = 0.5 if group else 0.37, way.get("activations") == "tape"
    path = project.run("masking", masking={**MASKING, "method": "wanda", **way, "head": share})
    table = pd.read_csv(project.data / "masks.csv")
    assert len(table) == len(read_masks(path, project.model)) + 1
    assert list(table.block.isna()) == list(table.matrix == "head") and (project.data / "masks.csv").read_text().count(".0,") == 0
    before = copy.deepcopy(project.model) if tape else pruned_model(project, path)
    ids = load_file(project.data / "tokens.safetensors")["calibration"]
    seen: list[torch.Tensor] = []
    with torch.no_grad(), before.lm_head.register_forward_pre_hook(lambda _, args: seen.append(args[0])):
        before(ids.long())
    weight, method = project.model.lm_head.weight.data, way.get("method", "wanda")
    comparison = {"magnitude": "layer", "wanda": "row"}.get(method, "")
    gone, pruned = prune_matrix(
        weight, seen[0].reshape(-1, weight.shape[1]), len(ids), method, share, exact=True, group=group, comparison=comparison
    )
    assert torch.equal(read_mask(TensorFile(path), HEAD, tuple(weight.shape)), ~gone)

    masked = json.loads(project.run("evaluation@masked").read_text())
    after = pruned_model(project, path)
    after.lm_head.weight.data.copy_(pruned)
    evaluated = load_file(project.data / "tokens.safetensors")["evaluation"]
    assert masked["windows"] == pytest.approx(plain_losses(after, evaluated), rel=1e-5)
    project.run("removal", removal={"method": "none"})
    project.run("ghost")
    exported = load_file(project.run("compress") / "model.safetensors")["lm_head.weight"]
    assert torch.equal(exported == 0, gone | (weight == 0)) and relative_gap(exported, pruned) < 3e-5
    found = float(gone.double().mean())
    assert f"Of the output head's weights {found:.4f} are masked" in (project.data / "compressed" / "README.md").read_text()
    row = table[table.matrix == "head"].iloc[0]
    assert row.sparsity == pytest.approx(found, abs=1e-12) and row.sparsity_asked == share and row.method == method
    assert row.kept_magnitude == pytest.approx(float(weight[~gone].abs().sum() / weight.abs().sum()), rel=1e-5)


@pytest.mark.parametrize("family", ["mistral_sliding", "mixtral", "phimoe", "olmo2", "neox", "phi3"])
def test_heads_of_other_families(family: str, tmp_path: Path) -> None:
    """One has a bias, others scale or name it in their own way: what is evaluated and exported is the plain model's."""
    project = Project(tmp_path, family, blocks=3)
    project.run_until("evaluation@masked", masking={**MASKING, "method": "wanda", "head": 0.5}, removal={"method": "none"})
    path = project.data / "masks.safetensors"
    twin = pruned_model(project, path)
    head = twin.get_output_embeddings().weight.data
    head[~read_mask(TensorFile(path), HEAD, tuple(head.shape))] = 0
    evaluated = load_file(project.data / "tokens.safetensors")["evaluation"]
    losses = plain_losses(twin, evaluated)
    for stage in ("ghost", "compress", "evaluation@compressed"):
        project.run(stage)
    for variant in ("masked", "compressed"):
        found = json.loads((project.data / "evaluation" / f"{variant}.json").read_text())
        assert found["windows"] == pytest.approx(losses, rel=1e-5)
    loaded = AutoModelForCausalLM.from_pretrained(project.data / "compressed").eval()
    assert plain_losses(loaded, evaluated) == pytest.approx(losses, rel=1e-5)


def test_a_head_alone(copied: Finished) -> None:
    project = copied("llama")
    project.run("allocation", allocation={"sparsity": 0.0})
    path = project.run("masking", masking={"head": 0.25})
    assert all(keep.all() for keep in read_masks(path, project.model).values())
    weight = project.model.lm_head.weight
    assert int(read_mask(TensorFile(path), HEAD, tuple(weight.shape)).sum()) == weight.numel() * 3 // 4


def test_what_was_not_done_as_asked_of_the_head_is_said(copied: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    project = copied("llama")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"method": "sparsegpt", "expert_tokens": 1000}, "were masked by magnitude, in blocks 0, 1, 2, 3 and the output head"),
        ({"method": "wanda_variant", "rounding": "published", "head": 0.97}, "most of all the output head (0."),
        ({"rounding": "published", "head": 0.01}, "of the output head, 0.000000 of 3,072 weights masked, target 0.010000"),
    ]
    for settings, words in cases:
        capsys.readouterr()
        project.run("masking", masking={**MASKING, "method": "wanda", "expert_tokens": 1, "head": 0.3, **settings})
        assert words in capsys.readouterr().out
    norm = load_file(project.data / "model" / "model.safetensors")
    norm["model.norm.weight"][5:9] = 0
    save_file(norm, project.data / "model" / "model.safetensors", metadata={"format": "pt"})
    project.run("allocation", allocation={"sparsity": 0.0})
    capsys.readouterr()
    project.run("masking", masking={**MASKING, "method": "sparsegpt", "expert_tokens": 1, "head": 0.3})
    assert "4 inputs of 1 matrices are zero for every token" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("family", "masking", "message"),
    [
        ("gpt2", {"head": 0.5}, r"masking\.head = 0\.5: this model's output head is its embedding too"),
        ("llama", {"head": 0.4, "pattern": "2:4"}, r"head = 0\.4: pattern '2:4' removes 0\.5; allowed: 0 or 0\.5"),
        ("llama", {"head": 1.0}, r"masking\.head = 1\.0: should be less than 1"),
        ("llama", {"head": float("nan")}, r"masking\.head"),
    ],
)
def test_a_head_that_cannot_be_pruned_is_refused(family: str, masking: dict[str, Any], message: str, copied: Finished) -> None:
    project = copied(family)
    (project.data / "masks.safetensors").unlink()
    with pytest.raises(PalimpsestError, match=message):
        project.run("masking", masking=masking)
    assert not list(project.data.glob("*masks.safetensors*"))

"""Grids of few values: cases worked by hand, what may never happen, and brute force."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pipeline.artifacts import ArtifactError
from pipeline.errors import PalimpsestError
from stages.decoder import lowbit
from stages.decoder.lowbit import GRIDS, choose_matrices, quantise_matrices, settle, straight_through, train_on_grid
from stages.decoder.skeleton import find_blocks
from tests.kernels.shapes import checked
from tests.models import FAMILIES

quantise = checked(lowbit.quantise)
grids = st.sampled_from(GRIDS)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@st.composite
def weights(draw: st.DrawFn) -> Tensor:
    """Few distinct values make ties, zeros and channels that lie on a grid; some are subnormal."""
    shape = draw(st.tuples(st.integers(1, 4), st.integers(1, 40)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    kind = draw(st.sampled_from(["normal", "few", "tiny", "zero channel"]))
    weight = torch.randn(shape, generator=generator)
    if kind == "few":
        weight = (weight * 1.5).round() * 0.3
    if kind == "tiny":
        weight = weight * 1e-44
    if kind == "zero channel":
        weight[0] = 0
    return weight.to(draw(dtypes))


@settings(max_examples=300, deadline=None)
@given(weights(), grids)
def test_quantising_twice_is_quantising_once(weight: Tensor, grid: str) -> None:
    once = quantise(weight, grid)
    assert torch.equal(quantise(once, grid), once)


@settings(max_examples=300, deadline=None)
@given(weights(), grids)
def test_a_channel_takes_allowed_values_only(weight: Tensor, grid: str) -> None:
    out = quantise(weight, grid)
    assert out.dtype == weight.dtype and out.shape == weight.shape
    for before, row in zip(weight, out, strict=True):
        values = row.abs().unique()
        if grid == "binary":
            assert len(values) == 1
        elif grid == "ternary":
            assert len(values[values > 0]) <= 1
        else:
            levels = 2 ** (int(grid[0]) - 1) - 1
            step = float(before.abs().max()) / levels
            allowed = torch.tensor([step * level for level in range(-levels, levels + 1)], dtype=torch.float64).to(weight.dtype)
            assert torch.isin(row, allowed).all()
            assert len(row.unique()) <= 2 * levels + 1


@settings(max_examples=100, deadline=None)
@given(weights(), grids)
def test_signs_stay(weight: Tensor, grid: str) -> None:
    assert (quantise(weight, grid).double() * weight.double() >= 0).all()


def test_worked_by_hand() -> None:
    weight = torch.tensor([[4.0, -2.0, 1.0, -1.0], [0.0, 0.0, 0.0, 0.0]])
    assert quantise(weight, "binary").tolist() == [[2, -2, 2, -2], [0, 0, 0, 0]]
    assert quantise(weight, "ternary").tolist() == [[2, -2, 0, 0], [0, 0, 0, 0]], "1 is half of 2 and goes to the even 0"
    assert quantise(weight, "2bit").tolist() == [[4, 0, 0, 0], [0, 0, 0, 0]]
    assert quantise(weight, "3bit")[0].tolist() == [4, pytest.approx(-8 / 3), pytest.approx(4 / 3), pytest.approx(-4 / 3)]
    assert quantise(torch.zeros(2, 3), "binary").tolist() == [[0.0] * 3] * 2
    assert quantise(torch.tensor([[0.0, -0.0, 2.0, -2.0]]), "binary").tolist() == [[1, 1, 1, -1]], "zeros count as positive"


def test_the_formulas_of_the_papers() -> None:
    weight = torch.randn(16, 24, generator=torch.Generator().manual_seed(0))
    w = weight.double().numpy()
    mean = np.abs(w).mean(1, keepdims=True)
    assert np.allclose(quantise(weight, "binary"), mean * np.where(w >= 0, 1, -1), rtol=1e-6)
    assert np.allclose(quantise(weight, "ternary"), mean * np.clip(np.round(w / mean), -1, 1), rtol=1e-6)
    for bits in range(2, 9):
        levels = 2 ** (bits - 1) - 1
        step = np.abs(w).max(1, keepdims=True) / levels
        values = step[:, :, None] * np.arange(-levels, levels + 1)
        nearest = np.abs(w[:, :, None] - values).argmin(2)
        assert np.allclose(quantise(weight, f"{bits}bit"), step * (nearest - levels), rtol=1e-6, atol=1e-9)


def test_channels_do_not_see_each_other() -> None:
    weight = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
    for grid in GRIDS:
        assert torch.equal(quantise(weight, grid), torch.cat([quantise(row[None], grid) for row in weight]))


def test_more_bits_are_nearer() -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(2))
    errors = [float((quantise(weight, f"{bits}bit") - weight).norm()) for bits in range(2, 9)]
    assert errors == sorted(errors, reverse=True)


def test_nan_does_not_become_a_number() -> None:
    weight = torch.ones(2, 3)
    weight[1, 1] = float("nan")
    for grid in GRIDS:
        assert torch.isnan(quantise(weight, grid)[1]).any() and torch.isfinite(quantise(weight, grid)[0]).all()


def test_an_unknown_grid_is_refused() -> None:
    with pytest.raises(PalimpsestError, match=r"grid = '1bit': .* allowed: binary, ternary, 2bit"):
        quantise(torch.ones(1, 1), "1bit")


@pytest.mark.parametrize("grid", GRIDS)
def test_gradients_go_straight_through(grid: str) -> None:
    weight = torch.randn(3, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    upstream = torch.arange(15.0).reshape(3, 5)
    out = straight_through(weight, grid)
    assert torch.equal(out, quantise(weight.detach(), grid))
    (out * upstream).sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad, upstream)


# Matrices by name, in blocks of several families


def blocks_of(family: str) -> nn.ModuleList:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(FAMILIES[family](2), dtype=torch.float32)
    return find_blocks(model.eval())[1]


@pytest.mark.parametrize(
    ("family", "patterns", "names"),
    [
        ("llama", ["mlp.*"], ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]),
        ("llama", ["*.o_proj", "mlp.gate_*"], ["self_attn.o_proj", "mlp.gate_proj"]),
        ("gpt2", ["attn.*", "mlp.c_fc"], ["attn.c_attn", "attn.c_proj", "mlp.c_fc"]),
        ("mixtral", ["mlp.experts.down_proj.*"], [f"mlp.experts.down_proj.{e}" for e in range(4)]),
    ],
)
def test_matrices_are_named_by_patterns(family: str, patterns: list[str], names: list[str]) -> None:
    for chosen in choose_matrices(blocks_of(family), patterns):
        assert sorted(matrix.name for matrix in chosen) == sorted(names)


def test_a_name_that_fits_nothing_is_refused() -> None:
    with pytest.raises(PalimpsestError, match=r"'MLP\.\*' fits no matrix of a block; there are self_attn\.q_proj, "):
        choose_matrices(blocks_of("llama"), ["mlp.*", "MLP.*"])


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("grid", ["binary", "ternary", "4bit"])
def test_training_on_the_grid_ends_on_it(family: str, grid: str) -> None:
    block = blocks_of(family)[0]
    (matrices,) = choose_matrices([block], ["*"])
    names = set(block.state_dict())
    before = {matrix.name: matrix.view(block).clone() for matrix in matrices}
    rest = {name: value.clone() for name, value in block.state_dict().items() if value.ndim < 2}
    train_on_grid(block, matrices, grid)
    assert sum(p.numel() for p in block.parameters()) == sum(p.numel() for p in blocks_of(family)[0].parameters())
    settle(block)
    assert set(block.state_dict()) == names
    for matrix in matrices:
        assert torch.equal(matrix.view(block), quantise(before[matrix.name], grid)), matrix.name
    assert all(torch.equal(block.state_dict()[name], value) for name, value in rest.items())


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_step_moves_the_full_weights_and_the_block_computes_with_quantised_ones(family: str) -> None:
    block = blocks_of(family)[0]
    (matrices,) = choose_matrices([block], ["mlp.*"])
    mlp: Any = block.get_submodule("mlp")
    plain = copy.deepcopy(mlp)
    quantise_matrices(block_copy := copy.deepcopy(block), matrices, "ternary", "block 0")
    x = torch.randn(2, 32, generator=torch.Generator().manual_seed(0))
    train_on_grid(block, matrices, "ternary")
    assert torch.equal(mlp(x), block_copy.get_submodule("mlp")(x)) and not torch.equal(mlp(x), plain(x))
    mlp(x).square().sum().backward()
    grads = [p.grad for name, p in block.named_parameters() if name.endswith("original")]
    assert len(grads) == len(matrices) and all(grad is not None and grad.abs().sum() > 0 for grad in grads)


def test_a_copy_that_is_settled_leaves_the_original_in_training() -> None:
    block = blocks_of("llama")[0]
    (matrices,) = choose_matrices([block], ["mlp.*"])
    train_on_grid(block, matrices, "ternary")
    mlp: Any = block.get_submodule("mlp")
    x = torch.randn(2, 32, generator=torch.Generator().manual_seed(0))
    before, full = mlp(x), {name: value.clone() for name, value in block.state_dict().items()}
    settle(settled := copy.deepcopy(block))
    assert torch.equal(settled.get_submodule("mlp")(x), before) and torch.equal(mlp(x), before)
    assert all(torch.equal(value, full[name]) for name, value in block.state_dict().items())
    assert not any("parametrizations" in name for name in settled.state_dict())
    settle(block)
    assert torch.equal(mlp(x), before)


def test_some_experts_alone() -> None:
    block = blocks_of("mixtral")[0]
    (matrices,) = choose_matrices([block], ["mlp.experts.down_proj.2"])
    stored = matrices[0].stored(block).data.clone()
    train_on_grid(block, matrices, "binary")
    settle(block)
    after = matrices[0].stored(block).data
    assert torch.equal(after[[0, 1, 3]], stored[[0, 1, 3]]) and len(after[2, 0].abs().unique()) == 1


def test_nan_is_refused_by_name() -> None:
    block = blocks_of("llama")[1]
    (matrices,) = choose_matrices([block], ["mlp.*"])
    matrices[1].view(block)[0, 3] = float("nan")
    with pytest.raises(ArtifactError, match=r"block 1, mlp\.up_proj: NaN"):
        quantise_matrices(block, matrices, "ternary", "block 1")

"""The skeleton run block by block equals the model run whole, for every family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BertConfig

from stages.decoder.matrices import expert_gates, prunable_matrices, watch
from stages.decoder.skeleton import Decoder, DecoderError, find_blocks
from tests.models import FAMILIES, _config, save_model

IDS = torch.randint(3, 96, (3, 12), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("family", "gates"),
    [
        ("qwen2_moe", {"mlp.shared_expert_gate"}),  # its router is no linear
        ("phimoe", {"mlp.router"}),
        ("jetmoe", {"mlp.router.layer", "self_attention.experts.router.layer"}),
        ("mixtral", set()),
        ("llama", set()),
    ],
)
def test_what_chooses_among_experts_is_not_prunable(family: str, gates: set[str]) -> None:
    more = {"jetmoe": _config("JetMoeConfig", num_key_value_heads=2, kv_channels=8, num_local_experts=4, num_experts_per_tok=2)}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config({**FAMILIES, **more}[family](2))
    block = find_blocks(model)[1][1]
    assert expert_gates(block) == gates
    linears = {name for name, module in block.named_modules() if isinstance(module, nn.Linear)}
    assert {one.name for one in prunable_matrices(block) if one.expert is None} == linears - gates


def test_what_is_as_narrow_as_a_gate_but_no_gate_is_prunable() -> None:
    """As many outputs as experts, in attention, in a shared expert and in the experts of a list."""

    def named(**parts: nn.Module) -> nn.Module:
        module = nn.Module()
        for name, part in parts.items():
            module.add_module(name, part)
        return module

    shared = named(up=nn.Linear(6, 3), down=nn.Linear(3, 6))
    experts = nn.ModuleList(named(up=nn.Linear(6, 3), down=nn.Linear(3, 6)) for _ in range(3))
    attention = named(query=nn.Linear(6, 3), output=nn.Linear(3, 6))
    block = named(
        attention=attention, experts=experts, shared=shared, router=named(choice=nn.Linear(6, 3)), alone=nn.Linear(6, 1)
    )
    assert expert_gates(block) == {"router.choice", "alone"}
    assert len(prunable_matrices(block)) == 2 + 6 + 2
    assert expert_gates(named(attention=attention, mlp=shared, alone=nn.Linear(6, 1))) == set()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("windows", [1, 3])
def test_streamed_blocks_equal_the_whole_model(family: str, windows: int, tmp_path: Path) -> None:
    model = save_model(tmp_path, family)
    ids = IDS[:windows]
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits
    decoder = Decoder(tmp_path)
    assert len(decoder) == 4
    with decoder.trunk():
        hidden = decoder.embed(ids)
    for index in range(len(decoder)):
        with decoder.block(index) as block:
            hidden = decoder.call(index, hidden)
        assert all(p.is_meta for p in block.parameters()), "the block's weights are gone after use"
    with decoder.trunk(head=True):
        logits = decoder.logits(hidden)
    assert torch.equal(logits, whole) or torch.allclose(logits, whole, atol=1e-6)
    assert all(p.is_meta for p in decoder.model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_prunable_matrix_is_seen_with_its_input(family: str, tmp_path: Path) -> None:
    save_model(tmp_path, family, blocks=3)
    decoder = Decoder(tmp_path)
    matrices = prunable_matrices(decoder.blocks[0])
    seen: dict[str, int] = {}

    def see(name: str, x: torch.Tensor) -> None:
        assert x.shape[-1] == widths[name]
        seen[name] = seen.get(name, 0) + x.numel() // x.shape[-1]

    with decoder.trunk():
        hidden = decoder.embed(IDS)
    with decoder.block(0) as block:
        widths = {m.name: m.view(block).shape[1] for m in matrices}
        with watch(block, matrices, see):
            decoder.call(0, hidden)
    dense = [m.name for m in matrices if m.expert is None]
    assert dense and all(seen[name] == IDS.numel() for name in dense)
    fused = [m.name for m in matrices if m.expert is not None]
    if fused:
        assert set(seen) - set(dense) <= set(fused)
        inputs = sum(seen.get(name, 0) for name in fused if "gate_up" in name)
        assert inputs == IDS.numel() * 2, "two experts per token"


def test_sharded_checkpoints_are_read(tmp_path: Path) -> None:
    model = save_model(tmp_path, "llama", max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    decoder = Decoder(tmp_path)
    with decoder.block(2) as block:
        assert torch.equal(block.get_parameter("mlp.up_proj.weight"), model.model.layers[2].mlp.up_proj.weight)


def test_block_types_tell_sliding_from_full_attention(tmp_path: Path) -> None:
    save_model(tmp_path, "gemma3")
    types = Decoder(tmp_path).block_types()
    assert types[0] == types[2] != types[1] == types[3]


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(DecoderError, match="no stack of decoder blocks"):
        find_blocks(torch.nn.Linear(2, 2))


def test_a_checkpoint_that_lacks_tensors_is_refused(tmp_path: Path) -> None:
    model = save_model(tmp_path, "llama")
    state = {name: value for name, value in model.state_dict().items() if "layers.2.mlp" not in name}
    from safetensors.torch import save_file

    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DecoderError, match=r"3 tensors.*layers\.2\.mlp"):
        Decoder(tmp_path)


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    config = BertConfig(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    decoder = Decoder(tmp_path)
    with pytest.raises(DecoderError, match="looks ahead"), decoder.trunk():
        decoder.embed(IDS)

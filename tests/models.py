"""Tiny random checkpoints of several families, saved as `transformers` saves them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as t

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
IDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def _config(kind: str, **more: Any) -> Callable[[int], Any]:
    return lambda blocks: getattr(t, kind)(**{**SIZES, **IDS, "num_hidden_layers": blocks, **more})


FAMILIES: dict[str, Callable[[int], Any]] = {
    "llama": _config("LlamaConfig", num_key_value_heads=2, tie_word_embeddings=False),
    "llama_tied": _config("LlamaConfig", num_key_value_heads=2, tie_word_embeddings=True),
    "mistral_sliding": _config("MistralConfig", num_key_value_heads=2, sliding_window=4),
    "gemma2": _config("Gemma2Config", num_key_value_heads=2, head_dim=8, sliding_window=4),
    "gemma3": _config("Gemma3TextConfig", num_key_value_heads=2, head_dim=8, sliding_window=4, sliding_window_pattern=2),
    "qwen3": _config("Qwen3Config", num_key_value_heads=2, head_dim=8, tie_word_embeddings=True),
    "qwen3_moe": _config(
        "Qwen3MoeConfig", num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
    ),
    "mixtral": _config("MixtralConfig", num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": _config(
        "Qwen2MoeConfig", num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
    ),
    "phimoe": _config("PhimoeConfig", num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2),
    "phi3": _config("Phi3Config", num_key_value_heads=2),
    "olmo2": _config("Olmo2Config", num_key_value_heads=2),
    "gpt2": lambda blocks: t.GPT2Config(vocab_size=96, n_embd=32, n_layer=blocks, n_head=4, n_positions=64, **IDS),
    "neox": _config("GPTNeoXConfig"),
    "opt": lambda blocks: t.OPTConfig(
        vocab_size=96, hidden_size=32, ffn_dim=48, num_hidden_layers=blocks, num_attention_heads=4,
        max_position_embeddings=64, word_embed_proj_dim=16, do_layer_norm_before=True, **IDS,
    ),
    "falcon": lambda blocks: t.FalconConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=blocks, num_attention_heads=4, **IDS
    ),
    "bloom": lambda blocks: t.BloomConfig(vocab_size=96, hidden_size=32, n_layer=blocks, n_head=4, **IDS),
}  # fmt: skip


def save_model(folder: Path, family: str, blocks: int = 4, seed: int = 0, **save: Any) -> Any:
    """Save a random checkpoint of `family` in `folder`; return the model, float32, in evaluation mode."""
    torch.manual_seed(seed)
    config = FAMILIES[family](blocks)
    model = t.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():  # larger than the usual initialisation, so that blocks really do something
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=0.2)
    model.tie_weights()
    model.save_pretrained(folder, **save)
    return model

"""A Llama-style decoder (arXiv 2302.13971): RMS norms, rotary positions, gated MLP, no biases, head not tied."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig

from stages.training import Training


def llama(training: Training, ids: dict[str, Any]) -> Any:
    """The configuration. The MLP is 8/3 of the width, up to a multiple of 8, so that it has as many weights as GPT-2's."""
    return LlamaConfig(
        hidden_size=training.width,
        intermediate_size=-(-8 * training.width // 3 // 8) * 8,
        num_hidden_layers=training.blocks,
        num_attention_heads=training.heads,
        num_key_value_heads=training.heads,
        max_position_embeddings=training.length,
        tie_word_embeddings=False,
        **ids,
    )

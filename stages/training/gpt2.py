"""A GPT-2-style decoder: layer norms, learned positions, plain MLP of four widths, biases, head tied to the embedding."""

from __future__ import annotations

from typing import Any

from transformers import GPT2Config

from stages.training import Training


def gpt2(training: Training, ids: dict[str, Any]) -> Any:
    """The configuration, without dropout: losses while training and afterwards are of one function."""
    return GPT2Config(
        n_embd=training.width,
        n_layer=training.blocks,
        n_head=training.heads,
        n_positions=training.length,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        **ids,
    )

"""The model card of an export."""

from __future__ import annotations

from stages.decoder.skeleton import Decoder


def model_card(decoder: Decoder, removed: list[int], runs: list[tuple[int, int]]) -> str:
    """README.md of the exported checkpoint: what was done to which kind of model, and how to load it."""
    name = type(decoder.model).__name__
    lines = [
        f"# A compressed {name}",
        "",
        f"Made by Palimpsest from a {name} of {len(decoder)} blocks.",
        "",
        f"- Removed blocks (indices of the dense model, from 0): {', '.join(map(str, removed)) or 'none'}.",
        "- Masked weights are stored as zeros; they take as much space and time as before.",
        f"- Ghost operators: {', '.join(f'for blocks {a} to {b - 1}' for a, b in runs) or 'none'}.",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f"model = AutoModelForCausalLM.from_pretrained(folder{', trust_remote_code=True' if runs else ''})",
        f"tokenizer = AutoTokenizer.from_pretrained(folder{', trust_remote_code=True' if runs else ''})",
        "```",
    ]
    if runs:
        lines += ["", "`trust_remote_code` is for `modeling_ghost.py` beside this file, some forty lines that add the operators."]
    return "\n".join(lines) + "\n"

"""The model card of an export."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.compress.modeling import MODELING_FILE
from stages.decoder.operators import Operator, operator_name, spell
from stages.decoder.skeleton import Decoder


def model_card(
    decoder: Decoder,
    removed: list[int],
    chosen: Mapping[str, Any],
    allocation: Mapping[str, Any],
    masking: Mapping[str, Any],
    sparsity: float,
    of_head: float,
    metadata: Mapping[str, Any],
    operators: Mapping[tuple[int, int], Operator],
) -> str:
    """README.md of the exported checkpoint: what was done to which kind of model, and how to load it.

    Args:
        decoder: the dense model.
        removed: its blocks that are gone.
        chosen: removal_scores.json: `method` and `settings` by which they were chosen.
        allocation: section `allocation` of params.yaml.
        masking: section `masking` of params.yaml.
        sparsity: share of the prunable weights, in the blocks that stay, that are masked.
        of_head: share of the output head's weights that are.
        metadata: of ghost.safetensors.
        operators: by the runs they stand for.
    """
    name = type(decoder.model).__name__
    has_code = any(one.fold is None for one in operators.values())
    trust = ", trust_remote_code=True" if has_code else ""
    lines = [
        f"# A compressed {name}",
        "",
        f"Made by Palimpsest from a {name} of {len(decoder)} blocks.",
        "",
        f"- Removed blocks (indices of the dense model, from 0): {', '.join(map(str, removed)) or 'none'}"
        + (f", chosen by {_with(chosen['method'], chosen.get('settings', {}))}." if removed else "."),
        f"- {_masking(allocation, masking, sparsity, of_head)}",
        f"- Ghost operators: {', '.join(f'for {spell(*run)}' for run in operators) or 'none'}.",
        *_operators(metadata, operators),
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f"model = AutoModelForCausalLM.from_pretrained(folder{trust})",
        f"tokenizer = AutoTokenizer.from_pretrained(folder{trust})",
        "```",
    ]
    if has_code:
        lines += ["", f"`trust_remote_code` is for `{MODELING_FILE}` beside this file, which adds the operators."]
    return "\n".join(lines) + "\n"


def _with(method: str, settings: Mapping[str, Any]) -> str:
    """`shortgpt (axis token, spacing 0)`."""
    said = ", ".join(f"{key} {value}" for key, value in settings.items())
    return f"{method} ({said})" if said else method


def _masking(allocation: Mapping[str, Any], masking: Mapping[str, Any], sparsity: float, of_head: float) -> str:
    head = f" Of the output head's weights {of_head:.4f} are masked and stored as zeros." if of_head else ""
    if not sparsity:
        return f"No weights of the blocks are masked.{head}" if head else "No weights are masked."
    knobs = {"sparsity": allocation["sparsity"], **allocation.get(allocation["method"], {})}
    knobs |= {key: allocation[key] for key in ("granularity", "projection")}
    how = [f"method {masking['method']}", f"pattern {masking['pattern']}", f"comparison {masking['comparison']}"]
    how += [f"rounding {masking['rounding']}"] * (masking["pattern"] == "unstructured")
    how += [f"inputs {masking['activations']}", f"expert_tokens {masking['expert_tokens']}"] * (masking["method"] != "magnitude")
    how += [f"{key} {value:g}" for key, value in masking["sparsegpt"].items()] * (masking["method"] == "sparsegpt")
    of = masking["pattern"].partition(":")[2]
    rounded = of and allocation["method"] != "uniform"  # a uniform one is n of m itself, or masking refuses it
    whole = f"; the pattern rounds the shares to whole n of {of}, which can make them equal" if rounded else ""
    return (
        f"{sparsity:.4f} of the prunable weights of the blocks that stay are masked ({', '.join(how)}) and stored as zeros; "
        f"they take as much space and time as before. Shared out by {_with(allocation['method'], knobs)}{whole}.{head}"
    )


def _operators(metadata: Mapping[str, Any], operators: Mapping[tuple[int, int], Operator]) -> list[str]:
    """What the operators are, how they were fitted, and what they do to sink tokens."""
    if not operators:
        return []
    settings = ", ".join(f"{key} {value}" for key, value in metadata.get("settings", {}).items())
    lines = [f"- Their kind: {metadata['operator']}" + (f" ({settings})." if settings else ".")]
    for (start, stop), operator in operators.items():
        where = spell(start, stop)
        ridge = metadata.get("ridges", {}).get(operator_name(start, stop))
        if ridge:
            lines.append(f"- For {where} the ridge used is {ridge:g}, relative to the mean diagonal of the Gram matrix.")
        if operator.fold is not None:
            lines.append(
                f"- For {where} the matrix `{operator.into}` of block {start - 1} was changed; no parameter was added, and the "
                "zeros its mask had made are gone."
            )
        asked = metadata.get("settings", {}).get("sinks", "keep")
        if asked in ("bypass", "restore") and (operator.sinks is None or not len(operator.sinks)):
            lines.append(f"- For {where} no sink token was found that a rule tells, so none is treated apart.")
        if operator.sinks is not None and len(operator.sinks):
            which = ["the first token of a text"] * operator.sinks.first
            which += [f"tokens {', '.join(map(str, operator.sinks.ids))}"] * bool(operator.sinks.ids)
            does = "left alone" if operator.sinks.action == "bypass" else "put back to what it was on average in the dense model"
            lines.append(f"- Behind {where}, {' and '.join(which)}: {does}.")
    return lines

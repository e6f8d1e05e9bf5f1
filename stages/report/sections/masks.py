"""What the masks keep of each matrix, and where the method could not do as asked."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline.drawing.notation import blocks, counted, fixed, percent
from stages.report.columns import Columns
from stages.report.grid import grid
from stages.report.naming import method
from stages.report.plots import kept_per_matrix
from stages.report.results import Results
from stages.report.sections import Part, Table, calibration
from stages.report.shares import read_shares, worst

MISSED = 5e-5  # of the head's share: what two digits of a percentage show


def masks(results: Results, params: dict[str, Any]) -> Part:
    """Kept magnitude of each matrix of each block."""
    wanted = params["masking"]
    names, kept = kept_per_matrix(results.masks)
    asked = bool((results.masks.numbers("sparsity") > 0).any())
    short = [name.rpartition(".")[2] for name in names]
    labels = short if len(set(short)) == len(short) else list(names)
    panels = [grid("Kept share of the sum of |W|", labels, kept, "kept magnitude per block and matrix")] if asked else []
    known = np.isfinite(kept)
    readings = []
    if asked and known.any():
        row, block = np.unravel_index(np.nanargmin(kept), kept.shape)
        means = [float(np.nanmean(one)) for one in kept]
        low, high = int(np.argmin(means)), int(np.argmax(means))
        readings.append(
            f"Kept weights hold {percent(float(np.nanmean(kept)))} of the absolute weight on average over matrices and blocks; "
            f"least in {names[row]} of block {block} ({percent(float(kept[row, block]))}). Over blocks, {labels[low]} keeps "
            f"least ({percent(means[low])}) and {labels[high]} most ({percent(means[high])})."
        )
    readings += _exceptions(results, wanted) if asked else []
    readings += _of_head(results.head) if len(results.head) else []
    pattern = "" if wanted["pattern"] == "unstructured" else f", {wanted['pattern']} along the inputs"
    seen = {"pruned": "behind the blocks already pruned", "tape": "in the dense model"}[wanted["activations"]]
    inputs = "" if wanted["method"] == "magnitude" else f" Inputs {seen}, over {calibration(params)}."
    what = "Kept magnitude: sum of |W| over the weights that stay, over the sum of all."
    caption = f"Masks by {method(wanted['method'])}{pattern}. {what}"
    experts = " Experts of one kind are averaged." if any(_is_expert(name) for name in results.masks.words("matrix")) else ""
    some = asked or bool((results.head.numbers("sparsity") > 0).any())
    heading = "What the masks keep" if some else "No masks"
    return Part("masks", heading, (caption + experts + inputs) if some else "", tuple(panels), tuple(readings), _experts(results))


def _of_head(head: Columns) -> list[str]:
    """What was pruned of the output head, and what was not done as asked."""
    sparsity, asked, kept, damping, dead = (
        float(head.numbers(name)[0]) for name in ("sparsity", "sparsity_asked", "kept_magnitude", "damping", "dead_inputs")
    )
    missed = f" instead of {percent(asked, 2)}" if abs(sparsity - asked) > MISSED else ""
    text = f"Of the output head's weights {percent(sparsity, 2)} are masked{missed}, by {method(head.words('method')[0])}; "
    text += f"those that stay hold {percent(kept)} of its absolute weight."
    text += f" Its damping was {damping:g}." if damping == damping else ""
    return [text + (f" {dead:.0f} of its inputs are zero for every calibration token." if dead > 0 else "")]


def _is_expert(name: str) -> bool:
    return any(part.isdigit() for part in name.split("."))


def _exceptions(results: Results, wanted: dict[str, Any]) -> list[str]:
    """Other shares, fallbacks, raised damping, dead inputs: whatever was not done as asked."""
    table, readings = results.masks, worst(read_shares(results.allocation, results.masks))
    names, methods = table.words("matrix"), table.words("method")
    fallen = [index for index, one in enumerate(methods) if one == "magnitude" != wanted["method"]]
    if fallen:
        places = blocks([table.whole("block")[index] for index in fallen])
        readings.append(
            f"{counted(len(fallen), 'matrix', 'matrices')} of {len(names):,} saw fewer than {wanted['expert_tokens']} "
            f"calibration tokens and went by magnitude ({places})."
        )
    damping = table.numbers("damping")
    if np.isfinite(damping).any():
        raised = int((damping > wanted["sparsegpt"]["damping"] * 1.001).sum())
        text = (
            f"raised in {counted(raised, 'matrix', 'matrices')}, to {float(np.nanmax(damping)):g} at most"
            if raised
            else "nowhere raised"
        )
        readings.append(f"SparseGPT's damping of {wanted['sparsegpt']['damping']:g} was {text}.")
    dead = table.numbers("dead_inputs")
    if np.nansum(dead) > 0:
        readings.append(
            f"{int(np.nansum(dead)):,} inputs are zero for every calibration token; SparseGPT sets their weights to zero."
        )
    return readings


def _experts(results: Results) -> Table | None:
    """Tokens per expert, a row per block; None without experts."""
    table = results.masks
    inside = np.array([_is_expert(name) for name in table.words("matrix")])
    tokens, of = np.nan_to_num(table.numbers("tokens")), np.array(table.whole("block"))
    if not inside.any() or not np.isfinite(table.numbers("tokens")).any():
        return None
    methods = np.array(table.words("method"))
    rows = []
    for block in np.unique(of[inside]).tolist():
        here = inside & (of == block)
        some = tokens[here]
        counts = [fixed(float(one), 0) for one in (some.min(), np.median(some), some.max())]
        rows.append((str(block), *counts, str(int((some == 0).sum())), str(int((methods[here] == "magnitude").sum()))))
    heads = ("Block", "Tokens, least", "Median", "Most", "Matrices never reached", "Matrices by magnitude")
    return Table(heads, tuple(rows))

"""The page: everything computed, then set into `page.html.j2`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from pipeline.artifacts import human_bytes
from pipeline.drawing.notation import between, counted, fixed, number, percent, plain, whole
from pipeline.drawing.style import PAGE, THEME
from stages.report.answers import Score, compare_answers
from stages.report.comparison import Difference, Variant, by_protocol, conflicts, paired_difference
from stages.report.headline import deeds, outcome
from stages.report.results import Results
from stages.report.sections import Part
from stages.report.sections.ghost import ghost
from stages.report.sections.masks import masks
from stages.report.sections.peeling import peeling
from stages.report.sections.perplexity import perplexity
from stages.report.sections.redundancy import redundancy
from stages.report.sections.removal import removal
from stages.report.sections.sparsity import sparsity
from stages.report.sections.yes import yes
from stages.report.sections.zeroshot import zeroshot
from stages.report.settings import settings

HERE = Path(__file__).parent
WHAT = {
    "dense": "as it came",
    "masked": "masks only",
    "removed": "blocks gone, nothing in their place",
    "compressed": "all of it, read back from the export",
}
PROTOCOL = {
    "contract": "Contract",
    "corpus": "Corpus",
    "split": "Split",
    "length": "Window length, tokens",
    "stride": "Stride, tokens",
    "windows": "Windows",
    "scored_per_window": "Scored per window",
    "tokens_scored": "Tokens scored",
    "special_tokens": "Special tokens",
    "separator": "Separator",
    "join": "Documents joined by",
    "blank_documents": "Blank documents",
    "words": "Words of the text",
    "rest": "What fills no window",
    "overlap": "Overlap of windows",
    "dtype": "Precision",
    "corpus_documents": "Documents in the corpus",
    "corpus_tokens": "Tokens in the corpus",
    "corpus_revision": "Corpus revision",
    "corpus_sha256": "Corpus SHA-256",
}


@dataclass(frozen=True)
class Row:
    """One variant in the table of perplexities, as text."""

    name: str
    what: str
    perplexity: str
    interval: str
    difference: str
    difference_interval: str
    sparsity: str
    parameters: str
    bytes: str
    blocks: str


@dataclass(frozen=True)
class Scores:
    """Variants of one protocol: their rows and the protocol, as text."""

    rows: tuple[Row, ...]
    protocol: tuple[tuple[str, str], ...]
    confidence: str
    paired: bool


@dataclass(frozen=True)
class Comparison:
    """Which variants may be compared, and by how much they differ from dense."""

    groups: list[list[Variant]]
    differences: dict[str, Difference]
    recovery: Difference | None
    scores: list[Score]  # on tasks


def compare(results: Results, resamples: int, seed: int) -> Comparison:
    """Pair every variant of the dense model's protocol with dense, and compressed with removed."""
    variants = results.variants
    groups = by_protocol(list(variants.values()))
    peers = {one.name: one for one in groups[0]}
    dense = variants["dense"]

    def pair(one: Variant, other: Variant) -> Difference:
        return paired_difference(one.windows, other.windows, resamples, dense.confidence, seed, one.scored)

    differences = {name: pair(one, dense) for name, one in peers.items() if name != "dense"}
    both = "compressed" in peers and "removed" in peers
    recovery = pair(peers["compressed"], peers["removed"]) if both else None
    return Comparison(groups, differences, recovery, compare_answers(results.answers, dense.confidence))


def parts(results: Results, comparison: Comparison, params: dict[str, Any]) -> list[Part]:
    """All pictures with their readings, in the order of the page."""
    left_out = [one.name for group in comparison.groups[1:] for one in group]
    recovery = comparison.recovery if results.removed else None
    return [
        perplexity(comparison.groups[0], comparison.differences, recovery, left_out),
        *([zeroshot(comparison.scores, results.variants["dense"].confidence)] if comparison.scores else []),
        sparsity(results, params),
        masks(results, params),
        redundancy(results, params),
        removal(results, params),
        ghost(results, params),
        peeling(results, params),
        *([yes(results, params)] if len(results.yes) else []),
    ]


def render(results: Results, comparison: Comparison, made: Sequence[Part], params: dict[str, Any]) -> str:
    """The whole page as HTML."""
    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["whole_ranges"] = _whole_ranges
    return environment.get_template("page.html.j2").render(
        title=params["report"]["title"],
        styles=Markup(THEME + PAGE),
        deeds=deeds(results, params),
        outcome=outcome(results, comparison.differences.get("compressed")),
        conflicts=conflicts(comparison.groups, PROTOCOL),
        scores=[_scores(group, comparison.differences) for group in comparison.groups],
        resampling=f"{params['evaluation']['resamples']:,} bootstrap resamples over windows, seed {params['evaluation']['seed']}",
        parts=made,
        settings=settings(params),
        notes=_notes(results),
        svg=Markup,
    )


def _whole_ranges(text: str) -> str:
    """Keep `20–22` on one line: browsers break after the dash."""
    return re.sub(r"(?<=\d)–(?=\d)", "\u2060–\u2060", text)


def _scores(group: list[Variant], differences: dict[str, Difference]) -> Scores:
    protocol = group[0].protocol
    known = [(label, protocol[key]) for key, label in PROTOCOL.items() if key in protocol]
    other = [(key.replace("_", " ").capitalize(), value) for key, value in protocol.items() if key not in PROTOCOL]
    rows = tuple(_row(variant, differences.get(variant.name)) for variant in group)
    paired = any(variant.name in differences for variant in group)
    return Scores(
        rows, tuple(known + other), percent(group[0].confidence, 0 if group[0].confidence * 100 % 1 == 0 else 1), paired
    )


def _row(variant: Variant, difference: Difference | None) -> Row:
    return Row(
        name=variant.name,
        what=WHAT.get(variant.name, ""),
        perplexity=number(variant.perplexity),
        interval=between(variant.low, variant.high),
        difference=fixed(difference.mean, sign=True) if difference else "",
        difference_interval=between(difference.low, difference.high, 3) if difference and difference.low is not None else "",
        sparsity=percent(variant.sparsity, 2),
        parameters=whole(variant.parameters),
        bytes=human_bytes(variant.bytes),
        blocks=plain(variant.blocks) if variant.blocks is not None else "",
    )


def _notes(results: Results) -> list[str]:
    """What the numbers do not say, with the numbers at hand."""
    dense, masked = results.variants["dense"], results.variants["masked"]
    same = (
        f": the masked model holds {whole(masked.zeros)} zeros and takes the same {human_bytes(masked.bytes)} as the dense one"
        if masked.zeros and masked.bytes == dense.bytes
        else ""
    )
    zeros = f"Zeros do not make a dense checkpoint smaller or faster{same}. Only missing blocks do. Bytes count every weight."
    sparse = "Sparsity is counted in the weights themselves: zeros among the prunable matrices of the blocks"
    draws = f"Intervals come from resampling {counted(len(dense.windows), 'window')} as if each were drawn on its own"
    tasks = "" if results.answers else "accuracy on tasks, for "
    papers = "Methods follow public descriptions of published work. No number is claimed to equal a paper's"
    return [
        zeros,
        f"{sparse}. Embeddings, head and norms are not among them.",
        f"{draws}. Windows of one article are not, so the true uncertainty is larger.",
        "Nothing here speaks of other text, other calibration samples or other models.",
        f"{papers}: those rest on other models, text and protocols.",
        f"Perplexity measures one thing. It does not stand for {tasks}long contexts or for generated text.",
    ]

"""The first two sentences of the page: what was done to which model, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from pipeline.drawing.notation import between, blocks, counted, fixed, listing, number, percent, sentence, whole
from stages.report.columns import Columns
from stages.report.comparison import Difference
from stages.report.naming import method
from stages.report.results import Results
from stages.report.shares import Shares, read_shares

FEW_RUNS = 4  # more removed runs than these are not spelled out
PLAIN_JOIN = repr("\n\n")  # how documents are joined where nothing is said of it


def model_name(model: Mapping[str, Any]) -> str:
    """What params.yaml calls the model, without the folders of this machine."""
    if model["source"] == "hub":
        revision = model.get("revision") or "main"
        return f"{model['repository']}{'' if revision == 'main' else f' ({revision})'}"
    if model["source"] == "scratch":
        return "the model trained here"
    return PurePath(str(model["path"])).name if model.get("path") and model["source"] != "demo" else "the demo model"


def deeds(results: Results, params: Mapping[str, Any]) -> str:
    """What was done, in one sentence: masks, removal, operators, as the tables show them."""
    masked, done = results.variants["masked"], []
    if masked.sparsity > 0:
        pattern = params["masking"]["pattern"]
        where = "" if pattern == "unstructured" else f" in the pattern {pattern}"
        how = f"{method(params['masking']['method'])}{where}, {method(params['allocation']['method'])} allocation"
        how += _by_the_masks(read_shares(results.allocation, results.masks), pattern)
        done.append(f"{percent(masked.sparsity)} of the prunable weights are set to zero ({how})")
    if (results.head.numbers("sparsity") > 0).any():
        share = percent(float(results.head.numbers("sparsity")[0]))
        done.append(f"{share} of the output head's weights {'too' if done else 'are set to zero'}")
    if results.removed:
        which = f"{blocks(results.removed)}, " if len(results.gaps) <= FEW_RUNS else ""
        are = "is" if len(results.removed) == 1 else "are"
        chosen = f"({which}chosen by {method(results.removal_method)})"
        done += [f"{len(results.removed)} of {results.blocks} blocks {are} removed {chosen}", _stand_in(results.ghost)]
    size = f"{counted(results.blocks, 'block')}, {whole(results.variants['dense'].parameters)} parameters"
    who = f"{model_name(params['model'])} ({size})"
    if not done:
        return sentence(f"{who} was measured and left as it is: nothing masked, nothing removed")
    return f"In {who}, {listing(done)}."


def outcome(results: Results, difference: Difference | None) -> str:
    """Perplexity before and after with its protocol; `difference` is None where the two cannot be compared."""
    dense, last = results.variants["dense"], results.variants["compressed"]
    if difference is None:
        return (
            "The dense and the compressed model were scored under different protocols, so their perplexities say nothing about "
            "each other; each stands below with its own."
        )
    if not difference.windows.any():
        verdict = f"Perplexity stays at {number(dense.perplexity)}: every window has the same loss before and after"
    else:
        span = between(difference.low, difference.high, 3) if difference.low is not None else ""
        interval = f", {percent(dense.confidence, 0)} interval {span}" if span else ""
        verdict = (
            f"Perplexity goes from {number(dense.perplexity)} to {number(last.perplexity)}: {fixed(difference.mean, sign=True)} "
            f"nats per token{interval}, paired over {counted(len(difference.windows), 'window')}"
        )
    return f"{verdict} ({short_protocol(dense.protocol)})."


def short_protocol(protocol: Mapping[str, str]) -> str:
    """The protocol in a line, for places too small for the list."""
    words = {"contract": "contract: {}", "corpus": "{}", "length": "{} tokens a window"}
    stated = [form.format(protocol[key]) for key, form in words.items() if key in protocol]
    stated += _custom(protocol) if protocol.get("contract") == "custom" else []
    words = {"special_tokens": "special tokens: {}", "dtype": "{}"}
    stated += [form.format(protocol[key]) for key, form in words.items() if key in protocol]
    return ", ".join([*stated, f"{protocol['tokens_scored']} tokens scored"])


def _custom(protocol: Mapping[str, str]) -> list[str]:
    """What the name of a contract says where it has one of its own: how windows lie, and what of the text is in them."""
    stride, join = protocol.get("stride"), protocol.get("join")
    said = [f"one every {stride}" if "overlap" in protocol else "end to end"] if stride else []
    said += [f"what overlaps is {protocol['overlap']}"] if "overlap" in protocol else []
    said += [f"the first {protocol['words']} words"] if "words" in protocol else []
    said += [f"documents joined by {join}"] if join not in (None, PLAIN_JOIN) and "words" not in protocol else []
    said += ["blank documents kept"] if protocol.get("blank_documents") == "kept" else []
    return said + (["a short last window"] if protocol.get("rest") == "kept" else [])


def _by_the_masks(shares: Shares, pattern: str) -> str:
    """What the masks made of the allocation, in few words; nothing where they are as asked."""
    if not shares.missed_each.any():
        return ""
    how = "made uniform" if shares.levelled else "rounded"
    return f" {how} by {'the masks' if pattern == 'unstructured' else 'it'}"


def _stand_in(ghost: Columns) -> str:
    if not len(ghost):
        return "nothing stands in for them"
    kinds = listing(sorted({method(name) for name in ghost.words("operator") if name})) or "linear"
    if len(ghost) == 1:
        return f"a closed-form operator ({kinds}) stands in for what they did"
    return f"{len(ghost)} closed-form operators ({kinds}) stand in for what they did"

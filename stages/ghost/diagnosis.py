"""How good an operator is on tokens it has not seen, sinks and the rest apart, and how its error grows behind it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pipeline.tensors import TensorFile
from stages.decoder.operators import Operator
from stages.decoder.skeleton import Decoder
from stages.decoder.stream import Stream, advance
from stages.decoder.tape import Tape
from stages.ghost.rows import Batch
from stages.ghost.sinks import find_sinks, token_norms
from stages.ghost.student import first_masked, fold_block, masked_block, operators_at, repair


def errors_apart(
    batches: Iterator[Batch], operator: Operator, ids: Int[Tensor, "window token"], sinks: Bool[Tensor, "window token"]
) -> tuple[float, float]:
    """||X M + b - D|| / ||D|| with the operator as it runs, over the sinks and over the rest; NaN where there is none of them.

    Args:
        batches: rows to judge it on.
        operator: in the precision of the rows.
        ids: of all windows.
        sinks: of all windows.
    """
    left, whole = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for start, x, d in batches:
        span = slice(start, start + len(x))
        missing = (operator.apply(x, ids[span]) - x - d).double().square().sum(-1).cpu()
        step, here = d.double().square().sum(-1).cpu(), sinks[span]
        for place, some in enumerate((here, ~here)):
            left[place] += missing[some].sum()
            whole[place] += step[some].sum()
    on_sinks, on_rest = [float(a / b) ** 0.5 if float(b) > 0 else float("nan") for a, b in zip(left, whole, strict=True)]
    return on_sinks, on_rest


def growth(
    decoder: Decoder,
    tape: Tape,
    ids: Int[Tensor, "window token"],
    first_window: int,
    removed: list[int],
    operators: Mapping[tuple[int, int], Operator],
    masks: TensorFile | None,
    threshold: float,
    batch_tokens: int,
    folder: Path,
) -> list[dict[str, Any]]:
    """How far the stream is from the dense one, at each boundary from the first changed block on, over the held-out windows.

    Errors are relative to the dense stream there: with the operators (`restored`) and with the blocks gone and nothing in
    their place (`removed`), over all tokens and over those that are no sinks (`_rest`).

    Args:
        first_window: the held-out windows are those from here on.
        masks: of the student; None for dense weights.
        threshold: what makes a sink, see `find_sinks`; at each boundary among the held-out windows.
        folder: where the scratch files lie.
    """
    folds = {start - 1: one for (start, _), one in operators.items() if one.fold is not None}
    first = min([*removed, *folds])
    first = first if masks is None else first_masked(masks, decoder, first)
    windows = ids[first_window:]
    shape = (len(windows), tape.length, tape.width)
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        with_them, without = (stack.enter_context(Stream(folder, shape, decoder.dtype)) for _ in range(2))
        for start, stop in tape.batches(batch_tokens, first_window):
            for stream in (with_them, without):
                stream.write(start - first_window, tape.read(first, start, stop))
        for index in range(first, len(decoder)):
            if index in removed:
                for operator in operators_at(operators, index):
                    repair(with_them, operator, windows, batch_tokens, decoder.device)
                if index + 1 in removed:  # inside a run
                    continue
            else:
                with masked_block(decoder, index, masks) as block:
                    advance(decoder, index, without, batch_tokens)
                    if index in folds:
                        fold_block(block, folds[index])
                    advance(decoder, index, with_them, batch_tokens)
            here: dict[str, Any] = {"boundary": index + 1}
            apart = find_sinks(token_norms(tape, index + 1, batch_tokens, first_window), threshold)
            for name, stream in (("restored", with_them), ("removed", without)):
                here[name], here[f"{name}_rest"] = _distance(stream, tape, index + 1, first_window, apart, batch_tokens)
            rows.append(here)
    return rows


def _distance(
    stream: Stream, tape: Tape, boundary: int, first_window: int, sinks: Bool[Tensor, "window token"], batch_tokens: int
) -> tuple[float, float]:
    """||student - dense|| / ||dense||, over all tokens and over those that are no sinks."""
    left, whole = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for start, stop in tape.batches(batch_tokens, first_window):
        span = slice(start - first_window, stop - first_window)
        dense: Float[Tensor, "window token channel"] = tape.read(boundary, start, stop).double()
        gap = (stream.read(span.start, span.stop).double() - dense).square().sum(-1)
        size = dense.square().sum(-1)
        for place, some in enumerate((torch.ones_like(sinks[span]), ~sinks[span])):
            left[place] += gap[some].sum()
            whole[place] += size[some].sum()
    overall, rest = [float(a / b) ** 0.5 if float(b) > 0 else float("nan") for a, b in zip(left, whole, strict=True)]
    return overall, rest

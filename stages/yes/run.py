"""Fit references to the model's own streams, give each a light head, set them beside the model, and say what that proves."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.console import plan, say
from pipeline.errors import PalimpsestError
from pipeline.files import Files
from pipeline.tensors import TensorFile
from stages.decoder.skeleton import Decoder
from stages.decoder.stream import Stream, read_windows
from stages.decoder.tape import Tape, split_held_out
from stages.yes import Params, Yes
from stages.yes.block import gridded_matrices
from stages.yes.chain import Goals, Solver
from stages.yes.controls import derangement, train_on
from stages.yes.head import LOGIT_BYTES
from stages.yes.judge import Judge, own_streams
from stages.yes.maps import Map, build_trie, chosen_maps, count_fits
from stages.yes.parts import Parts, ask_calls
from stages.yes.results import keep_best, write_nothing, write_results
from stages.yes.resume import Kept, fingerprint
from stages.yes.summary import Net

OWN, REFITTED, SHUFFLED, CONTINUED = "model", "model, head refitted", "shuffled targets", "model, trained on"
SCRATCH = ".yes"  # beside the outputs: fits of a run that is not finished
BYTES_PER_WEIGHT = 28  # of what is fitted: weights, gradient, two moments, the best so far, and casts


def run(params: Params, inputs: Files, outputs: Files) -> None:
    """Write `yes.csv`, a row per net; `yes_layers.csv`, a row per inner boundary; `yes_blocks.csv`, a row per fit; `yes.json`,
    the verdict; `yes.safetensors`, losses [net, window]; and `yes_best/`, the best reference as a checkpoint.

    Losses are in nats per scored token, on the windows of the fit (train) and on others (test), the same for all nets.
    """
    if params.yes.maps == "none":
        shutil.rmtree(outputs["yes.csv"].parent / SCRATCH, ignore_errors=True)  # of a run that was killed
        write_nothing(outputs)
        return
    compute = params.compute
    decoder = Decoder(inputs["model"], compute.resolve_dtype(), compute.resolve_device())
    wanted, apart = _as_monitored(params.yes, decoder)
    tape, tokens = Tape(inputs["tape.safetensors"]), TensorFile(inputs["tokens.safetensors"])
    tape.check_model(len(decoder), decoder.width)
    ids, parts = _windows(tape, tokens, decoder, wanted)
    maps = chosen_maps(wanted.maps, len(decoder))
    source = _source(wanted, inputs["model"], decoder, inputs["model"].parents[1])
    folder = outputs["yes.csv"].parent
    _plan(decoder, maps, ids, parts, wanted, compute.batch_tokens, folder)
    checkpoints = [one.checkpoint for one in (decoder, source) if one]
    made_from = fingerprint(
        checkpoints, inputs["tokens.safetensors"], inputs["tape.safetensors"], params.model_dump(), decoder.device
    )
    kept = Kept(folder / SCRATCH, made_from)

    ask_calls(decoder, parts, tape.length, wanted.batch_tokens, compute.batch_tokens)
    solver = Solver(decoder, wanted, parts, compute.batch_tokens, kept, folder, source)
    goals: Goals = lambda boundary, windows: torch.cat([tape.read(boundary, one, one + 1) for one in windows])  # noqa: E731
    with ExitStack() as alive:
        first, last = (alive.enter_context(Stream(folder, (*ids.shape, decoder.width), decoder.dtype)) for _ in range(2))
        own_streams(decoder, tape, ids, parts, first, last, compute.batch_tokens)
        finals, fits = solver.solve(maps, first, goals, alive)
        judge = Judge(decoder, ids, parts, wanted, kept)
        nets = [judge.plainly(OWN, last), judge.refitted(REFITTED, last, "control")]
        nets += [judge.refitted(name, finals[name], _role(maps[name], decoder, apart), maps[name]) for name in maps]
        best = _best(nets)
        if wanted.shuffled:
            turned = derangement(parts, wanted.seed)
            astray: Goals = lambda boundary, windows: goals(boundary, [turned[one] for one in windows])  # noqa: E731
            lost, _ = replace(solver, label="shuffled").solve({SHUFFLED: maps[best.name]}, first, astray, alive)
            nets.append(judge.refitted(SHUFFLED, lost[SHUFFLED], "control", maps[best.name]))
        if wanted.continued:
            final = alive.enter_context(Stream(folder, (*ids.shape, decoder.width), decoder.dtype))
            head, steps = train_on(decoder, ids, parts, wanted, list(judge.start), final, compute.batch_tokens)
            nets.append(judge.net(CONTINUED, final, head, "control", (), steps))
    share = judge.seconds / max(judge.seconds + solver.seconds, 1e-9)
    spent = f"heads {_each(judge.seconds, judge.fitted)}, {share:.0%} of the time of all fits"
    say(f"{solver.fitted} blocks fitted, {_each(solver.seconds, solver.fitted)}; {spent}")
    write_results(outputs, nets, fits, len(decoder), wanted, _contract(tokens, decoder, parts, ids.shape[1], wanted))
    keep_best(outputs["yes_best"], decoder, kept, maps[best.name], best, wanted, tape.length - 1)
    kept.clear()


def _contract(tokens: TensorFile, decoder: Decoder, parts: Parts, length: int, wanted: Yes) -> dict[str, Any]:
    """All that has to be equal for the losses of two runs to be comparable."""
    text = {part: tokens.metadata.get(part, {}).get("corpus", "") for part in ("calibration", "evaluation")}
    return {
        "train": text["calibration"],
        "train_windows": len(parts.train(wanted.scored)),
        "test": f"{text['calibration']}, held out" if wanted.test == "held_out" else text["evaluation"],
        "test_windows": len(parts.test(wanted.test)),
        "length": length,
        "dtype": str(decoder.dtype).removeprefix("torch."),
    }


def _windows(tape: Tape, tokens: TensorFile, decoder: Decoder, wanted: Yes) -> tuple[Tensor, Parts]:
    """Token ids of all windows used, and which windows are what."""
    calibration = read_windows(tokens, "calibration", decoder)
    tape.check_windows(*calibration.shape)
    used = min(wanted.windows or len(calibration), len(calibration))
    fit = split_held_out(used, wanted.held_out, "yes.held_out")
    evaluation = calibration[:0]
    if wanted.test != "held_out":
        if "scored" in tokens:
            raise PalimpsestError(
                f"{tokens.path}: the evaluation windows overlap or are filled up (tokens.contract), and references are measured "
                "on whole windows; params.yaml: yes.test: held_out, or another tokens.contract"
            )
        evaluation = read_windows(tokens, "evaluation", decoder)[: wanted.test_windows]
    for key, asked, there in (
        ("windows", wanted.windows, used),
        ("scored", wanted.scored, fit),
        ("test_windows", wanted.test_windows, len(evaluation)),
    ):
        if asked and 0 < there < asked:
            say(f"yes.{key}: {there}, there are no more")
    if evaluation.shape[1] != calibration.shape[1]:
        raise PalimpsestError(
            f"{tokens.path}: evaluation windows of {evaluation.shape[1]} tokens, calibration windows of {calibration.shape[1]}; "
            "params.yaml: yes.test: held_out needs no evaluation windows"
        )
    return torch.cat([calibration[:used], evaluation]), Parts(fit, used - fit, len(evaluation))


def _as_monitored(wanted: Yes, decoder: Decoder) -> tuple[Yes, bool]:
    """`wanted` with the grid that stage `model` knows the weights to lie on, where the section names none; and whether the
    references are of another class than the model, since they lie on another grid than that, or other matrices do.

    Raises PalimpsestError naming the key and a pattern that fits no matrix.
    """
    asked = gridded_matrices(decoder, wanted)
    known = {key: decoder.checkpoint.manifest[key] for key in ("grid", "matrices") if key in decoder.checkpoint.manifest}
    if not known:
        return wanted, False
    monitored = wanted.model_copy(update=known)
    if wanted.grid == "none":
        say(f"references on the grid of the model: {known['grid']}, {', '.join(known['matrices'])}")
        return monitored, False
    apart = wanted.grid != known["grid"] or asked != gridded_matrices(decoder, monitored)
    if apart:
        say(
            f"references and no bounds: yes.grid = {wanted.grid}, yes.matrices = {', '.join(wanted.matrices)}, while the model "
            f"lies on {known['grid']}, {', '.join(known['matrices'])}"
        )
    return wanted, apart


def _source(wanted: Yes, model: Path, decoder: Decoder, root: Path) -> Decoder | None:
    """The checkpoint that blocks start from, a relative one from the project's root; None: they start fresh."""
    if wanted.initial == "fresh":
        return None
    path = model if wanted.initial == "checkpoint" else root / Path(str(wanted.pretrained)).expanduser()
    said = f"params.yaml: yes.pretrained = '{wanted.pretrained}'"
    if not path.is_dir():
        raise PalimpsestError(f"{said}: no such folder")
    try:
        source = Decoder(path, torch.float32, "cpu", decoder.checkpoint.trust_remote_code)
    except PalimpsestError as error:
        raise PalimpsestError(f"{said}: {error}") from None
    if source.block_types() != decoder.block_types():
        raise PalimpsestError(f"{said}: its blocks are not those of the model")
    return source


def _plan(
    decoder: Decoder, maps: dict[str, Map], ids: Tensor, parts: Parts, wanted: Yes, batch_tokens: int, folder: Path
) -> None:
    block = decoder.block_bytes() // decoder.dtype.itemsize
    around = decoder.trunk_bytes() // decoder.dtype.itemsize
    whole = block * len(decoder) + around
    fits, stream = count_fits(build_trie(maps)), ids.numel() * decoder.width * decoder.dtype.itemsize
    apart = sum(map(len, maps.values()))
    say(f"{len(maps)} maps, {fits} blocks to fit, {apart} if each by itself; on {parts.fit} windows, {parts.held_out} held out")
    activations = 64 * max(min(batch_tokens, ids.numel()), wanted.batch_tokens) * decoder.width * 4
    fitted = max(block, around) if not wanted.continued else whole
    plan(
        memory=BYTES_PER_WEIGHT * fitted + activations + 4 * LOGIT_BYTES,
        disk=(len(maps) + len(decoder) + 2) * stream + fits * 4 * block + (len(maps) + 2) * 4 * around,
        folder=folder,
        memory_key="yes.continued: false" if wanted.continued else "yes.batch_tokens or compute.batch_tokens",
        disk_key="yes.maps or yes.windows",
    )


def _best(nets: list[Net]) -> Net:
    """The reference with the lowest loss on the windows of the fit: of the model's class, if any is."""
    bounds, shallow = ([net for net in nets if net.role == role] for role in ("bound", "reference"))
    return min(bounds or shallow, key=lambda net: float(net.train.mean()))


def _role(targets: Map, decoder: Decoder, apart: bool) -> str:
    """Whether the net is of the model's class: one of fewer blocks is not, where a block cannot do nothing; nor one `apart`,
    whose weights may take other values than the model's."""
    return "bound" if len(targets) == len(decoder) and not apart else "reference"


def _each(seconds: float, count: int) -> str:
    return f"{seconds / count:.1f} s each" if count else "none"

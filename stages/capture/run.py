"""Record the tape: run the calibration windows through the model block by block, keeping the stream at every boundary."""

from __future__ import annotations

from pipeline.console import plan, progress, say
from pipeline.files import Files
from pipeline.tensors import TensorFile, TensorWriter
from stages.capture import Params
from stages.decoder.skeleton import Decoder
from stages.decoder.stream import batches, finite_or_stop, read_windows
from stages.decoder.tape import boundary_name


def run(params: Params, inputs: Files, outputs: Files) -> None:
    """Write `tape.safetensors`: one tensor [window, token, channel] per boundary, in the dtype of forward passes."""
    compute = params.compute
    decoder = Decoder(inputs["model"], compute.resolve_dtype(), compute.resolve_device())
    ids = read_windows(TensorFile(inputs["tokens.safetensors"]), "calibration", decoder)
    windows, length = ids.shape
    ranges = batches(windows, length, compute.batch_tokens)

    shape = (windows, length, decoder.width)
    specs = {boundary_name(boundary): (shape, decoder.dtype) for boundary in range(len(decoder) + 1)}
    tape = TensorWriter(outputs["tape.safetensors"], specs, {"axes": ["window", "token", "channel"], "boundaries": len(specs)})
    batch_bytes = (ranges[0][1] - ranges[0][0]) * length * decoder.width * decoder.dtype.itemsize
    plan(
        memory=max(decoder.trunk_bytes(), decoder.block_bytes()) + 16 * batch_bytes,
        disk=tape.bytes,
        folder=outputs["tape.safetensors"].parent,
        memory_key="compute.batch_tokens",
        disk_key="tokens.calibration_windows or tokens.length",
    )
    with tape:
        with decoder.trunk():
            for start, stop in ranges:
                hidden = decoder.embed(ids[start:stop].long())
                finite_or_stop(hidden, "embedding", start)
                tape.write(boundary_name(0), hidden, start)
        for index in progress(range(len(decoder)), "block"):
            with decoder.block(index):
                for start, stop in ranges:
                    hidden = tape.read(boundary_name(index), start, stop).to(decoder.device)
                    hidden = decoder.call(index, hidden)
                    finite_or_stop(hidden, f"block {index}", start)
                    tape.write(boundary_name(index + 1), hidden, start)
    say(f"{windows} windows of {length} tokens at {len(decoder) + 1} boundaries, {str(decoder.dtype).removeprefix('torch.')}")

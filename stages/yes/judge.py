"""The same windows for all: a net's final stream, a head where it needs one, its losses."""

from __future__ import annotations

import time

from torch import Tensor

from pipeline.console import say
from stages.decoder.skeleton import Decoder
from stages.decoder.stream import Stream, finite_or_stop
from stages.decoder.tape import Tape
from stages.yes import Yes
from stages.yes.block import Weights
from stages.yes.head import fit_head, own_head, window_losses
from stages.yes.maps import Map
from stages.yes.parts import Parts
from stages.yes.resume import Kept
from stages.yes.summary import Net


def own_streams(decoder: Decoder, tape: Tape, ids: Tensor, parts: Parts, first: Stream, last: Stream, batch_tokens: int) -> None:
    """Fill `first` with the embedding and `last` with the model's last stream: from the tape where it has the windows."""
    ranges = list(parts.batches(tape.length, batch_tokens))
    behind = [span for span in ranges if span[0] >= parts.calibration]
    for start, stop in ranges[: len(ranges) - len(behind)]:
        first.write(start, tape.read(0, start, stop))
        last.write(start, tape.read(tape.boundaries - 1, start, stop))
    with decoder.trunk():
        for start, stop in behind:
            hidden = decoder.embed(ids[start:stop].long())
            first.write(start, hidden)
            last.write(start, hidden)
    for index in range(len(decoder)) if behind else ():
        with decoder.block(index):
            for start, stop in behind:
                hidden = decoder.call(index, last.read(start, stop).to(decoder.device))
                finite_or_stop(hidden, f"block {index}", start)
                last.write(start, hidden)


class Judge:
    """Gives every net its losses on the same windows, and a head first where it needs one."""

    def __init__(self, decoder: Decoder, ids: Tensor, parts: Parts, wanted: Yes, kept: Kept):
        self.decoder, self.ids, self.parts, self.wanted, self.kept = decoder, ids, parts, wanted, kept
        self.seconds, self.fitted = 0.0, 0
        with decoder.trunk(head=True):
            self.start = own_head(decoder, wanted.head)

    def plainly(self, name: str, final: Stream) -> Net:
        """The losses under the model's own head."""
        return self.net(name, final, {}, "model", (), 0)

    def refitted(self, name: str, final: Stream, role: str, targets: Map = ()) -> Net:
        """The losses under a head fitted to this stream."""
        there = self.kept.read(f"head {name}")
        if there is None:
            begin = time.monotonic()
            with self.decoder.trunk(head=True):
                head, steps = fit_head(self.decoder, self.start, final, self.ids, self.parts, self.wanted)
            self.kept.write(f"head {name}", head, {"steps": steps})
            there = head, {"steps": steps}
            self.seconds, self.fitted = self.seconds + time.monotonic() - begin, self.fitted + 1
        return self.net(name, final, there[0], role, targets, int(there[1]["steps"]))

    def net(self, name: str, final: Stream, head: Weights, role: str, targets: Map, steps: int) -> Net:
        """The losses under a given head."""
        both = self.parts.train(self.wanted.scored), self.parts.test(self.wanted.test)
        with self.decoder.trunk(head=True):
            train, other = (window_losses(self.decoder, head, final, self.ids, windows, name) for windows in both)
        net = Net(name, role, targets, train, other, steps)
        say(f"{name}: loss {net.train.mean():.4f} on the windows of the fit, {net.test.mean():.4f} on others")
        return net

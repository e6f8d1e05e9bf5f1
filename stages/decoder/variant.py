"""A variant of the model as the stages that judge it see it: masks applied, blocks left out, or the exported checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from pipeline.files import Files
from pipeline.tensors import TensorFile
from stages.decoder.compute import Compute
from stages.decoder.masks import apply_head_mask, apply_masks
from stages.decoder.operators import read_removed
from stages.decoder.skeleton import Decoder


@dataclass(frozen=True)
class Variant:
    """A model, block by block. `removed` blocks are jumped."""

    decoder: Decoder
    masks: TensorFile | None
    removed: frozenset[int]

    @property
    def kept(self) -> list[int]:
        """The blocks that run, in order."""
        return [index for index in range(len(self.decoder)) if index not in self.removed]

    @contextmanager
    def block(self, index: int) -> Iterator[nn.Module]:
        """Block `index` as the variant has it, for the duration of the context."""
        with self.decoder.block(index) as block:
            if self.masks is not None:
                apply_masks(block, self.masks, index)
            yield block

    @contextmanager
    def head(self) -> Iterator[None]:
        """Final norm and the logits' matrix as the variant has them, for the duration of the context."""
        with self.decoder.trunk(head=True):
            if self.masks is not None:
                apply_head_mask(self.decoder, self.masks)
            yield


def read_variant(inputs: Files, compute: Compute) -> Variant:
    """The variant that the inputs say: masks alone, removed blocks alone, the exported checkpoint, or none of them."""
    exported = "compressed" in inputs
    decoder = Decoder(
        inputs["compressed" if exported else "model"],
        compute.resolve_dtype(),
        compute.resolve_device(),
        trust_remote_code=True if exported else None,  # the modelling file is the one stage compress wrote
    )
    masks = TensorFile(inputs["masks.safetensors"]) if "masks.safetensors" in inputs else None
    removed = frozenset(read_removed(inputs["removal.json"], len(decoder)) if "removal.json" in inputs else ())
    return Variant(decoder, masks, removed)

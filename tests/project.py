"""A project in a temporary folder: a tiny checkpoint, tokens, and any stage run in this process as the runner would run it."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

from pipeline.files import Files
from pipeline.graph import read_graph
from pipeline.params import stage_params
from pipeline.tensors import write_tensors
from tests.models import save_model

REPOSITORY = Path(__file__).parent.parent
ORDER = [
    "capture", "statistics", "redundancy", "search", "sensitivity", "allocation", "masking", "removal", "ghost", "peeling",
    "yes", "compress",
]  # fmt: skip
VARIANTS = [f"{stage}@{one}" for stage in ("evaluation", "zeroshot") for one in ("dense", "masked", "removed", "compressed")]


class Project:
    """`run(stage, **sections)` runs one stage with the given values over the defaults."""

    def __init__(self, root: Path, family: str = "llama", blocks: int = 4, windows: int = 6, length: int = 16, **save: Any):
        self.root = root
        self.data = root / "data"
        self.model = save_model(self.data / "model", family, blocks, **save)
        self.params: dict[str, dict[str, Any]] = {"compute": {"dtype": "float32", "device": "cpu", "batch_tokens": 32}}
        generator = torch.Generator().manual_seed(2)
        ids = torch.randint(3, 96, (windows + 4, length), generator=generator, dtype=torch.int32)
        tensors = {"calibration": ids[:windows], "evaluation": ids[windows:]}
        write_tensors(self.data / "tokens.safetensors", tensors, {"evaluation": {"corpus": "random"}})
        self.graph = read_graph(REPOSITORY / "dvc.yaml")

    def run(self, stage: str, **sections: dict[str, Any]) -> Path:
        """Run `stage`; the sections given are remembered. Returns the path of its first output."""
        for section, values in sections.items():
            self.params[section] = {**self.params.get(section, {}), **values}
        node = self.graph[stage]
        package = stage.split("@")[0]
        params = stage_params(package, self.params, list(node.params))
        outputs = Files(stage, "outs", node.writes, self.root)
        importlib.import_module(f"stages.{package}.run").run(params, Files(stage, "deps", node.reads, self.root), outputs)
        return next(iter(outputs.values()))

    def run_until(self, last: str, **sections: dict[str, Any]) -> Path:
        """Run the stages in order up to `last`."""
        for stage in [*ORDER, *VARIANTS]:
            path = self.run(stage, **sections)
            if stage == last:
                return path
        raise ValueError(last)

"""The table in the terminal, from made-up results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.artifacts import write_json
from pipeline.table import comparison

VARIANTS = ("dense", "masked", "removed", "compressed")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    row = {"perplexity": 24.0, "low": 21.0, "high": 27.0, "tokens": 8176, "sparsity": 0.5, "parameters": 1000, "bytes": 2000}
    write_json(tmp_path / "data/metrics.json", dict.fromkeys(VARIANTS, row))
    for name in VARIANTS:
        write_json(tmp_path / f"data/evaluation/{name}.json", {"confidence": 0.95, "contract": {"corpus": "tale", "stride": 512}})
    return tmp_path


def change(path: Path, **contract: Any) -> None:
    content = json.loads(path.read_text())
    content["contract"].update(contract)
    write_json(path, content)


def test_one_table_with_its_protocol(root: Path) -> None:
    lines = comparison(root).splitlines()
    assert [line.split()[0] for line in lines[:5]] == ["variant", *VARIANTS]
    assert lines[6] == "protocol   corpus tale, stride 512; interval 95%, bootstrap over windows"
    assert sum("protocol" in line for line in lines) == 1 and "NOT" not in lines[0]


def test_unlike_contracts_are_in_tables_of_their_own(root: Path) -> None:
    for name in ("masked", "compressed"):
        change(root / f"data/evaluation/{name}.json", stride=256)
    text = comparison(root)
    first, second, _ = text.split("protocol ")
    assert "NOT measured alike" in first
    assert [word for word in VARIANTS if f"\n{word} " in first] == ["dense", "removed"]
    assert [word for word in VARIANTS if f"\n{word} " in second] == ["masked", "compressed"]
    assert "stride 512" in second.splitlines()[0] and "stride 256" in text.split("protocol ")[2]

"""Artifacts: atomic, equal bytes for equal content, readable by others, and loud when broken."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from pipeline.artifacts import ArtifactError, atomic, human_bytes, read_json, read_table, write_json, write_table
from pipeline.tensors import TensorFile, TensorWriter, check_finite, write_tensors

WRITE = """
import sys, torch, pandas as pd
from pathlib import Path
from pipeline.artifacts import write_json, write_table
from pipeline.tensors import write_tensors
out = Path(sys.argv[1])
names = {"b", "a", "zeta", "c.weight", "d"}   # a set: its order differs with the hash seed
metadata = {name: {"unit": name, "axes": sorted(names)} for name in names}
write_tensors(out / "t.safetensors", {name: torch.arange(6.0).view(2, 3) for name in names}, metadata)
write_json(out / "j.json", {name: 1 / 3 for name in names})
write_table(out / "c.csv", pd.DataFrame({"x": [0.1, 1 / 3, 1e-12], "y": [1, 2, 3]}))
"""


def test_two_processes_write_equal_bytes(tmp_path: Path) -> None:
    seen = set()
    for seed in ("0", "1", "2", "3"):
        folder = tmp_path / seed
        folder.mkdir()
        subprocess.run([sys.executable, "-c", WRITE, str(folder)], check=True, env={**os.environ, "PYTHONHASHSEED": seed})
        seen.add(tuple(hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())))
    assert len(seen) == 1 and len(next(iter(seen))) == 3


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8]
)
def test_the_library_reads_what_we_write(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "long": torch.arange(12).view(3, 4).to(dtype),
        "odd": torch.arange(5).to(dtype),
        "empty": torch.zeros(0, 4, dtype=dtype),
    }
    tensors["flag"] = torch.tensor([True, False, True])  # one byte each, so that a wider tensor after it would be misaligned
    write_tensors(tmp_path / "t.safetensors", tensors)
    loaded = load_file(tmp_path / "t.safetensors")
    assert {name: (value.dtype, value.tolist()) for name, value in loaded.items()} == {
        name: (value.dtype, value.tolist()) for name, value in tensors.items()
    }


def test_we_read_what_the_library_writes(tmp_path: Path) -> None:
    value = torch.randn(4, 3)
    save_file({"w": value}, tmp_path / "t.safetensors", metadata={"format": "pt"})
    file = TensorFile(tmp_path / "t.safetensors")
    assert file.names() == ["w"] and file.shape("w") == (4, 3) and "w" in file
    assert torch.equal(file.read("w"), value) and torch.equal(file.rows("w", 1, 3), value[1:3])


def test_metadata_is_one_key(tmp_path: Path) -> None:
    """More keys would come out in random order (safetensors issue 584)."""
    write_tensors(tmp_path / "t.safetensors", {"w": torch.zeros(1)}, {"b": 1, "a": {"axes": ["x"]}})
    with safe_open(tmp_path / "t.safetensors", framework="pt") as file:
        assert list(file.metadata()) == ["palimpsest"]
    assert TensorFile(tmp_path / "t.safetensors").metadata == {"a": {"axes": ["x"]}, "b": 1}


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(6)), st.integers(1, 4))
def test_rows_in_any_order_give_the_same_file(tmp_path_factory: pytest.TempPathFactory, order: list[int], width: int) -> None:
    folder = tmp_path_factory.mktemp("rows")
    value = torch.randn(6, width)
    write_tensors(folder / "whole.safetensors", {"t": value})
    with TensorWriter(folder / "rows.safetensors", {"t": ((6, width), torch.float32)}) as writer:
        for row in order:
            writer.write("t", value[row : row + 1], row)
            assert torch.equal(writer.read("t", row, row + 1), value[row : row + 1])
    assert (folder / "rows.safetensors").read_bytes() == (folder / "whole.safetensors").read_bytes()


def test_a_hole_is_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="tensors not written.*b"),
        TensorWriter(tmp_path / "t.safetensors", {"a": ((2,), torch.float32), "b": ((2, 2), torch.float32)}) as writer,
    ):
        writer.write("a", torch.zeros(2))
        writer.write("b", torch.zeros(1, 2), 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("shape", "row"), [((3, 2), 0), ((1, 3), 0), ((1, 2), 2), ((2,), 0)])
def test_what_does_not_fit_is_refused(tmp_path: Path, shape: tuple[int, ...], row: int) -> None:
    with pytest.raises(ValueError, match="does not fit"), TensorWriter(tmp_path / "t", {"t": ((2, 2), torch.float32)}) as writer:
        writer.write("t", torch.zeros(shape), row)
    assert list(tmp_path.iterdir()) == []


def test_an_error_on_the_way_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    write_tensors(path, {"t": torch.ones(2)})
    with pytest.raises(RuntimeError), TensorWriter(path, {"t": ((2,), torch.float32)}) as writer:
        writer.write("t", torch.zeros(2))
        raise RuntimeError
    assert TensorFile(path).read("t").tolist() == [1, 1] and list(tmp_path.iterdir()) == [path]


KILLED = """
import sys, time, torch
from pathlib import Path
from pipeline.tensors import TensorWriter
with TensorWriter(Path(sys.argv[1]), {"t": ((1000, 1000), torch.float32)}) as writer:
    for row in range(999):
        writer.write("t", torch.ones(1, 1000), row)
    print("half-way", flush=True)
    time.sleep(60)
"""


def test_kill_leaves_no_file_under_the_name(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "half-way\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not path.exists()
    write_tensors(path, {"t": torch.zeros(2)})  # what the killed one left is in nobody's way
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "tape.safetensors"
    write_tensors(path, {"t": torch.zeros(64)})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ArtifactError, match=r"tape\.safetensors: .*safetensors.*dvc repro") as error:
        TensorFile(path)
    assert "\n" not in str(error.value)


def test_missing_and_foreign_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="tape.safetensors: not there"):
        TensorFile(tmp_path / "tape.safetensors")
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(ArtifactError, match="x.json: not JSON"):
        read_json(tmp_path / "x.json")
    with pytest.raises(ArtifactError, match="y.json: not there"):
        read_json(tmp_path / "y.json")
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ArtifactError, match="x.csv: no column 'c'.*a, b"):
        read_table(tmp_path / "x.csv", ("a", "c"))
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(ArtifactError, match="empty.csv: not a CSV"):
        read_table(tmp_path / "empty.csv")
    write_tensors(tmp_path / "t.safetensors", {"there": torch.zeros(1)})
    with pytest.raises(ArtifactError, match="no tensor 'wanted'.*there"):
        TensorFile(tmp_path / "t.safetensors").read("wanted")


def test_non_finite_is_named() -> None:
    assert check_finite(torch.zeros(2), "x").tolist() == [0, 0]
    for bad in (float("nan"), float("inf"), -float("inf")):
        with pytest.raises(ArtifactError, match="block 3: NaN or infinite"):
            check_finite(torch.tensor([0, bad]), "block 3")


def test_json_refuses_nan_and_leaves_the_old_file(tmp_path: Path) -> None:
    write_json(tmp_path / "j.json", {"a": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "j.json", {"a": float("nan")})
    assert json.loads((tmp_path / "j.json").read_text()) == {"a": 1} and len(list(tmp_path.iterdir())) == 1


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
@settings(max_examples=50, deadline=None)
def test_tables_keep_every_bit(tmp_path_factory: pytest.TempPathFactory, values: list[float]) -> None:
    path = tmp_path_factory.mktemp("table") / "t.csv"
    write_table(path, pd.DataFrame({"x": values}))
    assert [float(line) for line in path.read_text().splitlines()[1:]] == values


def test_atomic_keeps_the_old_file_when_writing_fails(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("old")
    with pytest.raises(RuntimeError), atomic(tmp_path / "f") as temporary:
        temporary.write_text("new")
        raise RuntimeError
    assert (tmp_path / "f").read_text() == "old" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (98_000_000, "98 MB"), (1.5e9, "1.5 GB")]
)
def test_human_bytes(count: float, text: str) -> None:
    assert human_bytes(count) == text


def test_progress_is_timely_and_yields_everything(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from pipeline import console

    clock = iter(float(second) for second in range(0, 1000, 2))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    assert list(console.progress(range(10), "block")) == list(range(10))
    lines = capsys.readouterr().out.splitlines()  # one at least five seconds after the other, the clock goes in steps of two
    assert lines == [f"  block {done}/10, about {left} s left" for done, left in ((2, 24), (5, 12), (8, 4))]

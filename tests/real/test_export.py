"""An export in the hands of a stranger: another process, another folder, none of this project at hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stages.decoder.skeleton import Decoder, DecoderError
from tests.plain import plain_logits, plain_variant, read_masks, read_operators, relative_gap
from tests.project import Project

STRANGER = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("pipeline", "stages", "tests"):
            raise ImportError(f"{name} is not there")

sys.meta_path.insert(0, Refuse())
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

folder, ids, out, trust = sys.argv[1:]
more = {"trust_remote_code": True} if trust == "trusted" else {}
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **more).eval()
ids = load_file(ids)["evaluation"].long()
with torch.no_grad():
    logits = model(input_ids=ids, use_cache=False).logits
    text = model.generate(ids[:1, :5], attention_mask=torch.ones(1, 5), max_new_tokens=6, do_sample=False)
save_file({"logits": logits, "text": text}, out)
print(sorted(name for name in sys.modules if name.split(".")[0] in ("pipeline", "stages")))
"""


def load_as_stranger(project: Project, root: Path, trust: str) -> subprocess.CompletedProcess[str]:
    """Load `compressed/` in a process of its own, with nobody to answer a question."""
    arguments = [str(project.data / "compressed"), str(project.data / "tokens.safetensors"), str(root / "out.safetensors"), trust]
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, "-I", "-c", STRANGER, *arguments],
        cwd=root,
        env={**clean, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(root / "modules")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module", params=["llama", "falcon"])
def project(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """An operator before the first block that is left, and one behind the last."""
    project = Project(tmp_path_factory.mktemp(request.param), request.param)
    project.run_until("evaluation@compressed", removal={"method": "list", "blocks": [0, 3]})
    return project


def test_a_stranger_loads_it_and_it_is_the_same(project: Project, tmp_path: Path) -> None:
    done = load_as_stranger(project, tmp_path, "trusted")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("[]"), "nothing of this project was imported"
    found = load_file(tmp_path / "out.safetensors")
    masks, operators = (
        read_masks(project.data / "masks.safetensors", project.model),
        read_operators(project.data / "ghost.safetensors"),
    )
    ids = load_file(project.data / "tokens.safetensors")["evaluation"]
    expected = plain_logits(plain_variant(project.model, masks, [0, 3], operators), ids)
    assert len(operators) == 2 and relative_gap(found["logits"], expected) < 1e-5
    losses = torch.nn.functional.cross_entropy(found["logits"][:, :-1].flatten(0, 1), ids[:, 1:].long().flatten())
    told = json.loads((project.data / "evaluation" / "compressed.json").read_text())
    assert told["loss"] == pytest.approx(float(losses), rel=1e-5)
    assert found["text"].shape == (1, 11)


def test_without_trust_it_stops_rather_than_drop_the_operators(project: Project, tmp_path: Path) -> None:
    done = load_as_stranger(project, tmp_path, "untrusted")
    assert done.returncode != 0 and "trust_remote_code" in done.stderr
    assert not (tmp_path / "out.safetensors").exists()


def test_code_is_short_and_needs_transformers_alone(project: Project) -> None:
    source = (project.data / "compressed" / "modeling_ghost.py").read_text()
    imports = {line.split()[1] for line in source.splitlines() if line.startswith(("import ", "from "))}
    assert imports <= {"inspect", "torch", "transformers"} and len(source.splitlines()) < 200
    compile(source, "modeling_ghost.py", "exec")


def test_a_broken_export_is_not_taken_for_whole(project: Project, tmp_path: Path) -> None:
    """An operator that is missing from the file must not become noise."""
    folder = tmp_path / "broken"
    folder.mkdir()
    for path in (project.data / "compressed").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: value for name, value in tensors.items() if "ghost" not in name}, folder / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(DecoderError, match=r"2 tensors of the model are not in the checkpoint: .*ghost_"):
        Decoder(folder, trust_remote_code=True)

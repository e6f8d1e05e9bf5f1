"""A whole run moves through a DVC remote: pushed, and pulled into a fresh clone, where nothing is left to do."""

from __future__ import annotations

import subprocess
from pathlib import Path

from pipeline.reproduce import reproduce
from tests.toy import copy_toy, run


def test_a_pushed_run_is_whole_in_a_fresh_clone(finished_toy: Path, tmp_path: Path) -> None:
    project, clone = copy_toy(finished_toy, tmp_path / "project"), tmp_path / "clone"
    remote = run(project, "dvc", "remote", "add", "--default", "results", str(tmp_path / "results"))
    assert remote.returncode == 0, remote.stderr
    for command in (["add", "."], ["-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "--quiet", "-m", "run"]):
        subprocess.run(["git", *command], cwd=project, check=True)
    assert run(project, "dvc", "push").returncode == 0
    (project / ".dvc/cache").rename(tmp_path / "out of reach")

    subprocess.run(["git", "clone", "--quiet", str(project), str(clone)], check=True)
    pulled = run(clone, "dvc", "pull")
    assert pulled.returncode == 0, pulled.stderr
    answers = reproduce(root=clone, say=lambda line: None)
    assert set(answers.values()) == {"unchanged"} and (clone / "data/report.html").is_file()
    assert (clone / "data/metrics.json").read_bytes() == (project / "data/metrics.json").read_bytes()
    assert run(clone, "dvc", "metrics", "diff").stdout.strip() == ""

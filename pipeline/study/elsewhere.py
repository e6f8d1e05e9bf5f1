"""A worker on another machine: code from git, results from and to the DVC remote, nothing else in common."""

from __future__ import annotations

import configparser
import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import PalimpsestError
from pipeline.reproduce import OWN, StageFailed, ask_dvc

GIT_REMOTE = "origin"


@dataclass(frozen=True)
class Source:
    """Where a worker gets the project and its results from."""

    repository: str  # a git URL
    revision: str  # a commit that is there
    remote: str  # the name, in the committed .dvc/config, of the DVC remote


def find_source(remote: str | None, root: Path = Path()) -> Source:
    """What workers are told of this project. Looks at both remotes, before any work.

    Raises PalimpsestError if one of them is not there, or if what stands here is not what workers would get.
    """
    url = _git(["remote", "get-url", GIT_REMOTE], root, f"no git remote '{GIT_REMOTE}': workers elsewhere get the code from it")
    if Path(url).exists():
        url = str(Path(url).resolve())
    revision = _git(["rev-parse", "HEAD"], root, "no commit yet: workers elsewhere get the code from git")
    seen = ["--", ".", ":!studies", ":!dvc.lock"]  # all but what only this side reads
    edited = _git(["status", "--porcelain", "--untracked-files=no", *seen], root, "git status").split("\n")
    added = _git(["ls-files", "--others", "--exclude-standard", "pipeline", "stages"], root, "git ls-files").split("\n")
    names = ", ".join([*(line[2:].strip() for line in edited if line), *filter(None, added)])
    if names:
        raise PalimpsestError(
            f"edited or made since the last commit, so workers elsewhere would not get it: {names}; commit and push"
        )
    there = _git(["ls-remote", GIT_REMOTE], root, f"git remote '{GIT_REMOTE}' ({url}) does not answer")
    heads = {line.split()[0] for line in there.splitlines()}
    if revision not in heads and not _is_ancestor(revision, heads, root):
        raise PalimpsestError(
            f"commit {revision[:10]} is not at git remote '{GIT_REMOTE}' ({url}), where workers get it; git push"
        )
    known = set(_git(["ls-files", *OWN], root, "git ls-files").splitlines())
    own = [path for folder in OWN for path in sorted((root / folder).glob("[!.]*"))]
    for file in (path for path in own if str(path.relative_to(root)) not in known):
        raise PalimpsestError(
            f"{file}: not in git, so workers elsewhere would not get it; git add --force it, commit and push, or move it away"
        )
    return Source(url, revision, _dvc_remote(remote, root))


def _dvc_remote(asked: str | None, root: Path) -> str:
    """The name of the DVC remote, which has to be there and in the committed .dvc/config."""
    committed = configparser.ConfigParser(interpolation=None)
    committed.read_string(_git(["show", "HEAD:.dvc/config"], root, "no .dvc/config in git"))
    urls = {
        name.strip("'\"").removeprefix('remote "').rstrip('"'): section.get("url", "")
        for name, section in committed.items()
        if "remote" in name
    }
    name = asked or committed.get("core", "remote", fallback="")
    if name not in urls:
        there = f"there are: {', '.join(urls)}" if urls else "there is none"
        what = f"no DVC remote '{name}'" if name else "no DVC remote is the default and none is named (--remote)"
        raise PalimpsestError(
            f"{what} in the committed .dvc/config, where workers elsewhere read it; {there}. "
            "Make one: dvc remote add --default NAME URL, commit and push"
        )
    url = urls[name]
    if "://" not in url and not Path(url).is_absolute():
        raise PalimpsestError(
            f"DVC remote '{name}': the relative path {url} means another folder in a worker's clone; make it absolute"
        )
    if "://" not in url and not Path(url).is_dir():
        raise PalimpsestError(f"DVC remote '{name}': {url} is not there; make the folder, or mend .dvc/config")
    if "://" in url:
        _reach(name, url, root)
    return name


def _reach(name: str, url: str, root: Path) -> None:
    from dvc.repo import Repo

    try:
        with Repo(str(root)) as repo:
            odb = repo.cloud.get_remote_odb(name)
            odb.fs.exists(odb.path)
    except Exception as error:  # each kind of storage has errors of its own
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise PalimpsestError(f"DVC remote '{name}' ({url}) cannot be reached: {why}") from None


def check_out(source: Source) -> Path:
    """A clone at the revision, in ~/.cache/palimpsest (or $XDG_CACHE_HOME/palimpsest), with a DVC cache that all clones of the
    repository there share. Raises StageFailed if git refuses."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "palimpsest"
    home = base / hashlib.sha256(source.repository.encode()).hexdigest()[:12]
    clone = home / source.revision[:12]
    with _locked(home):
        if not clone.exists():
            half = home / f"{clone.name}.half"
            shutil.rmtree(half, ignore_errors=True)
            _git(["clone", "--quiet", "--no-checkout", source.repository, str(half.resolve())], home, "git clone")
            _git(["checkout", "--quiet", "--detach", source.revision], half, "git checkout")
            half.rename(clone)
        local = f"[core]\n    remote = {source.remote}\n[cache]\n    dir = {(home / 'cache').resolve()}\n"
        (clone / ".dvc/config.local").write_text(local)
    return clone


def push_results(experiment: str, source: Source, root: Path) -> None:
    """Send what the experiment made to the DVC remote, with the run cache by which other workers find it, and the experiment
    to git. Raises StageFailed if either does not take it."""
    ask_dvc(["exp", "push", "--force", "--run-cache", "--remote", source.remote, GIT_REMOTE, experiment], root)


def fetch_experiments(names: Iterable[str], root: Path = Path()) -> None:
    """Bring the experiments that workers pushed here, for `dvc exp show`; their data stays at the remote."""
    ask_dvc(["exp", "pull", "--force", "--no-cache", GIT_REMOTE, *names], root)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_ancestor(revision: str, heads: set[str], root: Path) -> bool:
    """Whether one of `heads` that is known here has `revision` behind it."""
    command = ["git", "merge-base", "--is-ancestor", revision]
    return any(subprocess.run([*command, head], cwd=root, capture_output=True).returncode == 0 for head in heads)


def _git(arguments: list[str], root: Path, trouble: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=root, capture_output=True, text=True, env={**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    )
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise StageFailed("", f"{trouble}: {said[-1]}" if said else trouble)
    return done.stdout.strip()

"""A checkpoint of the Hugging Face hub, in the Hugging Face cache: only its settings, tokenizer and safetensors are fetched."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path
from typing import NoReturn

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from pipeline.artifacts import human_bytes
from pipeline.console import say
from pipeline.errors import PalimpsestError
from stages.model.folder import CODE, SETTINGS, WEIGHTS

INSTEAD = "or fetch the checkpoint elsewhere and set model.source: folder and model.path"


def fetch_snapshot(repository: str, revision: str, trust_remote_code: bool) -> Path:
    """The folder of the snapshot in the Hugging Face cache; its name is the commit.

    Without network, a snapshot of that revision that is already in the cache will do, and is said to be used.

    Raises PalimpsestError if there is neither, or the repository or revision does not exist, is gated, or has no safetensors.
    """
    patterns = [*SETTINGS, *WEIGHTS, *(CODE if trust_remote_code else ())]
    try:
        info = HfApi().model_info(repository, revision=revision, files_metadata=True)
        names = [file.rfilename for file in info.siblings or []]
        _check_weights(repository, names)
        chosen = [file for file in info.siblings or [] if any(fnmatch(file.rfilename, pattern) for pattern in patterns)]
        say(f"fetching {len(chosen)} files ({human_bytes(sum(file.size or 0 for file in chosen))}) of {repository}")
        return Path(snapshot_download(repository, revision=revision, allow_patterns=[file.rfilename for file in chosen]))
    except PalimpsestError:
        raise
    except (HFValidationError, GatedRepoError, RevisionNotFoundError, RepositoryNotFoundError) as error:
        _refuse(repository, revision, error)
    except Exception as error:  # the client raises errors of its HTTP library, which differs between versions
        return _cached(repository, revision, patterns, error)


def _check_weights(repository: str, names: list[str]) -> None:
    if any(fnmatch(name, pattern) for name in names for pattern in WEIGHTS):
        return
    pickled = next((name for name in names if name.endswith((".bin", ".pt", ".pth"))), None)
    what = f"only pickled weights ({pickled}), and nothing is unpickled here" if pickled else "no model.safetensors"
    raise PalimpsestError(f"{repository}: the repository has {what}; choose another repository or revision, {INSTEAD}")


def _refuse(repository: str, revision: str, error: Exception) -> NoReturn:
    if isinstance(error, HFValidationError):
        message = f"model.repository = '{repository}': not a repository name (owner/name); a folder is model.source: folder"
    elif isinstance(error, GatedRepoError):  # before RepositoryNotFoundError, whose subclass it is
        message = f"{repository}: gated; accept its terms on the hub and log in with `hf auth login`, {INSTEAD}"
    elif isinstance(error, RevisionNotFoundError):
        message = f"{repository}: no revision '{revision}' on the hub; check model.revision"
    else:
        message = (
            f"{repository}: not found on the hub, or private; check model.repository, log in with `hf auth login`, {INSTEAD}"
        )
    raise PalimpsestError(message) from None


def _cached(repository: str, revision: str, patterns: list[str], error: Exception) -> Path:
    reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error).strip() else 'no details'}"
    try:
        folder = Path(snapshot_download(repository, revision=revision, allow_patterns=patterns, local_files_only=True))
    except LocalEntryNotFoundError:
        raise PalimpsestError(
            f"{repository}: the hub cannot be reached ({reason}), and revision '{revision}' is not in the Hugging Face "
            f"cache of this machine; run this where there is network, {INSTEAD}"
        ) from None
    say(f"the hub cannot be reached ({reason}); using commit {folder.name[:12]} of {repository} from the cache")
    return folder

"""Documents out of a data set of the Hugging Face hub, or of a local folder in the same layout, through `datasets`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from huggingface_hub import HfApi
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

from pipeline.console import say
from pipeline.errors import PalimpsestError
from stages.tokens import Tokens
from stages.tokens.corpus import Corpus, Split
from stages.tokens.files import text_of

INSTEAD = "or use local files: tokens.source: files"


def read_hub(tokens: Tokens, data: Path) -> Corpus:
    """The two splits that `tokens` names, pinned to the commit that tokens.revision stands for, streamed.

    Where the hub cannot be reached, a copy in the Hugging Face cache will do, and is said to be used.

    Raises PalimpsestError if there is neither, or the data set, revision, subset or split does not exist.
    """
    dataset = str(tokens.dataset)
    folder = data.parent / Path(dataset).expanduser()
    if folder.is_dir():
        source, commit, options = str(folder), "", {"streaming": True}
    else:
        commit = _commit(dataset, tokens.revision)
        source, options = dataset, {"streaming": True, "revision": commit} if commit else {"revision": tokens.revision}
    calibration, evaluation = (
        Split(name, _documents(source, name, tokens, options)) for name in (tokens.calibration_split, tokens.evaluation_split)
    )
    name = folder.name if folder.is_dir() else dataset
    return Corpus(f"{name}/{tokens.subset}" if tokens.subset else name, calibration, evaluation, commit)


def _commit(dataset: str, revision: str) -> str:
    """The commit that `revision` stands for; empty if the hub cannot be reached."""
    try:
        return str(HfApi().dataset_info(dataset, revision=revision).sha)
    except HFValidationError:
        raise PalimpsestError(f"tokens.dataset = '{dataset}': neither a folder nor a data set's name (owner/name)") from None
    except GatedRepoError:
        raise PalimpsestError(
            f"{dataset}: gated; accept its terms on the hub and log in with `hf auth login`, {INSTEAD}"
        ) from None
    except RevisionNotFoundError:
        raise PalimpsestError(f"{dataset}: no revision '{revision}' on the hub; check tokens.revision") from None
    except RepositoryNotFoundError:
        raise PalimpsestError(f"{dataset}: no such data set on the hub, or private; check tokens.dataset, {INSTEAD}") from None
    except Exception as error:  # the client raises errors of its HTTP library, which differs between versions
        say(f"the hub cannot be reached ({_reason(error)}); looking for {dataset} in the Hugging Face cache")
        import datasets.config

        datasets.config.HF_HUB_OFFLINE = True  # else it tries again and again for half a minute
        return ""


def _documents(source: str, split: str, tokens: Tokens, options: dict[str, Any]) -> Iterator[str]:
    from datasets import load_dataset  # takes seconds, and only this source needs it

    try:
        rows: Any = load_dataset(source, tokens.subset, split=split, **options)
        for number, row in enumerate(rows, 1):
            yield text_of(row, tokens.field, f"{tokens.dataset}, {split}, row {number}")
    except PalimpsestError:
        raise
    except Exception as error:  # `datasets` raises whatever its file systems and builders do
        _refuse(tokens, split, error)


def _refuse(tokens: Tokens, split: str, error: Exception) -> NoReturn:
    raise PalimpsestError(
        f"{tokens.dataset} (subset {tokens.subset}, split '{split}') cannot be read ({_reason(error)}); check tokens.dataset, "
        f"tokens.subset and the splits, run this where there is network, {INSTEAD}"
    ) from None


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"

"""Documents out of a data set of the Hugging Face hub, or of a local folder in the same layout, through `datasets`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from huggingface_hub import HfApi
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

from pipeline.console import say
from pipeline.errors import PalimpsestError
from stages.corpus.files import text_of
from stages.corpus.section import Text
from stages.corpus.splits import Corpus, Split


def read_hub(text: Text, data: Path) -> Corpus:
    """The two splits that `text` names, pinned to the commit that its revision stands for, streamed.

    Where the hub cannot be reached, a copy in the Hugging Face cache will do, and is said to be used.

    Raises PalimpsestError if there is neither, or the data set, revision, subset or split does not exist.
    """
    dataset = str(text.dataset)
    folder = data.parent / Path(dataset).expanduser()
    if folder.is_dir():
        source, commit, options = str(folder), "", {"streaming": True}
    else:
        commit = _commit(dataset, text)
        source, options = dataset, {"streaming": True, "revision": commit} if commit else {"revision": text.revision}
    calibration, evaluation = (
        Split(name, _documents(source, name, text, options)) for name in (text.calibration_split, text.evaluation_split)
    )
    name = folder.name if folder.is_dir() else dataset
    return Corpus(f"{name}/{text.subset}" if text.subset else name, calibration, evaluation, commit)


def _commit(dataset: str, text: Text) -> str:
    """The commit that `text.revision` stands for; empty if the hub cannot be reached."""
    try:
        return str(HfApi().dataset_info(dataset, revision=text.revision).sha)
    except HFValidationError:
        raise PalimpsestError(f"{text.KEY}.dataset = '{dataset}': neither a folder nor a data set's name (owner/name)") from None
    except GatedRepoError:
        raise PalimpsestError(
            f"{dataset}: gated; accept its terms on the hub and log in with `hf auth login`, {_instead(text)}"
        ) from None
    except RevisionNotFoundError:
        raise PalimpsestError(f"{dataset}: no revision '{text.revision}' on the hub; check {text.KEY}.revision") from None
    except RepositoryNotFoundError:
        raise PalimpsestError(
            f"{dataset}: no such data set on the hub, or private; check {text.KEY}.dataset, {_instead(text)}"
        ) from None
    except Exception as error:  # the client raises errors of its HTTP library, which differs between versions
        say(f"the hub cannot be reached ({_reason(error)}); looking for {dataset} in the Hugging Face cache")
        import datasets.config

        datasets.config.HF_HUB_OFFLINE = True  # else it tries again and again for half a minute
        return ""


def _documents(source: str, split: str, text: Text, options: dict[str, Any]) -> Iterator[str]:
    from datasets import load_dataset  # takes seconds, and only this source needs it

    try:
        rows: Any = load_dataset(source, text.subset, split=split, **options)
        for number, row in enumerate(rows, 1):
            yield text_of(row, text.field, f"{text.dataset}, {split}, row {number}")
    except PalimpsestError:
        raise
    except Exception as error:  # `datasets` raises whatever its file systems and builders do
        _refuse(text, split, error)


def _refuse(text: Text, split: str, error: Exception) -> NoReturn:
    raise PalimpsestError(
        f"{text.dataset} (subset {text.subset}, split '{split}') cannot be read ({_reason(error)}); check {text.KEY}.dataset, "
        f"{text.KEY}.subset and the splits, run this where there is network, {_instead(text)}"
    ) from None


def _instead(text: Text) -> str:
    return f"or use local files: {text.KEY}.source: files"


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"

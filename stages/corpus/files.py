"""Documents out of files of the user's: .txt (one document), .jsonl (one a line), .parquet (one a row)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

from pipeline.console import say
from pipeline.errors import PalimpsestError
from pipeline.packages import sha256_of
from stages.corpus.section import Text
from stages.corpus.splits import Corpus, Split


def read_files(text: Text, data: Path) -> Corpus:
    """The files that `text` names, looked for in data/corpus/ and then from the project's folder.

    Raises PalimpsestError if one is missing, empty, of a kind that is not read, or for calibration and evaluation alike.
    """
    calibration, evaluation = (_split(text, key, data) for key in ("calibration_files", "evaluation_files"))
    known = {file["sha256"]: file["name"] for file in calibration.files}
    for file in evaluation.files:
        if file["sha256"] in known:
            raise PalimpsestError(
                f"{text.KEY}.evaluation_files: {file['name']} has the same bytes as {known[file['sha256']]} of "
                "calibration_files; a model must not be measured on its calibration text"
            )
    return Corpus("files", calibration, evaluation)


def read_documents(path: Path, column: str) -> Iterator[str]:
    """Yield the documents of one file; `column` names the text in .jsonl and .parquet.

    Raises PalimpsestError naming the file, and the line or row, for what is not text.
    """
    return _READERS[path.suffix](path, column)


def _split(text: Text, key: str, data: Path) -> Split:
    paths = [_find(name, f"{text.KEY}.{key}", data) for name in getattr(text, key)]
    files = [{"name": path.name, "sha256": sha256_of(path)} for path in paths]
    return Split(
        ", ".join(path.name for path in paths), chain.from_iterable(read_documents(path, text.field) for path in paths), files
    )


def _find(name: str, key: str, data: Path) -> Path:
    places = [data / "corpus" / name, data.parent / Path(name).expanduser()]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise PalimpsestError(f"{key}: no file {name}, neither in {places[0].parent} nor in the project's folder")
    if path.suffix not in _READERS:
        raise PalimpsestError(f"{key}: {name}: only {', '.join(_READERS)} are read; convert it to one of them")
    if path.stat().st_size == 0:
        raise PalimpsestError(f"{key}: {name} is empty")
    if not path.resolve().is_relative_to((data / "corpus").resolve()):
        say(f"{name} lies outside {data / 'corpus'}: a change in it will not be noticed")
    return path


def _read_txt(path: Path, _: str) -> Iterator[str]:
    yield _decode(path.read_bytes(), path)


def _read_jsonl(path: Path, column: str) -> Iterator[str]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                row = json.loads(_decode(line, where))
            except ValueError as error:
                raise PalimpsestError(f"{where}: not JSON ({error}); mend or remove the line") from None
            if not isinstance(row, dict):
                raise PalimpsestError(f'{where}: expected an object such as {{"{column}": "…"}}, found {type(row).__name__}')
            yield text_of(row, column, where)


def _read_parquet(path: Path, column: str) -> Iterator[str]:
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        names = file.schema_arrow.names
        if column not in names:
            raise PalimpsestError(f"{path}: no column '{column}' (it has {', '.join(names)}); set field to the one with the text")
        number = 0
        for batch in file.iter_batches(columns=[column]):
            for value in batch.column(0).to_pylist():
                number += 1
                yield text_of({column: value}, column, f"{path}, row {number}")
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise PalimpsestError(f"{path}: not a whole parquet file ({str(error)[:200]})") from None


def text_of(row: dict[str, object], column: str, where: str) -> str:
    """The text of one row. Raises PalimpsestError naming `where` if it is missing or is not a string."""
    if column not in row:
        raise PalimpsestError(
            f"{where}: no field '{column}' (it has {', '.join(map(str, row)) or 'none'}); set field to the one with the text"
        )
    value = row[column]
    if not isinstance(value, str):
        raise PalimpsestError(
            f"{where}: field '{column}' holds {'null' if value is None else type(value).__name__} instead of text"
        )
    return value


def _decode(raw: bytes, where: Path | str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PalimpsestError(f"{where}: not UTF-8 (byte {error.start}); convert it, for instance with iconv") from None


_READERS: dict[str, Callable[[Path, str], Iterator[str]]] = {".txt": _read_txt, ".jsonl": _read_jsonl, ".parquet": _read_parquet}

"""Documents on their way to the tokenizer: counted, hashed, and cut into pieces of bounded size."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

PIECE = 4_000_000  # characters handed to the tokenizer at once: bounds its memory, some 100 bytes a character


@dataclass
class Tally:
    """What was read of a split so far."""

    documents: int = 0
    blank: int = 0
    hashes: set[bytes] = field(default_factory=set)  # one per document, to find text that two splits share
    _all: hashlib._Hash = field(default_factory=hashlib.sha256)

    @property
    def sha256(self) -> str:
        """Hexadecimal SHA-256 over the documents' own SHA-256s, in order."""
        return self._all.hexdigest()


def tallied(documents: Iterable[str], tally: Tally, keep_blank: bool = False) -> Iterator[str]:
    """Yield the documents that are not blank, counting and hashing them into `tally`; with `keep_blank`, all of them."""
    for document in documents:
        if not document.strip() and not keep_blank:
            tally.blank += 1
            continue
        digest = hashlib.sha256(document.encode("utf-8", "surrogatepass")).digest()
        tally.documents += 1
        tally.hashes.add(digest)
        tally._all.update(digest)
        yield document


def join_documents(documents: Iterable[str], separator: str, size: int = PIECE) -> Iterator[str]:
    """Yield pieces of about `size` characters that together are `separator.join(documents)`.

    Joining before tokenising matters: a tokenizer may merge the last letters of a document with the separator, and it is the
    joined text that perplexities are published for. A piece ends behind a line break where there is one in its second half.
    """
    held = ""
    for index, document in enumerate(documents):
        held += (separator if index else "") + document
        while len(held) > size:
            cut = held.rfind("\n", size // 2, size) + 1 or size
            yield held[:cut]
            held = held[cut:]
    if held:
        yield held

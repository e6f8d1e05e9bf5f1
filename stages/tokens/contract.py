"""The evaluation contract: all that decides which tokens of a text are scored, and with what before them. Pure.

Two perplexities are comparable under one contract on one text, and not otherwise. `READY` has ready-made ones:

* `wanda` (github.com/locuslab/wanda, `lib/data.py` and `lib/eval.py`, read): WikiText-2 raw test, its rows joined by a blank
  line, blank rows too; encoded in one go with the special tokens the tokenizer adds by itself; windows end to end, the rest
  dropped; the mean of the windows' mean losses. The window is the model's `seqlen`: 2048 for LLaMA, but max_position_embeddings
  and so 4096 for LLaMA-2, for which write it out as `custom`. SparseGPT, OWL and DLP evaluate alike.
* `ghosted_layers` (arXiv 2605.15491; its code as public notes describe it, its loader that of
  github.com/chenxinrui-tsinghua/LinearPatch, `datautils_block.py`, read): the same rule with windows of 2048, on WikiText-2 raw
  test, on Penn Treebank's validation sentences, and on C4. The paper averages three perplexities; here it is one text a run.
  Its C4 is 256 windows each drawn from a document longer than a window, which is not built here.
* `no_free_swap` (arXiv 2605.16234; its `matched_eval` scripts as public notes describe them): the first 5,000 words of WikiText-2
  raw test, joined by single spaces; windows of 512 every 256 tokens, the last one short; tokens of earlier windows are context
  only, and its code leaves out one new token more in each window but the first (`overlap: published`). So scored are all tokens
  less the number of windows, which gives its published counts of 5,734 and 5,585; exp(sum of losses / scored tokens).

The texts are on the hub only (Salesforce/wikitext, ptb_text_only, allenai/c4). With other text a contract still says how it is
cut and scored, and its numbers carry that text's name and checksum. A .txt file is one document, so its lines are not rows:
give rows as .jsonl or .parquet to have them joined.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any, Literal

from pydantic import Field, model_validator

from pipeline.params import Section

Name = Literal["ours", "wanda", "ghosted_layers", "no_free_swap", "custom"]


class Contract(Section):
    """What is scored of a text, of which corpus and split apart."""

    window: int = Field(default=512, ge=2)  # tokens, BOS counted
    stride: int = Field(default=512, ge=1)  # tokens of text from one window's start to the next
    special_tokens: Literal["none", "window", "document", "text"] = "none"  # text: those the tokenizer adds by itself, once
    separator: str = "\n\n"  # joins documents
    blank: Literal["dropped", "kept"] = "dropped"  # documents that are all white space
    words: int | None = Field(default=None, ge=1)  # only so many, joined by single spaces
    rest: Literal["dropped", "kept"] = "dropped"  # what does not fill a window
    overlap: Literal["new", "published"] = "new"  # scored of later windows: all that is new, or without the first of it
    windows: int | None = Field(default=None, ge=1)  # the first so many; all of the text

    @model_validator(mode="after")
    def _leaves_no_gap(self) -> Contract:
        if self.stride > self.body:
            raise ValueError(
                f"stride {self.stride} is more than the {self.body} tokens of text in a window: tokens would be skipped"
            )
        return self

    @property
    def body(self) -> int:
        """Tokens of text in a full window."""
        return self.window - (self.special_tokens == "window")

    def terms(self) -> dict[str, Any]:
        """What is printed with each number; what would only repeat a default that changes nothing is left out."""
        said: dict[str, Any] = {"length": self.window, "stride": self.stride, "special_tokens": self.special_tokens}
        said |= {"join": repr(self.separator), "blank_documents": self.blank, "rest": self.rest}
        if self.stride < self.body:
            said["overlap"] = "context only" if self.overlap == "new" else "context only, and one token more"
        return said | ({} if self.words is None else {"words": self.words, "join": "words by single spaces"})


_WANDA = Contract(window=2048, stride=2048, special_tokens="text", blank="kept")
READY: dict[str, Contract] = {
    "wanda": _WANDA,
    "ghosted_layers": _WANDA,
    "no_free_swap": Contract(window=512, stride=256, special_tokens="text", words=5000, rest="kept", overlap="published"),
}
PUBLISHED_TEXT = {
    "wanda": "WikiText-2 raw, test",
    "ghosted_layers": "WikiText-2 raw, test; Penn Treebank, validation; C4, validation",
    "no_free_swap": "WikiText-2 raw, test",
}


def first_words(documents: Iterable[str], count: int | None) -> Iterator[str]:
    """`documents` as they are for None; else one text, the first `count` words of all of them joined by single spaces."""
    if count is None:
        yield from documents
    elif words := list(islice(chain.from_iterable(one.split() for one in documents), count)):
        yield " ".join(words)

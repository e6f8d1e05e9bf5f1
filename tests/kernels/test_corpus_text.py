"""Kernels of stage `tokens` on text: joining and cutting, counting, and prose out of Wikipedia's markup."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.corpus.text import Tally, join_documents, tallied
from stages.corpus.wikipedia import read_articles, strip_markup

PROSE = "Anarchism is a philosophy that advocates self-governed societies based on voluntary institutions, and more."
FILLER = "\n\n".join(
    f"Paragraph {number} says at some length that it is there to make the article long enough." for number in range(20)
)


@given(st.lists(st.text("ab\n", max_size=30), max_size=8), st.sampled_from(["", "\n\n", "--"]), st.integers(2, 20))
def test_pieces_are_the_joined_text_and_bounded(documents: list[str], separator: str, size: int) -> None:
    pieces = list(join_documents(documents, separator, size))
    assert "".join(pieces) == separator.join(documents)
    assert all(0 < len(piece) <= size for piece in pieces)


@given(st.lists(st.text("ab\n", min_size=1, max_size=30), min_size=1, max_size=8), st.integers(4, 20))
def test_pieces_end_at_a_line_break_where_their_second_half_has_one(documents: list[str], size: int) -> None:
    for piece in list(join_documents(documents, "\n", size))[:-1]:
        assert piece.endswith("\n") or (len(piece) == size and "\n" not in piece[size // 2 :])


def test_tally_counts_hashes_and_skips_blank_documents() -> None:
    one, other, merged = Tally(), Tally(), Tally()
    assert list(tallied(["ab", " \n", "c"], one)) == ["ab", "c"]
    assert (one.documents, one.blank, len(one.hashes)) == (2, 1, 2)
    assert list(tallied(["c", "d"], other)) == ["c", "d"]
    assert len(one.hashes & other.hashes) == 1
    list(tallied(["a", "bc"], merged))
    assert len({one.sha256, other.sha256, merged.sha256}) == 3  # where a document ends counts


@pytest.mark.parametrize(
    ("markup", "prose"),
    [
        ("Some '''bold''' and ''slanted'' words, [[cat|cats]] and [[dogs]]", "Some bold and slanted words, cats and dogs"),
        ("A claim.<ref name=x>{{cite|url=y}}</ref> Another.<ref name=x /> End", "A claim. Another. End"),
        ("Before <!-- hidden\n[[File:a.jpg]] --> after", "Before after"),
        ("Text {{Infobox|a={{nested|b}}|c=d}} goes on", "Text goes on"),
        ("It is {{convert|5|km|mi}} long and {{lang|fr|beau}}", "It is 5 km long and beau"),
        ("A town ({{IPA|x}}; {{lang-de|y}}) in the hills", "A town in the hills"),
        ("See [http://a.b the site] of AT&amp;T&nbsp;today", "See the site of AT&T today"),
        ("[[File:cat.jpg|thumb|A [[cat]] with a [[dog|hound]].]]There is a cat", "There is a cat"),
        ("It holds that <math>a^{{b}}</math> is small", "It holds that is small"),
    ],
)
def test_inline_markup_goes_and_its_words_stay(markup: str, prose: str) -> None:
    rest = " and this sentence goes on until the paragraph is long enough to be kept by the filter."
    assert strip_markup(f"{markup}{rest}\n\n{FILLER}").split("\n\n")[0] == prose + rest


def test_tables_lists_headings_captions_and_appendices_go() -> None:
    table = "{| class=x\n|-\n| " + PROSE + "\n{|\n| nested " + PROSE + "\n|}\n|}"
    parts = [PROSE, "== History ==", table, f"* {PROSE}", f"# {PROSE}", f": {PROSE}", "Short line.", "== See also ==", PROSE]
    parts += ["=== Of the appendix ===", PROSE, "== Later ==", FILLER, "[[Category:Ideas]]", "[[fr:Anarchisme]]"]
    assert strip_markup("\n".join(parts)) == f"{PROSE}\n\n{FILLER}"


def test_article_with_little_prose_is_none() -> None:
    assert strip_markup(f"{PROSE}\n\n* [[one]]\n* [[two]]") == ""


def test_dump_gives_articles_in_order_without_redirects_and_talk() -> None:
    def page(title: str, space: int, more: str = "") -> str:
        return f"<page><title>{title}</title><ns>{space}</ns>{more}<revision><text>{title} text</text></revision></page>"

    pages = page("One", 0) + page("Two", 0, '<redirect title="One"/>') + page("Talk:One", 1) + page("Three", 0)
    dump = f'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/">{pages}</mediawiki>'
    assert list(read_articles(io.BytesIO(dump.encode()))) == [("One", "One text"), ("Three", "Three text")]

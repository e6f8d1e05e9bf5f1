"""Prose out of a Wikipedia XML dump."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import IO
from xml.etree import ElementTree

import mwparserfromhell

SHORTEST_PARAGRAPH = 80  # characters; shorter lines are captions, labels and leftovers of markup
SHORTEST_ARTICLE = 1000
APPENDICES = {
    *("see also", "references", "external links", "further reading", "notes", "footnotes", "citations", "sources"),
    *("bibliography", "works cited", "notes and references", "references and notes", "explanatory notes"),
    *("general references", "primary sources", "secondary sources", "gallery"),
}
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_ELEMENT = re.compile(
    r"<(ref|math|gallery|timeline|score|source|syntaxhighlight|imagemap)\b(?:[^>]*?/>|[^>]*>.*?</\1\s*>)",
    re.DOTALL | re.IGNORECASE,
)
_MEASURE = re.compile(r"\{\{(?:convert|cvt)\|([^|{}]+)\|([^|{}]+)[^{}]*\}\}", re.IGNORECASE)
_WORDING = re.compile(r"\{\{(?:lang\|[\w-]+|nowrap|transl\|[\w-]+)\|([^|{}=]+)\}\}", re.IGNORECASE)
_TEMPLATE = re.compile(r"\{\{(?:[^{}]|\{(?!\{)|\}(?!\}))*\}\}")
_TABLE = re.compile(r"^[ :*]*\{\|(?:(?!\{\|).)*?^\s*\|\}", re.DOTALL | re.MULTILINE)
_HEADING = re.compile(r"^(={2,6})\s*(.*?)\s*\1\s*$")
_LIST_MARKS = ("*", "#", ":", ";", "|", "!", "{|")
_NAMESPACE = re.compile(r"^:?\s*(?:file|image|category|[a-z]{2,3}(?:-[a-z]+)*)\s*:", re.IGNORECASE)
_TIDY = [
    (re.compile(r"[\u00a0\u2009\u202f]"), " "),
    (re.compile(r"\(\s*[;,:]?\s*\)"), ""),  # parentheses whose template is gone
    (re.compile(r"\([\s;,]+"), "("),
    (re.compile(r"[ \t]+"), " "),
    (re.compile(r" +([,.;:)])"), r"\1"),
]


def read_articles(dump: IO[bytes]) -> Iterator[tuple[str, str]]:
    """Yield (title, wikitext) of each article of a dump, in its order; redirects and other namespaces are left out."""
    for _, element in ElementTree.iterparse(dump):
        if not element.tag.endswith("}page"):
            continue
        space = element.tag.removesuffix("page")
        if element.findtext(f"{space}ns") == "0" and element.find(f"{space}redirect") is None:
            yield element.findtext(f"{space}title") or "", element.findtext(f"{space}revision/{space}text") or ""
        element.clear()


def strip_markup(wikitext: str) -> str:
    """The prose paragraphs of an article, joined by an empty line; empty if there is less than a page of them.

    Comments, references, tables, templates, files, categories, lists and appendices such as "See also" go.
    """
    text = _COMMENT.sub("", wikitext)
    text = _ELEMENT.sub("", text)
    text = _WORDING.sub(r"\1", _MEASURE.sub(r"\1 \2", text))  # the two kinds of template that hold words of the sentence
    text = _remove_nested(_TABLE, _remove_nested(_TEMPLATE, text))
    code = mwparserfromhell.parse("\n".join(_body_lines(text)), skip_style_tags=True)
    for link in code.filter_wikilinks(recursive=False, matches=lambda link: bool(_NAMESPACE.match(str(link.title)))):
        code.remove(link)
    lines = (_tidy(line) for line in code.strip_code(normalize=True, collapse=False).split("\n"))
    prose = "\n\n".join(line for line in lines if len(line) >= SHORTEST_PARAGRAPH)
    return prose if len(prose) >= SHORTEST_ARTICLE else ""


def _remove_nested(pattern: re.Pattern[str], text: str) -> str:
    """Remove innermost matches until none is left."""
    count = 1
    while count:
        text, count = pattern.subn("", text)
    return text


def _body_lines(text: str) -> Iterator[str]:
    """Lines of running text: no headings, no lists, and nothing from an appendix's heading to the next of its level."""
    dropped = 0  # the level of the appendix we are in
    for line in text.split("\n"):
        heading = _HEADING.match(line)
        if heading:
            level = len(heading[1])
            if not dropped or level <= dropped:
                dropped = level if heading[2].strip("' ").lower() in APPENDICES else 0
        elif not dropped and not line.lstrip().startswith(_LIST_MARKS):
            yield line


def _tidy(line: str) -> str:
    line = line.replace("'''", "").replace("''", "")
    for pattern, replacement in _TIDY:
        line = pattern.sub(replacement, line)
    return line.strip()

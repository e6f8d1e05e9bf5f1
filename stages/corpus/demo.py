"""The demo text: an excerpt of English Wikipedia (CC BY-SA) that a package of the Python index carries."""

from __future__ import annotations

import bz2
from pathlib import Path

from pipeline.console import progress
from pipeline.errors import PalimpsestError
from pipeline.packages import PackagedFile, fetch
from stages.corpus.section import Text
from stages.corpus.splits import Corpus, Split
from stages.corpus.wikipedia import read_articles, strip_markup

WIKIPEDIA = PackagedFile(
    requirement="gensim==4.4.0",
    bytes=27_809_988,
    wheel_sha256="91a7fa5e814e7b1bad4b2dffa8d62c1e55410d5cbdf930714c1997ffb4404db8",
    member="gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2",
    sha256="a53f4648dec40467ebdcbc7a1307eddb51fe6e28e9309f6ebde81ba0d04bea2d",
    platforms=("manylinux_2_28_x86_64", "manylinux_2_24_x86_64"),
)
ARTICLES = 106  # in the dump, before those without prose are left out
SPLITS = {"train": (0, 1, 2, 3), "valid": (4,), "test": (5,)}  # places of an article, counted in sixes


def read_demo(text: Text, data: Path) -> Corpus:
    """The two splits that `text` names, out of the dump kept in data/demo/. No article is in two splits.

    Raises PalimpsestError if there is no such split or the package cannot be fetched.
    """
    for key in ("calibration_split", "evaluation_split"):
        if getattr(text, key) not in SPLITS:
            raise PalimpsestError(f"{text.KEY}.{key} = '{getattr(text, key)}': the demo has {', '.join(SPLITS)}")
    dump = fetch(WIKIPEDIA, data / "demo")
    with bz2.open(dump) as stream:
        prose = [strip_markup(article) for _, article in progress(read_articles(stream), "stripped articles", ARTICLES)]
    articles = [article for article in prose if article]
    files = [{"name": dump.name, "sha256": WIKIPEDIA.sha256}]
    calibration, evaluation = (
        Split(name, [article for index, article in enumerate(articles) if index % 6 in SPLITS[name]], files)
        for name in (text.calibration_split, text.evaluation_split)
    )
    return Corpus("English Wikipedia, excerpt", calibration, evaluation)

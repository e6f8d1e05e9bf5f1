"""The report's section on operators, beyond what it has in common with the others."""

from __future__ import annotations

from pathlib import Path

from tests.stages.test_report import edit_table, fake_results, report


def test_ghosts_are_explained_and_followed(tmp_path: Path) -> None:
    """Every quantity of the table has its line; the picture shows the distances that the table of growth holds."""
    fake_results(tmp_path / "data")
    text = report(tmp_path)
    for words in (
        "turns the stream rather than stretches it",
        "largest over the smallest eigenvalue",
        "the size of the operator",
    ):
        assert words in text
    assert "behind block 29: with operators 0.61" in text and "behind block 29: no operator 1.01" in text
    assert "the stream is off by 0.610 with the operators and 1.01 without, of its norm" in text
    assert "Sinks: tokens" not in text, "no such column in this table"
    edit_table(tmp_path / "data/ghost_growth.csv", lambda table: table[:0])
    assert "behind block 29: with operators" not in report(tmp_path)

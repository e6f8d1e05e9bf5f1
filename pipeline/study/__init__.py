"""Studies: the same stages under many settings, each a DVC experiment, compared in one table.

`plan` reads studies/NAME.yaml into cells, `cells` runs them, `compare` sets them side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def run_study(name: str, workers: int = 1, root: Path = Path(), say: Callable[[str], None] = print) -> str:
    """Run studies/NAME.yaml and return its table as text; write data/studies/NAME.csv and .json.

    Raises PalimpsestError, before anything runs, if the study asks for what cannot be run; and, with the table in its
    message, if every cell failed.
    """
    from pipeline.artifacts import write_text
    from pipeline.errors import PalimpsestError
    from pipeline.files import DATA
    from pipeline.study.cells import check_repository, run_cells
    from pipeline.study.compare import compare
    from pipeline.study.page import page
    from pipeline.study.plan import read_study
    from pipeline.study.results import table, write_results

    check_repository(root)
    study = read_study(name, root)
    say(f"{study.plan.question}\n{len(study.cells)} cells, {workers} at a time")
    outcomes = run_cells(study, workers, say, root)
    compared = compare(study, outcomes)
    write_results(study, outcomes, compared, root)
    write_text(root / DATA / "studies" / f"{name}.html", page(study, outcomes, compared))
    text = table(study, outcomes, compared)
    if all(outcome.result is None for outcome in outcomes):
        raise PalimpsestError(f"{text}\nEvery cell failed ({len(outcomes)} of {len(outcomes)}): there is nothing to compare")
    return text

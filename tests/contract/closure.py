"""The files a stage's code consists of, found by walking imports.

`python -m tests.contract.closure` says what dvc.yaml lacks, and with `--fix` writes it there.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

from pipeline.graph import Node, read_graph

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("pipeline", "stages")


def code_of(stage: str) -> set[str]:
    """What dvc.yaml has to list for `stage`: its own folder, and file by file all else it imports, however indirectly."""
    own = ROOT / "stages" / stage
    found, front = set[Path](), set(own.rglob("*.py"))
    while front:
        found |= front
        front = {file for one in front for file in imported_files(one)} - found
    return {f"stages/{stage}"} | {str(file.relative_to(ROOT)) for file in found if not file.is_relative_to(own)}


def imported_files(file: Path) -> set[Path]:
    """The project's own files that `file` imports when it runs, with the `__init__.py` of their packages if those do anything."""
    files: set[Path] = set()
    for module in _modules(ast.parse(file.read_text(encoding="utf-8")).body):
        parts = module.split(".")
        if parts[0] not in PACKAGES:
            continue
        for length in range(1, len(parts) + 1):
            path = ROOT.joinpath(*parts[:length])
            init = path / "__init__.py"
            if path.with_suffix(".py").is_file():
                files.add(path.with_suffix(".py"))
            elif init.is_file() and not _is_only_docstring(init):
                files.add(init)
    return files


def differences(node: Node) -> tuple[set[str], set[str]]:
    """(missing from dvc.yaml, listed there without need) for one stage."""
    needed = code_of(node.name.split("@")[0])
    return needed - set(node.code), set(node.code) - needed


def _modules(body: list[ast.stmt]) -> Iterator[str]:
    """Names of modules imported by statements, at whatever depth; imports for the type checker alone do not count."""
    for statement in body:
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            yield from _modules(statement.orelse)
            continue
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            assert statement.level == 0, "imports are absolute in this project"
            yield from (f"{statement.module}.{alias.name}" for alias in statement.names)
        for field in ("body", "orelse", "finalbody"):
            yield from _modules(getattr(statement, field, []))
        for part in [*getattr(statement, "handlers", []), *getattr(statement, "cases", [])]:
            yield from _modules(part.body)


def _is_only_docstring(file: Path) -> bool:
    return all(isinstance(one, ast.Expr) for one in ast.parse(file.read_text(encoding="utf-8")).body)


def with_code(text: str) -> str:
    """The text of dvc.yaml with the code dependencies of every stage made right, all else left as it is."""
    return re.sub(r"(?m)^  (\w+):\n(?:(?!  \w|\w).*\n)*", _with_code, text)


def _with_code(stage: re.Match[str]) -> str:
    data = re.compile(r"(?m)^( +)deps:\s*(\[[^]]*\]|(?:\n +- .*)+)")
    found = data.search(stage[0])
    if not found or not (ROOT / "stages" / stage[1]).is_dir():
        return stage[0]
    kept = [
        one
        for one in re.findall(r'"[^"]+"|[^\s,\[\]]+', found[2].replace("- ", ""))
        if one.strip('"').startswith(("data/", "${"))
    ]
    indent = f"{found[1]}       "
    lines = [part for group in (kept, sorted(code_of(stage[1]), key=_own_first(stage[1]))) for part in _wrap(group)]
    return stage[0][: found.start()] + f"{found[1]}deps: [" + f",\n{indent}".join(lines) + "]" + stage[0][found.end() :]


def _own_first(stage: str) -> Callable[[str], tuple[bool, bool, str]]:
    return lambda path: (path != f"stages/{stage}", path.startswith("pipeline"), path)


def _wrap(group: list[str]) -> list[str]:
    return [line.rstrip(",") for line in textwrap.wrap(", ".join(group), 115, break_long_words=False, break_on_hyphens=False)]


if __name__ == "__main__":
    if "--fix" in sys.argv:
        (ROOT / "dvc.yaml").write_text(with_code((ROOT / "dvc.yaml").read_text()))
    wrong = False
    for node in read_graph(ROOT / "dvc.yaml").values():
        missing, needless = differences(node)
        wrong = wrong or bool(missing or needless)
        for sign, files in (("+", missing), ("-", needless)):
            print("".join(f"{node.name}: {sign} {file}\n" for file in sorted(files)), end="")
    sys.exit(wrong)

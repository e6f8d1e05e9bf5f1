"""The report, from made-up results of a model of any depth."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from pipeline.artifacts import ArtifactError, write_json, write_table
from pipeline.drawing.axes import fitting, linear
from pipeline.drawing.notation import fixed, listing, number, runs, spans
from pipeline.files import Files
from pipeline.graph import read_graph
from pipeline.params import read_params, stage_params
from stages.report import Params
from stages.report.columns import Columns
from stages.report.comparison import Variant, by_protocol, conflicts, paired_difference
from stages.report.heatmap import shade
from stages.report.run import run
from stages.report.shares import per_block_sparsity
from tests.browser import CHROMIUM, open_page

ROOT = Path(__file__).parents[2]
MATRICES = ("self_attn.q_proj", "mlp.up_proj")
Edit = Callable[[Path], None]


def fake_results(data: Path, blocks: int = 30, removed: Iterable[int] = (20, 21, 22), seed: int = 0, ghosts: bool = True) -> None:
    """Write all inputs of the report below `data`, with shapes and sizes a real model could have."""
    draw, gone = np.random.default_rng(seed), sorted(removed)
    depth = np.linspace(0, 1, blocks)
    influence = 0.02 + 0.45 * np.exp(-9 * depth) + 0.25 * np.exp(-14 * (1 - depth)) + draw.uniform(0, 0.02, blocks)
    fake_tables(data, influence, draw)
    fake_references(data, blocks)
    spans_ = runs(gone)
    rows = (
        [[a, b, "ghost", 1e-4, 0.52 + 0.02 * k, 0.61 + 0.05 * k, 3.1e5, 0.34, 11.2] for k, (a, b) in enumerate(spans_)]
        if ghosts
        else []
    )
    columns = ["start", "stop", "operator", "ridge", "train_error", "heldout_error", "condition", "antisymmetric_share", "norm"]
    write_table(data / "ghost.csv", pd.DataFrame(rows, columns=columns))
    behind = [b for b in range(gone[0] + 1, blocks + 1) if b not in gone] if ghosts and gone else []
    growth = [[b, 0.3 + 0.01 * b, 0.4 + 0.02 * b, 0.31 + 0.01 * b, 0.41 + 0.02 * b] for b in behind]
    write_table(
        data / "ghost_growth.csv",
        pd.DataFrame(growth, columns=["boundary", "restored", "removed", "restored_rest", "removed_rest"]),
    )
    write_json(data / "removal.json", {"removed": gone})
    fake_answers(data, tasks=())
    base = draw.normal(3.18, 0.3, 16)
    cost = {"dense": 0.0, "masked": 0.21, "removed": 0.41 if gone else 0.0, "compressed": 0.44 if gone else 0.21}
    for name, extra in cost.items():
        kept = blocks - (len(gone) if name in ("removed", "compressed") else 0)
        zeros = 0.5 if name in ("masked", "compressed") else 0.0
        write_json(
            data / f"evaluation/{name}.json",
            fake_evaluation(name, base + draw.normal(extra, 0.05 if extra else 0, 16), kept, zeros),
        )


def fake_answers(data: Path, tasks: Iterable[str] = ("arc_easy", "boolq"), examples: int = 200) -> None:
    """Write what stage `zeroshot` writes, with normalised accuracy for the first task alone."""
    draw, tasks = np.random.default_rng(4), list(tasks)
    base = draw.random((len(tasks), examples)) < 0.55
    for name, flipped in {"dense": 0.0, "masked": 0.1, "removed": 0.15, "compressed": 0.2}.items():
        right = base & (draw.random(base.shape) >= flipped)
        table = pd.DataFrame(
            {
                "task": np.repeat(tasks, examples), "example": list(range(examples)) * len(tasks), "target": "0", "choice": "0",
                "correct": right.ravel().astype(int), "loglikelihoods": "-1.0 -2.0",
                "correct_normalised": np.where(np.repeat(np.arange(len(tasks)) == 0, examples), right.ravel() * 1.0, np.nan),
            }
        )  # fmt: skip
        write_table(data / f"zeroshot/{name}.csv", table.astype({"correct_normalised": "Int64"}))
        contract = {
            "data": "a package, validation",
            "shots": 0,
            "special_tokens": "none",
            "dtype": "float32",
            "harness": "lm-eval",
        }
        found = {task: {"examples": examples, "contract": {"task": task, **contract}} for task in tasks}
        write_json(data / f"zeroshot/{name}.json", {"variant": name, "tasks": found})


def fake_tables(data: Path, influence: np.ndarray, draw: np.random.Generator) -> None:
    """The tables per block and per pair."""
    blocks = len(influence)
    p99 = 3 * np.exp(np.linspace(0, 3.4, blocks + 1) + draw.normal(0, 0.1, blocks + 1))
    rows = []
    for block in range(blocks):
        for place, value, weights in [
            ("input", p99[block], 0),
            ("output", p99[block + 1], 0),
            *((name, 2.0, 10_000) for name in MATRICES),
        ]:
            rows.append(
                [
                    block,
                    place,
                    576,
                    weights,
                    value / 6,
                    value / 2,
                    value,
                    value * 2.2,
                    value / 4,
                    value / 3,
                    value * (900 if block == 12 else 5),
                    0.004,
                ]
            )
    heads = ["block", "place", "width", "parameters", "p50", "p90", "p99", "p99.9", "mean", "norm", "max", "outlier_ratio"]
    write_table(data / "statistics.csv", pd.DataFrame(rows, columns=heads))
    score = np.log(p99[1:]) - np.log(p99[1:]).mean()
    sparsity = np.clip(0.5 - 0.05 * score / (score.std() or 1), 0.45, 0.55)
    table = pd.DataFrame({"block": range(blocks), "matrix": "", "parameters": 20_000, "score": score, "sparsity": sparsity})
    write_table(data / "allocation.csv", table)
    kept = pd.DataFrame([[block, name] for block in range(blocks) for name in MATRICES], columns=["block", "matrix"])
    asked = sparsity[kept.block]
    write_table(
        data / "masks.csv",
        kept.assign(parameters=10_000, tokens=512, sparsity_asked=asked, sparsity=asked, kept_magnitude=0.8, method="wanda"),
    )
    depth, chance = np.linspace(0, 1, blocks), np.random.default_rng(1)
    weighed = {
        "parameters": 20_000, "score_outliers_5": 0.02 / (1 + depth), "score_mean": 0.4 + depth,
        "alpha_peak": 3 + chance.random(blocks), "weighted_gradient": 1e-6 * chance.random(blocks),
    }  # fmt: skip
    write_table(data / "importance.csv", pd.DataFrame({"block": range(blocks), "matrix": "", **weighed}))
    rise = 0.01 + 0.05 * chance.random(blocks)
    write_table(data / "sensitivity.csv", pd.DataFrame({"block": range(blocks), "rise": rise, "error": rise / 7}))
    table = pd.DataFrame({"block": range(blocks), "influence": influence, "influence_error": influence * 0.06})
    table["deletion"] = influence * draw.uniform(0.5, 2, blocks)
    table["sink"] = ["makes" if block == 11 else "" for block in range(blocks)]
    write_table(data / "redundancy_blocks.csv", table)
    angle = np.concatenate([[0], np.cumsum(np.arccos(1 - influence) * 0.45)])
    pairs = [[i, j, float(np.cos(min(angle[j] - angle[i], 1.5)))] for i in range(blocks + 1) for j in range(i + 1, blocks + 1)]
    table = pd.DataFrame(pairs, columns=["i", "j", "cosine"])
    near = (table.j - table.i == 1) & (table.j < blocks)
    table.loc[near, "replacement"] = draw.uniform(0.2, 0.4, int(near.sum()))
    table.loc[near, "interchange"] = table.replacement / 3
    write_table(data / "redundancy_pairs.csv", table)
    verdict = {
        "regime": "divergent",
        "pairs": 27,
        "replacement": 0.3,
        "interchange": 0.1,
        "ratio": 1 / 3,
    }
    write_json(
        data / "redundancy.json",
        {**verdict, "half_against_all": {"interchange": 0.8}, "sink_made_by": [11] if blocks > 11 else []},
    )
    around = [*range(10, 13), *range(10), *range(13, blocks)][:blocks]
    orders = {
        "streamline": [[block, 0.9] for block in around],
        "shortgpt": [[block, 0.1] for block in range(blocks) if block != 11],
        "deletion": [[block, block / 100] for block in range(blocks) if block != 11] + [[11, 0.29]] * (blocks > 11),
    }
    write_json(data / "removal_scores.json", {"method": "streamline" if blocks > 13 else "none", "scores": {}, "order": orders})
    rows = [[name, n, block, 0.1] for name in ("shortgpt", "deletion") for n in (1, 3) for block in range(min(n, blocks))]
    write_table(data / "removal_choices.csv", pd.DataFrame(rows, columns=["criterion", "count", "block", "score"]))
    rows = []
    for reach in (1, 2, 4):
        for block in range(blocks - reach + 1):
            held = 0.35 + 0.3 * draw.uniform() + 0.3 * (block == 0) + 0.04 * reach
            rows.append(
                [block, block + reach, held - 0.08, held, 0.0 if reach == 1 else 0.55 + 0.06 * reach + 0.15 * draw.uniform()]
            )
    write_table(
        data / "peeling.csv", pd.DataFrame(rows, columns=["block", "target", "train_error", "heldout_error", "own_error"])
    )


def fake_references(data: Path, blocks: int, maps: int = 0) -> None:
    """What stage `yes` leaves: nothing by default, or a model, its control and so many maps."""
    nets = ["net", "role", "blocks", "targets", "train", "train_error", "test", "test_error", "gain", "gain_error"]
    heads = ["block", "gap", "gap_error", "alternative", "skipped", "skipped_best", "stepping_stone", "error"]
    rows, layers = [], []
    if maps:
        rows = [["model", "model", None, "", 3.2, 0.05, 3.4, 0.06, -0.3, 0.01]]
        rows += [["model, head refitted", "control", None, "", 2.9, 0.05, 3.45, 0.06, 0.0, 0.0]]
        kind = ["reference" if number == maps - 1 else "bound" for number in range(maps)]
        rows += [
            [f"map_{n}", kind[n], blocks, "2-2" if n == 0 else "1-2", 2.8 - 0.01 * n, 0.05, 3.5, 0.06, 0.1, 0.01]
            for n in range(maps)
        ]
        stones = ["poor", *["fine"] * (blocks - 2)]
        layers = [[b, 0.05 - 0.07 * (b > 0), 0.01, "map_1", 0.5, 1.0, stone, 0.1] for b, stone in enumerate(stones)]
    write_table(data / "yes.csv", pd.DataFrame(rows, columns=nets))
    write_table(data / "yes_layers.csv", pd.DataFrame(layers, columns=heads))
    gains = {"share_of_head": 0.3, "gain": 0.12, "gain_error": 0.01, "gain_test": -0.05, "gain_test_error": 0.02}
    lights = {"verdict": "amber", "yes0_train": 2.95, "verdict_with_head": "red", "verdict_test": "green", "best": "map_1"}
    other = {"reference": f"map_{maps - 1}", "reference_train": 2.7, "reference_test": 3.5}
    write_json(data / "yes.json", {"maps": maps, **({**gains, **lights, **other} if maps else {})})


def fake_evaluation(name: str, windows: np.ndarray, blocks: int, sparsity: float) -> dict[str, Any]:
    """One `evaluation/<variant>.json`."""
    loss, spread = float(windows.mean()), float(windows.std() / len(windows) ** 0.5)
    prunable = 3_538_944 * blocks
    return {
        "variant": name,
        "perplexity": float(np.exp(loss)),
        "interval": [float(np.exp(loss - 2 * spread)), float(np.exp(loss + 2 * spread))],
        "confidence": 0.95,
        "loss": loss,
        "tokens": len(windows) * 511,
        "windows": windows.tolist(),
        "contract": {
            "corpus": "demo, evaluation split",
            "corpus_documents": 11,
            "corpus_revision": None,
            "corpus_sha256": "5e" * 32,
            "corpus_tokens": 61_234,
            "scored_per_window": 511,
            "separator": "\n\n",
            "length": 512,
            "stride": 512,
            "windows": len(windows),
            "special_tokens": "none",
            "dtype": "float32",
        },
        "sparsity": sparsity,
        "zeros": int(prunable * sparsity),
        "prunable": prunable,
        "parameters": 28_311_552 + prunable,
        "bytes": 2 * (28_311_552 + prunable),
        "blocks": blocks,
    }


def report(root: Path, overrides: dict[str, dict[str, Any]] | None = None) -> str:
    """Run the stage in `root` with the project's own params.yaml and dvc.yaml; the page's text."""
    node, raw = read_graph(ROOT / "dvc.yaml")["report"], read_params(ROOT / "params.yaml")
    for section, values in (overrides or {}).items():
        raw[section] = {**raw[section], **values}
    params = stage_params("report", raw, list(node.params))
    assert isinstance(params, Params)
    run(params, Files("report", "deps", node.reads, root), Files("report", "outs", node.writes, root))
    return (root / "data/report.html").read_text(encoding="utf-8")


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    write_json(path, content)


def edit_table(path: Path, change: Callable[[pd.DataFrame], Any]) -> None:
    write_table(path, change(pd.read_csv(path)))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    fake_results(tmp_path / "data")
    return tmp_path


class _Page(HTMLParser):
    """Collects text, tables and everything that would make a browser fetch something."""

    def __init__(self, text: str):
        super().__init__()
        self.fetched: list[str] = []
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [f"{tag} {key}={value}" for key, value in attrs if key in ("src", "srcset", "href", "xlink:href", "data")]
        self.fetched += [tag] if tag in ("script", "link", "iframe", "img", "object", "embed") else []
        if tag not in ("meta", "br", "img", "link"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """`<path/>` of an inline picture: nothing stays open."""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.rows and {"td", "th"} & set(self.open):
            self.rows[-1][-1] += f" {data.strip()}" if self.rows[-1][-1] else data.strip()


def test_page_stands_alone_and_is_well_formed(root: Path) -> None:
    text = report(root)
    page = _Page(text)
    assert page.fetched == [] and page.open == []
    assert "url(" not in text and "@import" not in text
    assert not re.search(r"\b(nan|inf|None|NaN)\b", text)
    assert str(root) not in text


def test_table_has_every_variant_with_its_numbers(root: Path) -> None:
    rows = {row[0].split()[0]: row for row in _Page(report(root)).rows if row}
    dense = json.loads((root / "data/evaluation/dense.json").read_text())
    last = json.loads((root / "data/evaluation/compressed.json").read_text())
    difference = np.mean(np.subtract(last["windows"], dense["windows"]))
    assert rows["dense"][1].startswith(f"{dense['perplexity']:.2f}")
    assert rows["dense"][2] == "–"
    assert rows["compressed"][2].startswith(f"+{difference:.3f}")
    assert rows["compressed"][3:6] == ["50.00%", "27", f"{last['parameters']:,}"]
    assert set(rows) >= {"dense", "masked", "removed", "compressed"}


def test_no_perplexity_without_its_protocol(root: Path) -> None:
    text = report(root)
    outcome = re.search(r'<p class="outcome">(.*?)</p>', text)
    assert outcome and "Perplexity goes from" in outcome[1]
    for word in ("demo, evaluation split", "512 tokens a window", "special tokens: none", "float32", "8,176 tokens scored"):
        assert word in outcome[1]
    listed = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", text))
    assert listed["Tokens scored"] == "8,176" and listed["Special tokens"] == "none" and listed["Windows"] == "16"


CUSTOM = {
    "contract": "custom",
    "stride": 256,
    "overlap": "context only",
    "join": "'\\n'",
    "blank_documents": "kept",
    "rest": "kept",
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"contract": "custom"}, "512 tokens a window, end to end, special tokens: none"),
        (
            {"contract": "custom", "stride": 256, "overlap": "context only"},
            "one every 256, what overlaps is context only, special",
        ),
        ({"contract": "custom", "stride": 511}, "512 tokens a window, end to end, special"),  # and a token before each
        (CUSTOM, r"what overlaps is context only, documents joined by '\n', blank documents kept, a short last window, special"),
        (
            {**CUSTOM, "words": 5000, "join": "words by single spaces"},
            "context only, the first 5,000 words, blank documents kept",
        ),
        ({**CUSTOM, "contract": "no_free_swap"}, "contract: no_free_swap, demo, evaluation split, 512 tokens a window, special"),
    ],
)
def test_the_first_sentences_say_what_the_name_of_a_contract_does_not(root: Path, change: dict[str, Any], words: str) -> None:
    for name in ("dense", "masked", "removed", "compressed"):
        edit_json(root / f"data/evaluation/{name}.json", lambda one: one["contract"].update(change))
    assert words in html.unescape(report(root))


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_on_a_phone_wide_tables_scroll_in_a_box_of_their_own(root: Path) -> None:
    report(root)
    with open_page(390, 844) as page:
        page.size(390, 844)
        page.open(f"file://{root}/data/report.html")
        page.wait_for("document.querySelectorAll('#notes li').length")
        assert page.ask("document.documentElement.clientWidth") == 390
        assert page.ask("document.documentElement.scrollWidth") == 390
        assert page.ask("document.querySelector('.scroll').scrollWidth") > 390, "a table that would not fit"


def test_unlike_protocols_are_kept_apart_and_said_aloud(root: Path) -> None:
    edit_json(root / "data/evaluation/compressed.json", lambda one: one["contract"].update(dtype="bfloat16"))
    text = report(root)
    assert 'role="alert"' in text and "Precision: float32 (dense, masked and removed), bfloat16 (compressed)" in text
    assert "Perplexity goes from" not in text
    tables = re.findall(r"<table>.*?</table>", text, re.DOTALL)[:2]
    assert "dense" in tables[0] and "compressed" not in tables[0]
    assert "compressed" in tables[1] and "Loss minus dense" not in tables[1]
    assert "scored under another protocol: compressed" in text
    picture = (root / "data/pictures/perplexity.svg").read_text()
    assert "removed" in picture and "compressed" not in picture


def test_like_protocols_raise_no_alarm(root: Path) -> None:
    assert 'role="alert"' not in report(root)


def test_equal_inputs_give_equal_bytes_and_leave_nothing_stale(root: Path) -> None:
    def written() -> dict[str, bytes]:
        outputs = [
            root / "data/report.html",
            root / "data/metrics.json",
            *(root / "data/pictures").iterdir(),
            *(root / "data/plots").iterdir(),
        ]
        return {path.name: path.read_bytes() for path in outputs}

    report(root)
    first = written()
    (root / "data/pictures/stale.svg").write_text("old")
    report(root)
    assert written() == first
    assert {"perplexity.svg", "sparsity.svg", "redundancy.svg", "ghost.svg", "peeling.svg"} <= set(first)


def test_pictures_are_whole_svg_files(root: Path) -> None:
    report(root)
    for path in (root / "data/pictures").iterdir():
        tree = ElementTree.fromstring(path.read_text(encoding="utf-8"))
        panels = tree.findall("{http://www.w3.org/2000/svg}svg")
        assert panels and all(panel.get("aria-label") for panel in panels)


def test_metrics_hold_what_dvc_shows(root: Path) -> None:
    report(root)
    metrics = json.loads((root / "data/metrics.json").read_text())
    assert list(metrics) == ["compressed", "dense", "masked", "removed"]
    source = json.loads((root / "data/evaluation/masked.json").read_text())
    low, high = source["interval"]
    expected = {key: source[key] for key in ("perplexity", "tokens", "sparsity", "parameters", "bytes")}
    assert metrics["masked"] == {**expected, "low": low, "high": high, "contract": metrics["dense"]["contract"]}
    assert len(metrics["masked"]["contract"]) == 8


def test_metrics_of_unlike_contracts_say_so(root: Path) -> None:
    """`dvc metrics diff` and `dvc exp show` put numbers in one column: the contract's word beside them differs."""
    edit_json(root / "data/evaluation/compressed.json", lambda one: one["contract"].update(stride=256))
    report(root)
    metrics = json.loads((root / "data/metrics.json").read_text())
    words = {name: one["contract"] for name, one in metrics.items()}
    assert words["dense"] == words["masked"] == words["removed"] != words["compressed"]
    assert pd.read_csv(root / "data/plots/perplexity.csv").variant.tolist() == ["dense", "masked", "removed"]


def test_plot_data_has_the_columns_dvc_yaml_draws(root: Path) -> None:
    fake_answers(root / "data")
    report(root)
    declared = [next(iter(entry.values())) for entry in YAML(typ="safe").load(ROOT / "dvc.yaml")["plots"]]
    declared = [plot for plot in declared if all(path.startswith("data/plots/") for path in plot["y"])]  # others are not its own
    assert len(declared) >= 4
    for plot in declared:
        for path, drawn in plot["y"].items():
            table = pd.read_csv(root / path)
            x = plot["x"] if isinstance(plot["x"], str) else plot["x"][path]
            assert {x, drawn} <= set(table.columns) and len(table)
        template = ROOT / ".dvc/plots" / f"{plot['template']}.json"
        assert plot["template"] == "simple" or json.loads(template.read_text())["data"] == {"values": "<DVC_METRIC_DATA>"}


def test_nothing_masked_and_nothing_removed(tmp_path: Path) -> None:
    data = tmp_path / "data"
    fake_results(data, removed=())
    edit_table(data / "allocation.csv", lambda table: table.assign(sparsity=0.0, score=0.0))
    edit_table(data / "masks.csv", lambda table: table.assign(sparsity=0.0))
    dense = json.loads((data / "evaluation/dense.json").read_text())
    for name in ("masked", "removed", "compressed"):
        write_json(data / f"evaluation/{name}.json", {**dense, "variant": name})
    text = report(tmp_path, {"allocation": {"sparsity": 0.0}, "removal": {"method": "none"}})
    assert "nothing masked, nothing removed" in text and "Perplexity stays at" in text
    assert "No block was removed" in text and "No block gives up any weights" in text
    assert not (data / "pictures/ghost.svg").exists()
    assert list(pd.read_csv(data / "plots/ghost.csv").columns) == ["blocks", "series", "error"]
    assert not re.search(r"\bnan\b", text)


def test_removed_without_operator(tmp_path: Path) -> None:
    fake_results(tmp_path / "data", ghosts=False)
    text = report(tmp_path, {"ghost": {"method": "none"}})
    assert "nothing stands in for them" in text and "No operator was fitted (ghost.method: none)" in text


@pytest.mark.parametrize(("blocks", "removed"), [(1, ()), (2, (1,)), (80, (10, 30, 31, 32, 50, 60, 70))])
def test_any_depth(tmp_path: Path, blocks: int, removed: tuple[int, ...]) -> None:
    fake_results(tmp_path / "data", blocks=blocks, removed=removed)
    text = report(tmp_path, {"allocation": {"method": "pals"}})
    assert _Page(text).open == [] and not re.search(r"\bnan\b", text)
    assert f"({blocks} block{'' if blocks == 1 else 's'}, " in text
    assert len(text) < 600_000


@pytest.mark.parametrize(
    ("method", "title"),
    [
        ("owl", "Outliers: % of scores above 5 times their mean"),
        ("dlp", "Mean of the scores |W|·‖x‖"),
        ("alphapruning", "Tail exponent α of the weights&#x27; spectra (peak)"),
        ("gradient", "Mean |W · ∂L/∂W|"),
        ("measured", "KL from the dense model with one block pruned alone, nats"),
        ("random", "Random numbers"),
    ],
)
def test_the_score_is_called_what_it_is(tmp_path: Path, method: str, title: str) -> None:
    fake_results(tmp_path / "data")
    text = report(tmp_path, {"allocation": {"method": method}})
    picture = (tmp_path / "data/pictures/sparsity.svg").read_text()
    assert title in text and title in picture
    assert ("one standard error" in text.split("Where the zeros go")[1].split("</p>")[0]) == (method == "measured")
    plot = pd.read_csv(tmp_path / "data/plots/score.csv")
    allocation = pd.read_csv(tmp_path / "data/allocation.csv")
    assert plot.score.tolist() == pytest.approx(allocation.score.tolist())


def test_the_rules_are_ranked_side_by_side(tmp_path: Path) -> None:
    """Outliers fall with depth: OWL spares block 0 most. Scores rise with depth: DLP, which prunes large ones, spares it too."""
    fake_results(tmp_path / "data", blocks=10, removed=(7,))
    outliers = pd.read_csv(tmp_path / "data/importance.csv").score_outliers_5
    edit_table(tmp_path / "data/allocation.csv", lambda table: table.assign(score=100 * outliers))
    picture = (report(tmp_path, {"allocation": {"method": "owl"}}), (tmp_path / "data/pictures/sparsity.svg").read_text())[1]
    for name in ("OWL", "DLP"):
        assert f"{name}, block 0: 1.00" in picture and f"{name}, block 9: 0.00" in picture
    assert "PALS, block 9: 1.00" in picture and "▸ OWL" in picture and "▸ DLP" not in picture
    edit_table(tmp_path / "data/sensitivity.csv", lambda table: table.assign(rise=None, error=None))
    edit_table(tmp_path / "data/importance.csv", lambda table: table[["block", "matrix"]])
    edit_table(tmp_path / "data/statistics.csv", lambda table: table[["block", "place"]])
    edit_table(tmp_path / "data/allocation.csv", lambda table: table.assign(score=0.0))
    assert "How each rule ranks" not in report(tmp_path)


def test_columns_beyond_the_needed_ones_may_be_missing(root: Path) -> None:
    data = root / "data"
    edit_table(data / "statistics.csv", lambda table: table[["block", "place"]])
    edit_table(data / "allocation.csv", lambda table: table[["block", "sparsity"]])
    edit_table(data / "redundancy_blocks.csv", lambda table: table[["block", "influence"]])
    edit_table(data / "ghost.csv", lambda table: table[["start", "stop", "train_error", "heldout_error"]])
    edit_table(data / "peeling.csv", lambda table: table[["block", "target", "heldout_error"]])
    for name in ("dense", "masked", "removed", "compressed"):
        edit_json(
            data / f"evaluation/{name}.json",
            lambda one: [one.pop(key) for key in ("zeros", "prunable", "blocks", "confidence", "loss")],
        )
    text = report(root)
    assert not re.search(r"\b(nan|None)\b", text) and "Sparsity per block" in text and "percentile of |activation|" not in text


def test_empty_cells_leave_gaps(root: Path) -> None:
    edit_table(
        root / "data/peeling.csv", lambda table: table.assign(heldout_error=table["heldout_error"].where(table["block"] > 3))
    )
    edit_table(root / "data/redundancy_pairs.csv", lambda table: table.assign(cosine=table["cosine"].where(table["i"] != 5)))
    edit_table(root / "data/statistics.csv", lambda table: table.assign(p99=table["p99"].where(table["block"] != 7)))
    assert not re.search(r"\bnan\b", report(root))


def test_only_windows_longer_than_one_say_how_sure(tmp_path: Path) -> None:
    fake_results(tmp_path / "data")
    for name in ("dense", "masked", "removed", "compressed"):
        edit_json(tmp_path / f"data/evaluation/{name}.json", lambda one: one.update(windows=one["windows"][:1], tokens=511))
    text = report(tmp_path)
    assert "a single window does not say how sure that is" in text and "paired over 1 window" in text


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: (data / "peeling.csv").unlink(), "peeling.csv: not there"),
        (
            lambda data: edit_table(data / "allocation.csv", lambda table: table.drop(columns="sparsity")),
            "allocation.csv: no column 'sparsity'",
        ),
        (
            lambda data: edit_table(data / "redundancy_blocks.csv", lambda table: table.iloc[:0]),
            "redundancy_blocks.csv: a table without rows",
        ),
        (
            lambda data: edit_table(data / "allocation.csv", lambda table: table.assign(sparsity="half")),
            "allocation.csv: column 'sparsity'",
        ),
        (lambda data: edit_json(data / "removal.json", lambda one: one.update(removed=[30])), "removal.json: removed block 30"),
        (lambda data: edit_json(data / "removal.json", lambda one: one.pop("removed")), "removal.json: no key 'removed'"),
        (lambda data: edit_json(data / "evaluation/masked.json", lambda one: one.pop("tokens")), "masked.json: no key 'tokens'"),
        (lambda data: edit_json(data / "evaluation/masked.json", lambda one: one.update(windows=[])), "masked.json: windows"),
        (lambda data: edit_json(data / "evaluation/masked.json", lambda one: one.update(contract="c4")), "masked.json: contract"),
        (
            lambda data: edit_json(data / "evaluation/masked.json", lambda one: one.update(perplexity="low")),
            "masked.json: could not",
        ),
    ],
)
def test_broken_input_names_the_file(root: Path, change: Edit, says: str) -> None:
    change(root / "data")
    with pytest.raises(ArtifactError) as error:
        report(root)
    assert says in str(error.value)
    assert not (root / "data/report.html").exists()


def test_folders_of_this_machine_stay_out_of_the_page(root: Path) -> None:
    text = report(root, {"model": {"source": "folder", "path": "/models/mine/tiny-7b"}, "report": {"title": "A <b> & c"}})
    assert "/models/mine" not in text and "In tiny-7b (30 blocks" in text and "…/tiny-7b" in text
    assert "A &lt;b&gt; &amp; c" in text


def test_light_imports() -> None:
    code = (
        "import stages.report.run, sys; print([name for name in ('torch', 'transformers', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_readings_follow_the_tables(root: Path) -> None:
    data = root / "data"
    edit_table(
        data / "redundancy_pairs.csv",
        lambda table: table.assign(cosine=np.where((table["i"] == 20) & (table["j"] == 23), 0.9999, table["cosine"])),
    )
    edit_table(data / "redundancy_blocks.csv", lambda table: table.assign(influence=table["block"] + 1.0))
    edit_table(data / "ghost.csv", lambda table: table.assign(heldout_error=1.25))
    text = report(root)
    assert "the highest of all 28 stretches of 3 blocks" in text
    assert "Block 0 changes the stream least (influence 1.00), block 29 most (30.0); the removed blocks" in text
    assert "ranks 21, 22 and 23 of 30" in text
    assert "worse than leaving a hole: blocks 20" in text


def test_cosine_map_outlines_removed_runs(tmp_path: Path) -> None:
    fake_results(tmp_path / "data", removed=(4, 5, 11))
    report(tmp_path)
    tips = re.findall(r"boundaries (\d+) and (\d+):", (tmp_path / "data/pictures/redundancy.svg").read_text())
    assert tips == [("4", "6"), ("11", "12")]


def test_paired_difference_of_a_constant_shift_has_no_width() -> None:
    base = np.random.default_rng(1).normal(3, 0.5, 40)
    one = paired_difference(base + 0.25, base, 200, 0.95, 0)
    assert one.mean == pytest.approx(0.25) and one.low == pytest.approx(0.25) and one.high == pytest.approx(0.25)
    assert one.worse == 40


def test_paired_difference_counts_tokens() -> None:
    base, scored = np.full(3, 3.0), np.array([500.0, 250.0, 2.0])
    one = paired_difference(np.array([2.9, 3.0, 4.0]), base, 500, 0.95, 0, scored)
    assert one.mean == pytest.approx((-0.1 * 500 + 1.0 * 2) / 752) and one.worse == 1
    assert one.low is not None and one.low == pytest.approx(-0.1, abs=0.01)


def test_paired_difference_interval_is_near_the_normal_one() -> None:
    draw = np.random.default_rng(2)
    base = draw.normal(3, 0.5, 400)
    one = paired_difference(base + draw.normal(0.1, 0.2, 400), base, 4000, 0.95, 7)
    half = 1.96 * one.windows.std(ddof=1) / 20
    assert one.low is not None and one.high is not None
    assert one.low == pytest.approx(one.mean - half, abs=0.1 * half) and one.high == pytest.approx(
        one.mean + half, abs=0.1 * half
    )
    with pytest.raises(ValueError, match="paired windows"):
        paired_difference(base, base[:5], 10, 0.95, 0)


def test_protocols_group_and_name_what_differs() -> None:
    def variant(name: str, **protocol: str) -> Variant:
        return Variant(name, 2.0, 1.0, 3.0, 0.95, 10, np.ones(2), np.ones(2), protocol, 0.0, 1, 2)

    groups = by_protocol(
        [variant("dense", length="512"), variant("masked", length="512"), variant("removed", length="1024", bos="yes")]
    )
    assert [[one.name for one in group] for group in groups] == [["dense", "masked"], ["removed"]]
    assert conflicts(groups, {"length": "Window length"}) == [
        "bos: not stated (dense and masked), yes (removed)",
        "Window length: 512 (dense and masked), 1024 (removed)",
    ]


def test_sparsity_of_a_block_is_weighted_by_parameters() -> None:
    table = Columns({"block": [1, 0, 0], "parameters": [10, 300, 100], "sparsity": [0.7, 0.6, 0.2]}, 3)
    blocks, shares = per_block_sparsity(table)
    assert blocks == [0, 1] and shares.tolist() == pytest.approx([0.5, 0.7])


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (24.1, 4, "24.10"),
        (0.012345, 3, "0.0123"),
        (27520, 4, "27,520"),
        (1.234e9, 4, "1.23×10⁹"),
        (-0.5, 2, "−0.50"),
        (0.0, 4, "0"),
        (float("nan"), 4, "–"),
        (99.996, 4, "100.0"),
        (3.2e-7, 3, "3.2×10⁻⁷"),
    ],
)
def test_numbers_read_well(value: float, digits: int, text: str) -> None:
    assert number(value, digits) == text


def test_words_read_well() -> None:
    assert fixed(-0.0001) == "0.000" and fixed(0.25, 3, sign=True) == "+0.250" and fixed(float("inf")) == "–"
    assert runs([14, 3, 12, 13]) == [(3, 4), (12, 15)] and spans([14, 3, 12, 13]) == "3, 12–14"
    assert listing(["a"]) == "a" and listing(["a", "b", "c"]) == "a, b and c"


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20))
def test_linear_axes_hold_their_values_and_name_ticks_truly(values: list[float]) -> None:
    axis = linear(values)
    assert axis.low <= min(values) and axis.high >= max(values)
    assert len(axis.ticks) >= 2 and len({label for _, label in axis.ticks}) == len(axis.ticks)
    assert all(axis.low <= tick <= axis.high for tick, _ in axis.ticks)
    if max(map(abs, values)) < 9e4:
        step = axis.ticks[1][0] - axis.ticks[0][0]
        assert all(abs(float(label.replace(",", "").replace("−", "-")) - tick) < 0.01 * step for tick, label in axis.ticks)


@given(st.lists(st.floats(1e-6, 1e9), min_size=2, max_size=20))
def test_axes_chosen_for_wide_values_are_logarithmic_and_ordered(values: list[float]) -> None:
    axis = fitting(values)
    assert axis.log == (max(values) / min(values) > 8)
    places = [axis.at(value) for value in sorted(values)]
    assert places == sorted(places) and places[0] >= 0 and places[-1] <= 1
    assert len(axis.ticks) >= 2


def test_shades_run_from_dark_to_light() -> None:
    light = [
        sum(int(shade(share)[index : index + 2], 16) * weight for index, weight in ((1, 0.3), (3, 0.59), (5, 0.11)))
        for share in np.linspace(0, 1, 20)
    ]
    assert light == sorted(light) and light[-1] - light[0] > 150


def test_choices_regime_and_the_sinks_maker(root: Path) -> None:
    page = report(root)
    assert "Regime: divergent. Over 27 pairs" in page and "it does not predict which criterion" in page
    assert "interchange 0.80: more prompts (redundancy.prompts) would still move them." in page
    assert re.search(r"Block 11 makes the sink token: rank \d+ of 30 \([\d.]+\) by influence", page)
    ranks = {"Deletion": "rank 30 of 30 (0.290)", "ShortGPT": "–", "Streamline of 3": "rank 2 of 30 (0.900)"}
    lines = "".join(f"<tr><td>{head}</td><td>{rank}</td></tr>\n" for head, rank in ranks.items())
    assert '<th scope="col">11, makes the sink</th>' in page and lines in page, "criteria down, windows with their length"
    picture = (root / "data/pictures/removal.svg").read_text()
    assert picture.count("<title>ShortGPT: block") == 3 and picture.count("from 1 removals on") == 2


def test_without_swaps_the_page_says_so(root: Path) -> None:
    edit_table(root / "data/redundancy_blocks.csv", lambda table: table.drop(columns=["deletion"]))
    page = report(root)
    assert "redundancy.swaps: false" in page and "Regime:" not in page


def test_the_map_of_kept_magnitude_and_what_was_not_done_as_asked(root: Path) -> None:
    """Block 7's up_proj keeps least; two matrices fell back; the damping of one was raised."""

    def change(table: pd.DataFrame) -> pd.DataFrame:
        low = (table.block == 7) & (table.matrix == "mlp.up_proj")
        return table.assign(
            kept_magnitude=table.kept_magnitude.where(~low, 0.61),
            method=table.method.where(table.block != 3, "magnitude"),
            damping=np.where(low, 0.1, 0.01),
            dead_inputs=np.where(low, 5, 0),
        )

    edit_table(root / "data/masks.csv", change)
    page = report(root, {"masking": {"method": "sparsegpt", "pattern": "2:4"}})
    assert "least in mlp.up_proj of block 7 (61.0%)" in page
    assert "2 matrices of 60 saw fewer than 1 calibration tokens and went by magnitude (block 3)" in page
    assert "was raised in 1 matrix, to 0.1 at most" in page and "5 inputs are zero for every calibration token" in page
    assert "2:4 along the inputs" in page
    assert "block 7, up_proj: 0.6100" in (root / "data/pictures/masks.svg").read_text()
    kept = pd.read_csv(root / "data/plots/kept.csv")
    assert len(kept) == 60 and kept.kept_magnitude.min() == 0.61


@pytest.mark.parametrize("blocks", [True, False])
def test_a_pruned_head_is_told_by_what_was_counted(root: Path, blocks: bool) -> None:
    def change(table: pd.DataFrame) -> pd.DataFrame:
        head = {"matrix": "head", "parameters": 96, "sparsity": 0.25, "sparsity_asked": 0.3, "kept_magnitude": 0.8}
        rows = table if blocks else table.assign(sparsity=0.0)
        rows = pd.concat([rows, pd.DataFrame([{**head, "method": "magnitude", "damping": 0.1, "dead_inputs": 4}])])
        return rows.assign(block=rows.block.astype("Int64"))

    edit_table(root / "data/masks.csv", change)
    if not blocks:
        edit_table(root / "data/allocation.csv", lambda table: table.assign(sparsity=0.0))
        edit_json(root / "data/evaluation/masked.json", lambda found: found.update(sparsity=0.0))
    page = re.sub(r"\s+", " ", report(root, {"masking": {"head": 0.3}, **({} if blocks else {"allocation": {"sparsity": 0.0}})}))
    assert f"25.0% of the output head&#39;s weights {'too' if blocks else 'are set to zero'}" in page
    assert (
        "Of the output head&#39;s weights 25.00% are masked instead of 30.00%, by magnitude; those that stay hold 80.0%" in page
    )
    assert "Its damping was 0.1. 4 of its inputs are zero" in page and "What the masks keep" in page
    assert not re.search(r"\bnan\b", page) and len(pd.read_csv(root / "data/plots/kept.csv")) == 60


def test_experts_have_a_table_of_their_tokens(root: Path) -> None:
    experts = [
        [block, f"mlp.experts.{e}.up_proj", 8, 0 if e == 2 else 10 * e, 0.5, 0.5 + 0.1 * e]
        for block in range(30)
        for e in range(3)
    ]
    heads = ["block", "matrix", "parameters", "tokens", "sparsity", "kept_magnitude"]
    write_table(root / "data/masks.csv", pd.DataFrame(experts, columns=heads).assign(method="wanda"))
    page = report(root)
    assert "Matrices never reached" in page and "Experts of one kind are averaged" in page
    kept = pd.read_csv(root / "data/plots/kept.csv")
    assert set(kept.series) == {"mlp.experts.up_proj"} and np.allclose(kept.kept_magnitude, 0.6)


@pytest.mark.parametrize("maps", [2, 40])
def test_references_stand_beside_the_model_with_what_they_prove(root: Path, maps: int) -> None:
    assert not (report(root), (root / "data/pictures/yes.svg").exists())[1], "nothing fitted, nothing said"
    fake_references(root / "data", 30, maps)
    text = report(root)
    said = re.sub(r"\s+", " ", text)
    assert "amber: YES0 is no better, but another map (YES*) is." in said
    assert "Over the control the best map (map 1) gains +0.1200 ± 0.0100 nats on the windows of the fit, −0.0500" in said
    assert "+0.4200 nats between the model as it is and that map, +0.3000 are the head&#39;s alone" in said
    assert "with them the light would be red, on other windows it is green" in said
    assert "Poor stepping stones, better skipped than aimed at: the output of block 0." in said
    picture = (root / "data/pictures/yes.svg").read_text()
    assert f"map {maps - 1} (reference), windows of the fit: {2.8 - 0.01 * (maps - 1):.3f}" in picture
    assert "model, head refitted, others: 3.450" in picture
    assert ("15 of 42 nets" in picture) == (maps == 40) and "map 0, others" in picture, "YES0 is always there"


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ({"source": "demo"}, "In the demo model ("),
        ({"source": "scratch"}, "In the model trained here ("),
        ({"source": "folder", "path": "/somewhere/tiny"}, "In tiny ("),
        ({"source": "hub", "repository": "some/one"}, "In some/one ("),
        ({"source": "hub", "repository": "some/one", "revision": "step5"}, "In some/one (step5) ("),
    ],
)
def test_the_model_has_the_name_that_the_user_gave_it(root: Path, model: dict[str, Any], name: str) -> None:
    assert name in report(root, {"model": model})

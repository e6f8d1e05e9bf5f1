"""Stage `tokens`: files and data sets in, windows out; every shortfall and every bad row named."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet, table

from pipeline.errors import PalimpsestError
from pipeline.files import Files
from pipeline.params import ParamsError, check_sections
from pipeline.tensors import TensorFile
from stages.corpus.text import join_documents
from stages.decoder.checkpoint import AGAIN
from stages.tokens import Params, Tokens
from stages.tokens.contract import READY, Contract
from stages.tokens.run import run
from tests.hub import CLOSED, COMMIT, serve, use_hub
from tests.models import save_model
from tests.vocabulary import BOS, IDS, ids_of, save_tokenizer

STORY = "the cat sat on the mat. it was 1984, and all was well.\n" * 20
TALE = "a fox ran over 7 hills. then it slept.\n" * 20


class Place:
    """A project folder with a tiny model and its tokenizer, in which the stage can be run."""

    def __init__(self, root: Path, bos: bool = True):
        self.data = root / "data"
        self.corpus = self.data / "corpus"
        self.corpus.mkdir(parents=True)
        save_model(self.data / "model", "llama", blocks=1)
        save_tokenizer(self.data / "model", bos)

    def write(self, name: str, content: str | bytes) -> str:
        (self.corpus / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return name

    def run(self, **keys: Any) -> TensorFile:
        small = {"source": "files", "length": 16, "calibration_windows": 3, "evaluation_windows": 2}
        params = Params(tokens=Tokens(**{**small, **keys}))
        outputs = Files("tokens", "outs", ("tokens.safetensors",), self.data.parent)
        run(params, Files("tokens", "deps", ("model", "corpus"), self.data.parent), outputs)
        return TensorFile(outputs["tokens.safetensors"])


@pytest.fixture
def place(tmp_path: Path) -> Place:
    place = Place(tmp_path / "project")
    place.write("story.txt", STORY)
    place.write("tale.txt", TALE)
    return place


TXT: dict[str, Any] = {"calibration_files": ["story.txt"], "evaluation_files": ["tale.txt"]}


def test_text_file_is_one_document_taken_in_order(place: Place) -> None:
    tokens = place.run(**TXT, sampling="first")
    assert tokens.read("calibration").numpy().tolist() == np.reshape(ids_of(STORY)[: 3 * 16], (3, 16)).tolist()
    assert tokens.read("evaluation").numpy().tolist() == np.reshape(ids_of(TALE)[: 2 * 16], (2, 16)).tolist()
    assert str(tokens.read("evaluation").dtype) == "torch.int32"


def test_random_windows_are_distinct_packed_windows_fixed_by_the_seed(place: Place) -> None:
    whole = [tuple(ids_of(STORY)[start : start + 16]) for start in range(0, len(ids_of(STORY)) - 15, 16)]
    drawn = {
        seed: [tuple(row) for row in place.run(**TXT, seed=seed, calibration_windows=40).read("calibration").tolist()]
        for seed in (0, 1)
    }
    assert drawn[0] != drawn[1]
    for rows in drawn.values():
        places = [whole.count(row) for row in rows]
        assert len(rows) == 40 and min(places) >= 1
        assert all(rows.count(row) <= whole.count(row) for row in rows)
    fewer = [tuple(row) for row in place.run(**TXT, seed=1, calibration_windows=5).read("calibration").tolist()]
    assert fewer == drawn[1][:5]


def test_evaluation_ignores_seed_and_sampling(place: Place) -> None:
    first = place.run(**TXT, seed=0, sampling="first").read("evaluation")
    assert place.run(**TXT, seed=9).read("evaluation").equal(first)


def test_two_runs_give_equal_bytes(place: Place) -> None:
    first = place.run(**TXT).path.read_bytes()
    assert place.run(**TXT).path.read_bytes() == first


def test_artifact_says_what_was_read_and_names_no_folder(place: Place) -> None:
    tokens = place.run(**{**TXT, "calibration_files": ["data/corpus/story.txt"]})
    about = tokens.metadata["evaluation"]
    assert about["corpus"] == "files (tale.txt)"
    assert (about["corpus_documents"], about["corpus_tokens"], about["special_tokens"]) == (1, len(ids_of(TALE)), "none")
    assert [file["name"] for file in tokens.metadata["files"]["calibration"]] == ["story.txt"]
    assert str(place.data.parent) not in json.dumps(tokens.metadata)


def test_documents_are_joined_before_they_are_tokenised(place: Place) -> None:
    rows = ["one fox.", "  ", "two cats.", "the end of it all, and more"]
    place.write("rows.jsonl", "\n".join(json.dumps({"text": row}) for row in rows) + "\n\n")
    tokens = place.run(calibration_files=["story.txt"], evaluation_files=["rows.jsonl"], separator="\n")
    joined = "one fox.\ntwo cats.\nthe end of it all, and more"  # the blank row is no document
    assert tokens.read("evaluation").flatten().tolist() == ids_of(joined)[:32]
    assert IDS[".\n"] in tokens.read("evaluation")
    assert tokens.metadata["evaluation"]["corpus_documents"] == 3


def test_parquet_gives_the_same_windows_as_jsonl(place: Place) -> None:
    rows = TALE.split("\n")
    place.write("rows.jsonl", "".join(json.dumps({"body": row}) + "\n" for row in rows))
    parquet.write_table(table({"id": list(range(len(rows))), "body": rows}), place.corpus / "rows.parquet")
    both = [
        place.run(calibration_files=["story.txt"], evaluation_files=[f"rows.{kind}"], field="body").read("evaluation")
        for kind in ("jsonl", "parquet")
    ]
    assert both[0].equal(both[1])


def test_bos_none_window_document(place: Place) -> None:
    place.write(
        "rows.jsonl", "".join(json.dumps({"text": row}) + "\n" for row in ("one fox.", "two cats.", "three hens and a dog"))
    )
    keys: dict[str, Any] = {"calibration_files": ["story.txt"], "evaluation_files": ["rows.jsonl"], "separator": "\n"}
    text = ids_of("one fox.\ntwo cats.\nthree hens and a dog")
    assert BOS not in place.run(**keys).read("evaluation")
    windows = place.run(**keys, special_tokens="window").read("evaluation")
    assert windows.tolist() == [[BOS, *text[:15]], [BOS, *text[15:30]]]
    marked = [BOS, *ids_of("one fox.\n"), BOS, *ids_of("two cats.\n"), BOS, *ids_of("three hens and a dog")]
    windows = place.run(**keys, special_tokens="document").read("evaluation")
    assert windows.flatten().tolist() == marked[:32]


@pytest.mark.parametrize("policy", ["window", "document"])
def test_bos_is_never_doubled(place: Place, policy: str) -> None:
    place.write("marked.txt", "<s>" + TALE)
    with pytest.raises(PalimpsestError, match=r"tokens\.special_tokens would put another.*set tokens\.special_tokens: none"):
        place.run(calibration_files=["story.txt"], evaluation_files=["marked.txt"], special_tokens=policy)


def test_policy_needs_a_bos(tmp_path: Path) -> None:
    place = Place(tmp_path, bos=False)
    place.write("story.txt", STORY)
    place.write("tale.txt", TALE)
    place.run(**TXT)
    with pytest.raises(PalimpsestError, match=r"tokens\.special_tokens = 'window' needs a beginning-of-sequence token.*has none"):
        place.run(**TXT, special_tokens="window")


@pytest.mark.parametrize(("policy", "needed"), [("none", 1600), ("window", 1500)])
def test_shortfall_gives_the_counts(place: Place, policy: str, needed: int) -> None:
    have = len(ids_of(TALE))
    with pytest.raises(PalimpsestError) as caught:
        place.run(**TXT, evaluation_windows=100, special_tokens=policy)
    message = str(caught.value)
    for part in ("evaluation: 100 windows of 16 tokens", f"need {needed:,} tokens", f"has {have:,} in 1 documents", "tale.txt"):
        assert part in message
    assert "tokens.evaluation_windows or tokens.length" in message
    assert "tokens.evaluation_files" in message
    assert not (place.data / "tokens.safetensors").exists()


def test_reading_stops_at_the_pool(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.corpus.encode.join_documents", partial(join_documents, size=500))
    place.write("endless.jsonl", f'{{"text": "{"z" * 1000}"}}\n' * 3 + "not json\n")
    files: dict[str, Any] = {"calibration_files": ["endless.jsonl"], "evaluation_files": ["tale.txt"]}
    assert place.run(**files, pool=2000).metadata["calibration"]["corpus_documents"] == 2
    with pytest.raises(PalimpsestError, match="line 4: not JSON"):
        place.run(**files, pool=4000)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", r"empty\.txt is empty"),
        ("latin.txt", "caf\u00e9 ".encode("latin-1") * 90, r"latin\.txt: not UTF-8 \(byte 3\)"),
        ("rows.jsonl", b'{"text": "ab"}\n{"text": \n', r"rows\.jsonl, line 2: not JSON"),
        ("rows.jsonl", b'{"text": "ab"}\n{"body": "ab", "id": 3}\n', r"line 2: no field 'text' \(it has body, id\)"),
        ("rows.jsonl", b'{"text": null}\n', r"line 1: field 'text' holds null instead of text"),
        ("rows.jsonl", b'["ab"]\n', r"line 1: expected an object .* found list"),
        ("rows.jsonl", b'{"text": "\xff"}\n', r"line 1: not UTF-8"),
        ("rows.parquet", b"PAR1 and no more", r"rows\.parquet: not a whole parquet file"),
        ("rows.csv", b"text\nab\n", r"rows\.csv: only \.txt, \.jsonl, \.parquet are read"),
        ("blank.txt", b" \n\n ", r"has 0 in 0 documents \(1 blank ones left out\)"),
    ],
)  # fmt: skip
def test_bad_files_are_named(place: Place, name: str, content: bytes, message: str) -> None:
    place.write(name, content)
    with pytest.raises(PalimpsestError, match=message):
        place.run(calibration_files=["story.txt"], evaluation_files=[name])


def test_bad_parquet_columns_and_rows_are_named(place: Place) -> None:
    parquet.write_table(table({"body": ["ab"]}), place.corpus / "rows.parquet")
    with pytest.raises(PalimpsestError, match=r"rows\.parquet: no column 'text' \(it has body\)"):
        place.run(calibration_files=["story.txt"], evaluation_files=["rows.parquet"])
    parquet.write_table(table({"text": ["ab", None]}), place.corpus / "rows.parquet")
    with pytest.raises(PalimpsestError, match=r"rows\.parquet, row 2: field 'text' holds null"):
        place.run(calibration_files=["story.txt"], evaluation_files=["rows.parquet"])


def test_missing_file(place: Place) -> None:
    with pytest.raises(PalimpsestError, match=r"tokens\.evaluation_files: no file gone\.txt"):
        place.run(calibration_files=["story.txt"], evaluation_files=["gone.txt"])


def test_same_text_for_both_is_refused_even_under_another_name(place: Place) -> None:
    place.write("copy.txt", STORY)
    with pytest.raises(PalimpsestError, match=r"copy\.txt has the same bytes as story\.txt"):
        place.run(calibration_files=["story.txt"], evaluation_files=["tale.txt", "copy.txt"])


def test_shared_documents_are_counted_and_said(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    for name, own in (("one", STORY), ("two", TALE)):
        place.write(f"{name}.jsonl", "".join(json.dumps({"text": row}) + "\n" for row in (own, "both have this")))
    tokens = place.run(calibration_files=["one.jsonl"], evaluation_files=["two.jsonl"])
    assert tokens.metadata["shared_documents"] == 1
    assert "1 documents stand in both" in capsys.readouterr().out


def test_length_beyond_the_model_is_refused(place: Place) -> None:
    with pytest.raises(PalimpsestError, match=r"tokens\.length = 65: this model reads 64 tokens at most"):
        place.run(**TXT, length=65)


def test_foreign_tokenizer_is_refused(place: Place) -> None:
    config = place.data / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "vocab_size": 30}))
    with pytest.raises(PalimpsestError, match=r"the model has 30 embeddings; the tokenizer belongs to another model"):
        place.run(**TXT)


def test_changed_checkpoint_is_noticed(place: Place) -> None:
    (place.data / "model" / "manifest.json").write_text(
        json.dumps({"folder": ".", "files": [{"name": "config.json", "bytes": 1}]})
    )
    with pytest.raises(PalimpsestError, match=f"the checkpoint changed since stage 'model' ran; {AGAIN}"):
        place.run(**TXT)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"source": "files"}, "needs calibration_files and evaluation_files"),
        ({"source": "hub"}, "needs dataset"),
        ({"calibration_split": "test"}, "both 'test'"),
        ({"calibration_windows": 5000}, "more than pool"),
        ({"special_tokens": "all"}, "tokens.special_tokens = 'all'"),
    ],
)
def test_keys_that_do_not_go_together_are_refused_before_any_work(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        check_sections({"tokens": keys}, {"tokens": Tokens})


HUB: dict[str, Any] = {"source": "hub", "dataset": "../sets/stories"}


@pytest.fixture
def stories(place: Place) -> Path:
    folder = place.data.parent.parent / "sets" / "stories"
    folder.mkdir(parents=True)
    for split, text in (("train", STORY), ("test", TALE)):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in text.split("\n")))
    return folder


def test_data_set_in_a_local_folder(place: Place, stories: Path) -> None:
    tokens = place.run(**HUB, sampling="first", separator="\n")
    assert tokens.read("calibration").flatten().tolist() == ids_of(STORY.strip())[: 3 * 16]
    assert tokens.read("evaluation").flatten().tolist() == ids_of(TALE.strip())[: 2 * 16]
    assert tokens.metadata["evaluation"]["corpus"] == "stories (test)"
    assert str(stories.parent) not in json.dumps(tokens.metadata)


def test_data_set_without_the_split_or_the_field(place: Place, stories: Path) -> None:
    with pytest.raises(PalimpsestError, match=r"split 'validation'\) cannot be read .*check tokens\.dataset"):
        place.run(**HUB, evaluation_split="validation")
    with pytest.raises(PalimpsestError, match=r"train, row 1: no field 'body' \(it has text\); set field"):
        place.run(**HUB, field="body")


def test_data_set_of_the_hub_is_streamed_at_its_commit(place: Place, stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve({"someone/stories": stories}) as address:
        use_hub(monkeypatch, address, place.data.parent / "cache")
        tokens = place.run(source="hub", dataset="someone/stories", sampling="first", separator="\n")
        assert tokens.read("evaluation").flatten().tolist() == ids_of(TALE.strip())[: 2 * 16]
        about = tokens.metadata["evaluation"]
        assert (about["corpus"], about["corpus_revision"]) == ("someone/stories (test)", COMMIT)
        for keys, match in (
            ({"dataset": "someone/gone"}, "someone/gone: no such data set on the hub, or private; check tokens.dataset"),
            ({"dataset": "someone/stories", "revision": "v9"}, "no revision 'v9' on the hub; check tokens.revision"),
        ):
            with pytest.raises(PalimpsestError, match=match):
                place.run(source="hub", **keys)


def test_data_set_without_network(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    use_hub(monkeypatch, CLOSED, place.data.parent / "cache")
    with pytest.raises(
        PalimpsestError, match=r"nobody/nothing .*cannot be read .*run this where there is network.*tokens\.source: files"
    ):
        place.run(source="hub", dataset="nobody/nothing")


def test_a_published_rule_on_rows(place: Place) -> None:
    """Blank rows kept, joined by a blank line, encoded in one go with what the tokenizer adds: as Wanda's code does."""
    rows = ["one fox.", "", " two cats.", "the end of it all, and more than that, and then some"]
    place.write("rows.jsonl", "".join(json.dumps({"text": row}) + "\n" for row in rows))
    small: dict[str, Any] = {"window": 12, "stride": 12}
    custom = Contract(special_tokens="text", blank="kept", **small)
    assert custom == READY["wanda"].model_copy(update=small)
    keys: dict[str, Any] = {"calibration_files": ["story.txt"], "evaluation_files": ["rows.jsonl"], "contract": "custom"}
    tokens = place.run(**keys, custom=custom)
    text = [BOS, *ids_of("\n\n".join(rows))]
    whole = len(text) // 12
    assert tokens.read("evaluation").tolist() == np.reshape(text[: 12 * whole], (-1, 12)).tolist()
    assert "scored" not in tokens
    about = tokens.metadata["evaluation"]
    assert {key: about[key] for key in ("contract", "split", "join", "blank_documents", "special_tokens")} == {
        "contract": "custom", "split": "rows.jsonl", "join": r"'\n\n'", "blank_documents": "kept", "special_tokens": "text",
    }  # fmt: skip
    overlapping = place.run(**keys, custom=Contract(window=8, stride=4, words=5, special_tokens="text", rest="kept"))
    words = [BOS, *ids_of("one fox. two cats. the")]
    assert overlapping.read("evaluation")[0].tolist() == words[:8]
    assert int(overlapping.read("scored").sum()) == len(words) - 1
    assert overlapping.read("calibration").equal(tokens.read("calibration")), "calibration has its own windows"


def test_contracts_that_cannot_be_kept(place: Place) -> None:
    with pytest.raises(PalimpsestError, match=r"tokens\.contract 'wanda' = 2048: this model reads 64 tokens at most"):
        place.run(**TXT, contract="wanda")
    with pytest.raises(PalimpsestError, match=r"scores all of the text, and 'tale\.txt' has more than the 60 tokens"):
        place.run(**TXT, contract="custom", custom=Contract(window=8, stride=8), pool=60)
    with pytest.raises(
        PalimpsestError, match=r"900 windows of 8 tokens need 7,200 .*lower what tokens\.contract 'custom' asks for"
    ):
        place.run(**TXT, contract="custom", custom=Contract(window=8, stride=8, windows=900))


def test_what_a_text_is_published_with_is_said(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(READY, "no_free_swap", READY["no_free_swap"].model_copy(update={"window": 16, "stride": 8}))
    place.run(**TXT, contract="no_free_swap")
    assert "published for WikiText-2 raw, test; here it is applied to 'tale.txt'" in capsys.readouterr().out

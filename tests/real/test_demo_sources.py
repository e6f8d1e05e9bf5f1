"""The demo's model and text as the package index serves them, with what is known of both."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.files import Files
from pipeline.tensors import TensorFile
from stages.corpus.demo import SPLITS, read_demo
from stages.decoder.checkpoint import Checkpoint
from stages.model import Model
from stages.model import Params as ModelParams
from stages.model.run import run as run_model
from stages.tokens import Params as TokensParams
from stages.tokens import Tokens
from stages.tokens.run import run as run_tokens

KEPT = Path(__file__).parents[2] / "data" / "demo"  # what `dvc repro` fetched; its hashes are checked like any other's

TOKENS = Tokens(length=512, calibration_windows=24, evaluation_windows=16)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project in which both stages have run on the demo."""
    root = tmp_path_factory.mktemp("project")
    (root / "data" / "corpus").mkdir(parents=True)
    if KEPT.is_dir():
        (root / "data" / "demo").symlink_to(KEPT)
    run_model(ModelParams(model=Model()), Files("model", "deps", (), root), Files("model", "outs", ("model",), root))
    outputs = Files("tokens", "outs", ("tokens.safetensors",), root)
    run_tokens(TokensParams(tokens=TOKENS), Files("tokens", "deps", ("model", "corpus"), root), outputs)
    return root


def test_model_is_the_known_one(root: Path) -> None:
    checkpoint = Checkpoint(root / "data" / "model")
    config = checkpoint.config
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_attention_heads, config.num_key_value_heads, config.tie_word_embeddings) == (9, 3, True)
    assert sum(math.prod(shape) for shape, _ in checkpoint.specs.values()) == 134_515_008
    assert "lm_head.weight" not in checkpoint
    assert {dtype for _, dtype in checkpoint.specs.values()} == {torch.bfloat16}
    linears = [name for name in checkpoint.names() if name.endswith("_proj.weight")]
    zeros = sum(int((checkpoint.read(name) == 0).sum()) for name in linears)
    assert (len(linears), zeros) == (210, 33_483)  # zero before any pruning


def test_tokenizer_cuts_digits_one_by_one_and_reads_back(root: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(root / "data" / "model")
    assert [piece.strip("\u0120") for piece in tokenizer.tokenize("In 1984 or 2048")] == ["In", "", *"1984", "or", "", *"2048"]
    text = "Na\u00efve caf\u00e9: 12,5% \u2192 \u03b1\n\nend."
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


def test_text_is_split_by_article(root: Path) -> None:
    corpus = [
        read_demo(Tokens(calibration_split=one, evaluation_split=other), root / "data")
        for one, other in (("train", "valid"), ("test", "train"))
    ]
    train, valid, test = (set(split.documents) for split in (corpus[0].calibration, corpus[0].evaluation, corpus[1].calibration))
    assert set(SPLITS) == {"train", "valid", "test"}
    assert (len(train), len(valid), len(test)) == (64, 16, 15)
    assert not train & valid
    assert not train & test
    assert not valid & test
    assert 2.4e6 < sum(map(len, train | valid | test)) < 2.7e6
    prose = "\n".join(train | valid | test)
    assert not any(mark in prose for mark in ("{{", "}}", "[[", "]]", "<ref", "== ", "'''", "thumb|"))


def test_windows_hold_the_splits_own_text(root: Path) -> None:
    tokens = TensorFile(root / "data" / "tokens.safetensors")
    assert (tokens.shape("calibration"), tokens.shape("evaluation")) == ((24, 512), (16, 512))
    about = tokens.metadata["evaluation"]
    assert about["corpus"] == "English Wikipedia, excerpt (test)"
    assert tokens.metadata["calibration"]["corpus_tokens"] == pytest.approx(374_000, rel=0.02)
    assert about["corpus_tokens"] == pytest.approx(90_000, rel=0.02)
    tokenizer = AutoTokenizer.from_pretrained(root / "data" / "model")
    first = list(read_demo(Tokens(), root / "data").evaluation.documents)[0]
    assert first.startswith(tokenizer.decode(tokens.read("evaluation")[0]))


def test_perplexity_of_a_few_windows_is_that_of_a_working_model(root: Path) -> None:
    ids = TensorFile(root / "data" / "tokens.safetensors").read("evaluation")[:2].long()
    model = AutoModelForCausalLM.from_pretrained(root / "data" / "model", dtype=torch.float32)
    with torch.inference_mode():
        perplexity = math.exp(model(ids, labels=ids).loss.item())
    assert 12 < perplexity < 35  # a wrong rotation of the heads, or a wrong tokenizer, gives hundreds

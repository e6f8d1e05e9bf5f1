"""Train a small decoder on the corpus and keep checkpoints, each an ordinary folder that plain transformers loads."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from pipeline.artifacts import write_json, write_table
from pipeline.console import plan, say
from pipeline.files import Files
from stages.corpus.read import read_corpus
from stages.decoder.compute import Compute
from stages.training import Params, Training
from stages.training.gpt2 import gpt2
from stages.training.llama import llama
from stages.training.series import build, deployed, mean_loss, optimiser_of, train_epoch
from stages.training.state import Rows, fingerprint, load_state, save_state
from stages.training.windows import Data, read_data

METHODS: dict[str, Callable[[Training, dict[str, Any]], Any]] = {"llama": llama, "gpt2": gpt2}
COLUMNS = ["epoch", "step", "train_loss", "test_loss", "batch_loss"]
STATE = "state.safetensors"


def run(params: Params, inputs: Files, outputs: Files) -> None:
    """Fill `training/`: `epoch-NNNN/` for each checkpoint, `losses.csv` with a row for each, `training.json`.

    `train_loss` and `test_loss` are of the stored weights, in nats per token over all windows; `batch_loss` is the mean over the
    epoch's batches while it was trained. With method none there are no rows and no folders.
    """
    training, out = params.training, outputs["training"]
    partial = out.with_name(f".{out.name}.partial")  # stays if the training is killed, and the next run goes on from it
    if training.method == "none":
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        finish(partial, out, [], {"method": "none", "checkpoints": []})
        return
    data = read_data(training, read_corpus(training, inputs["corpus"].parent))
    rows = train(training, METHODS[training.method](training, data.ids), data, partial)
    about = {"method": training.method, "checkpoints": sorted(training.checkpoints), "grid": training.grid}
    about |= {"matrices": training.matrices, "tokens": data.train.numel(), "test_tokens": data.test.numel()}
    finish(partial, out, rows, about)


def train(training: Training, config: Any, data: Data, folder: Path) -> Rows:
    """Run all epochs, or those that a killed run left, and fill `folder` with the checkpoints. Returns the rows of losses."""
    device = Compute(device=training.device).resolve_device()
    model = build(config, training).to(device)
    size = 4 * sum(p.numel() for p in model.parameters())
    logits = 4 * training.batch_windows * training.length * len(data.tokenizer)
    kept = sorted(training.checkpoints)
    plan(6 * size + 4 * logits, (len(kept) + 3) * size, folder.parent, "training.batch_windows", "training.checkpoints (fewer)")
    optimiser = optimiser_of(model, training)
    of = fingerprint(training.model_dump(exclude={"device"}), data.train, data.test)
    done, rows = load_state(folder / STATE, model, optimiser, of)
    if done:
        say(f"going on behind epoch {done}, where a former run was stopped")
    else:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if 0 in kept:
            rows.append(keep(model, 0, None, training, data, folder))
    say(f"{size // 4:,} parameters, {training.epochs} epochs of {training.steps} steps")
    for epoch in range(done, training.epochs):
        batch_loss = train_epoch(model, optimiser, data.train, training, epoch)
        if epoch + 1 in kept:
            rows.append(keep(model, epoch + 1, batch_loss, training, data, folder))
        else:
            say(f"epoch {epoch + 1}: {batch_loss:.3f} nats per token while trained")
        save_state(folder / STATE, model, optimiser, epoch + 1, rows, of)
    return rows


def keep(model: Any, epoch: int, batch_loss: float | None, training: Training, data: Data, folder: Path) -> dict[str, Any]:
    """Write the checkpoint and measure what was written. Returns its row of losses."""
    stored: Any = deployed(model)
    save_checkpoint(stored, data.tokenizer, folder / checkpoint_name(epoch))
    train_loss, test_loss = (mean_loss(stored, ids, training.batch_windows) for ids in (data.train, data.test))
    say(f"epoch {epoch}: {train_loss:.3f} nats per token of the training text, {test_loss:.3f} of the test text; kept")
    losses = {"train_loss": train_loss, "test_loss": test_loss, "batch_loss": batch_loss}
    return {"epoch": epoch, "step": epoch * training.steps, **losses}


def save_checkpoint(model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Config, weights and tokenizer, as transformers writes them."""
    shutil.rmtree(folder, ignore_errors=True)
    transformers_logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def checkpoint_name(epoch: int) -> str:
    """The folder of the checkpoint behind `epoch` epochs."""
    return f"epoch-{epoch:04d}"


def finish(partial: Path, out: Path, rows: Rows, about: dict[str, Any]) -> None:
    """Make the finished folder take its place."""
    write_table(partial / "losses.csv", pd.DataFrame(rows, columns=COLUMNS))
    write_json(partial / "training.json", about)
    (partial / STATE).unlink(missing_ok=True)
    shutil.rmtree(out, ignore_errors=True)
    partial.replace(out)

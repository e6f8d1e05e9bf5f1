"""The model as lm-eval asks it: its interface for language models, answered block by block."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

from lm_eval.api.model import TemplateLM
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from pipeline.errors import PalimpsestError
from stages.decoder.checkpoint import Checkpoint
from stages.decoder.variant import Variant
from stages.zeroshot.scoring import Request, loglikelihoods

UNBOUNDED = 2048  # tokens read at once where neither the model nor its tokenizer names a limit, as lm-eval has it


class StreamedLM(TemplateLM):
    """Tokenises as lm-eval's own `hf` model does, so that both give the same numbers; scores all requests in one sweep."""

    def __init__(self, variant: Variant, batch_size: int, batch_tokens: int, folder: Path):
        """`folder`: where scratch files lie."""
        super().__init__()
        self.variant, self.batch_size, self.batch_tokens, self.folder = variant, batch_size, batch_tokens, folder
        self.tokenizer: Any = load_tokenizer(variant.decoder.checkpoint)
        self.max_length = _max_length(variant.decoder.checkpoint, self.tokenizer)
        self.truncated = 0  # requests of which the beginning was left out, so far

    @property
    def eot_token_id(self) -> int:
        """The end of a text."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before a continuation without context: BOS, or where there is none EOS."""
        return self.eot_token_id if self.tokenizer.bos_token_id is None else self.tokenizer.bos_token_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids, with the special tokens that the tokenizer adds by itself, unless the text begins with BOS or it is told."""
        prefix = self.prefix_token_id
        if add_special_tokens is None and prefix is not None and string.startswith(self.tokenizer.decode(prefix)):
            add_special_tokens = False
        return self.tokenizer.encode(string, **({} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}))

    def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """For each (context, continuation): log-likelihood in nats, and whether greedy decoding would give it."""
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        asked = []
        for (_, text), context, continuation in requests:
            if not 0 < len(continuation) <= self.max_length:
                raise PalimpsestError(
                    f"zeroshot.tasks: an answer of {len(continuation)} tokens ({text[:40]!r}), where this model can score "
                    f"from 1 to {self.max_length}"
                )
            left = max(len(context) + len(continuation) - self.max_length - 1, 0)
            self.truncated += left > 0
            asked.append(Request(tuple(context[left:]), tuple(continuation)))
        return loglikelihoods(self.variant, asked, self.max_length, self.batch_size, self.batch_tokens, self.folder)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> NoReturn:
        """Not answered: perplexity is stage `evaluation`'s."""
        raise PalimpsestError("zeroshot.tasks: the likelihood of a whole text is not scored here; see tokens.contract")

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> NoReturn:
        """Not answered: nothing is generated here."""
        raise PalimpsestError("zeroshot.tasks: tasks that generate text are not run here")


def load_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    """The model's own tokenizer. Raises PalimpsestError if transformers cannot read it."""
    try:
        return AutoTokenizer.from_pretrained(checkpoint.folder, trust_remote_code=checkpoint.trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).strip().split("\n")[0][:200]
        raise PalimpsestError(f"{checkpoint.folder}: transformers cannot read the tokenizer ({reason})") from None


def _max_length(checkpoint: Checkpoint, tokenizer: Any) -> int:
    """Tokens that the model reads at once, by its configuration, else by its tokenizer."""
    config = checkpoint.config.get_text_config()
    for name in ("n_positions", "max_position_embeddings", "n_ctx"):
        if getattr(config, name, None) is not None:
            return int(getattr(config, name))
    length = tokenizer.model_max_length
    return int(length) if length < 1 << 40 else UNBOUNDED

"""Measures the models of the demo on a CPU, beside the teacher under windows with as many bytes as the student."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from deltanet_convert.select.units import evenly
from deltanet_hf.data import shipped_texts
from deltanet_hf.evaluation.free_policies import WindowPolicy, window_of_bytes
from deltanet_hf.evaluation.measures.scores import Score, mean_score
from deltanet_hf.evaluation.measures.sequence_bytes import sequence_bytes
from deltanet_hf.evaluation.measures.text_scores import token_divergences, token_losses
from deltanet_hf.models.layers import SOFTMAX
from deltanet_hf.safe_write import write_atomically

LENGTH, BLOCK = 2048, 128  # tokens of running text; tokens whose mean divergence is one sample
PASSAGE, BETWEEN, PASSAGES = 128, 768, 2  # a passage, other text that is longer than the windows, the passage again
PART = 32  # tokens of a repeated passage whose mean loss is one sample


@dataclass(frozen=True)
class Row:
    """A line of the demo's table.

    Attributes:
        megabytes: MB of a sequence of 2,048 tokens.
        kl: KL to the teacher on running text, nats per token, and its standard error.
        repeat: mean loss in nats per token of a passage that occurred 896 tokens before, and its standard error.
    """

    name: str
    megabytes: float
    kl: tuple[float, float]
    repeat: tuple[float, float]


class DemoMeasure:
    """Measures models on the end of the shipped text, which conversion and alignment do not read.

    Args:
        folder: of the teacher.
        kept: file for the rows, so that a run that was interrupted need not measure them again.
        say: shows a line for each row that was measured.
    """

    def __init__(self, folder: Path, kept: Path, say: Callable[[str], None]) -> None:
        self.teacher = _load(folder)
        self.kept, self._say = kept, say
        self.rows = [_row(values) for values in json.loads(kept.read_text())] if kept.exists() else []
        text = shipped_texts()[-1].read_text(encoding="utf-8")
        ids = torch.tensor(AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False)["input_ids"])
        self.running = ids[-LENGTH:].unsqueeze(0)
        parts = ids[-2 * LENGTH : -LENGTH][: PASSAGES * (PASSAGE + BETWEEN)].view(PASSAGES, -1)
        self.repeats = torch.cat([parts, parts[:, :PASSAGE]], dim=1)
        with torch.inference_mode():
            self.hidden = self.teacher.model(self.running, use_cache=False).last_hidden_state

    def student(self, name: str, folder: Path) -> Row:
        """The row of a model in a folder."""

        def load() -> tuple[PreTrainedModel, ...]:
            model = _load(folder)
            return model, _narrow(model)

        return self._once(name, load)

    def policies(self, kept: list[int], megabytes: float) -> list[Row]:
        """The rows of the teacher, and of the teacher under windows of equal bytes.

        Args:
            kept: the student's softmax layers.
            megabytes: the student's memory of a sequence of 2,048 tokens.
        """
        narrow = _narrow(self.teacher)
        rows = [self._once("teacher", lambda: (self.teacher, narrow))]
        spread = [layer for (layer,) in evenly([(i,) for i in range(len(self.teacher.model.layers))], len(kept))]
        for layers, where in (([], "all layers"), (spread, f"all but {len(kept)} evenly spread layers"), (kept, "")):
            with _without_softmax_arithmetic():
                found = window_of_bytes(narrow, layers, round(megabytes * 1e6), LENGTH)
            assert found is not None
            name = f"free: window of {found.window} in {where or f'all but the {len(kept)} chosen layers'}"
            rows.append(self._once(name, partial(_both, found, self.teacher, narrow)))
        return rows

    def _once(self, name: str, load: Callable[[], tuple[PreTrainedModel, ...]]) -> Row:
        """The row of this name; measured unless there is one.

        Args:
            load: makes the model, and a small model whose caches have the same sizes.
        """
        for row in self.rows:
            if row.name == name:
                return row
        model, narrow = load()
        kl, repeat = self._divergence(model), self._repeat(model)
        with _without_softmax_arithmetic():
            size = sequence_bytes(narrow, LENGTH) / 1e6
        row = Row(name, size, (kl.value, kl.stderr), (repeat.value, repeat.stderr))
        self._say(f"{name}: KL {row.kl[0]:.3f}")
        self.rows.append(row)
        write_atomically(self.kept, json.dumps([asdict(row) for row in self.rows], indent=1).encode())
        return row

    @torch.inference_mode()
    def _divergence(self, model: PreTrainedModel) -> Score:
        own = self.hidden if model is self.teacher else model.model(self.running, use_cache=False).last_hidden_state
        samples = []
        for wanted, found in zip(self.hidden.split(BLOCK, dim=1), own.split(BLOCK, dim=1), strict=True):
            # The logits of all tokens at once would take gigabytes.
            samples.append(float(token_divergences(self.teacher.lm_head(wanted), model.lm_head(found)).mean()))
        return mean_score(samples)

    @torch.inference_mode()
    def _repeat(self, model: PreTrainedModel) -> Score:
        samples: list[float] = []
        for ids in self.repeats.split(1):
            logits = model(ids, use_cache=False, logits_to_keep=PASSAGE + 1).logits[:, :-1]
            samples += token_losses(logits, ids[:, -PASSAGE:]).view(-1, PART).mean(1).tolist()
        return mean_score(samples)


def softmax_layers(folder: Path) -> list[int]:
    """The layers of a converted model that keep softmax attention."""
    layers = json.loads((folder / "config.json").read_text())["deltanet"]["layers"]
    return [index for index, kind in enumerate(layers) if kind == SOFTMAX]


def perplexity(loss: tuple[float, float]) -> tuple[float, float]:
    """Perplexity and its standard error from a mean loss and its error."""
    value = math.exp(loss[0])
    return value, value * loss[1]


def _load(folder: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    return model.eval()


def _both(policy: WindowPolicy, *models: PreTrainedModel) -> tuple[PreTrainedModel, ...]:
    return tuple(policy.apply(model) for model in models)


@contextmanager
def _without_softmax_arithmetic() -> Iterator[None]:
    """Softmax attention gives zeros: what caches hold has the same size, and eighteen passes cost next to nothing."""

    def zeros(module: object, query: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, None]:
        return torch.zeros_like(query.transpose(1, 2)), None

    ALL_ATTENTION_FUNCTIONS["sdpa"] = zeros
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]  # transformers' own is there again


def _narrow(model: PreTrainedModel) -> PreTrainedModel:
    """A random bfloat16 model with the same attention heads and little else, whose caches have the same sizes."""
    config = copy.deepcopy(model.config)
    config.hidden_size, config.intermediate_size, config.vocab_size = 8, 8, 8
    config.pad_token_id = config.bos_token_id = config.eos_token_id = None
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()


def _row(values: dict[str, object]) -> Row:
    numbers = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    return Row(**numbers)  # type: ignore[arg-type]

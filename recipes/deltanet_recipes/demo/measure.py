"""Measures the models of the demo on a CPU, and what the teacher gives for the bytes without any training."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from deltanet_convert.select.units import evenly
from deltanet_hf.data import shipped_texts
from deltanet_hf.evaluation.measures.measure import Settings, Text, measure
from deltanet_hf.evaluation.training_free import WindowPolicy, longest_window
from deltanet_hf.journal import Journal, file_states
from deltanet_hf.models.cache_bits import cache_bits_of, set_cache_bits, stored_bytes
from deltanet_hf.models.layers import SOFTMAX

LENGTH, BLOCK = 2048, 128  # tokens of running text; tokens whose mean divergence is one sample
FAR = 32768  # tokens of the longer sequence whose memory is shown
PASSAGE, BETWEEN, PASSAGES = 128, 768, 2  # a passage, other text that is longer than the windows, the passage again
BITS = 4  # of the students' caches and of those of the untrained rows
PART = 32  # tokens of a repeated passage whose mean loss is one sample


@dataclass(frozen=True)
class Row:
    """A line of the demo's table.

    Attributes:
        megabytes: MB of a sequence of 2,048 tokens, and of one of 32,768.
        kl: KL to the teacher on running text, nats per token, and its standard error.
        repeat: mean loss in nats per token of a passage that occurred 896 tokens before, and its standard error.
    """

    name: str
    megabytes: tuple[float, float]
    kl: tuple[float, float]
    repeat: tuple[float, float]


class DemoMeasure:
    """Measures models on the end of the shipped text, which conversion and alignment do not read.

    Args:
        folder: of the teacher.
        students: name -> folder of the models to compare with it.
        kept: journal of the rows, so that a run that was interrupted need not measure them again.
        say: shows a line for each row that was measured.

    Raises UserError if `kept` has rows of other models.
    """

    def __init__(self, folder: Path, students: dict[str, Path], kept: Path, say: Callable[[str], None]) -> None:
        self.teacher, self._students, self._say = _load(folder), students, say
        request = {name: file_states(path) for name, path in {"teacher": folder, **students}.items()}
        self._journal = Journal(kept, "measurements", "delete it")
        if not self._journal.resume(request):
            self._journal.begin(request)
        text = shipped_texts()[-1].read_text(encoding="utf-8")
        ids = torch.tensor(AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False)["input_ids"])
        running = ids[-LENGTH:].unsqueeze(0)
        parts = ids[-2 * LENGTH : -LENGTH][: PASSAGES * (PASSAGE + BETWEEN)].view(PASSAGES, -1)
        repeats = torch.cat([parts, parts[:, :PASSAGE]], dim=1)
        texts = {"running": Text(running, block=BLOCK), "repeat": Text(repeats, PASSAGE, PART, compared=False)}
        with torch.inference_mode():
            hidden = self.teacher.model(running, use_cache=False).last_hidden_state

        def teacher(ids: Tensor, use_cache: bool, logits_to_keep: Tensor) -> Any:
            """The teacher on the running text, which it reads once for all rows."""
            return SimpleNamespace(logits=self.teacher.lm_head(hidden[:, logits_to_keep]))

        self._settings = Settings(texts, teacher)

    def student(self, name: str) -> Row:
        """The row of a student."""
        return self._once(name, partial(_load, self._students[name]))

    def baselines(self, kept: list[int], megabytes: float) -> list[Row]:
        """The rows of the teacher, of the teacher with a cache in fewer bits, and of the teacher under windows.

        Args:
            kept: the student's softmax layers.
            megabytes: the student's memory of a sequence of 2,048 tokens, which no window exceeds.
        """
        narrow = _narrow(self.teacher)
        rows = [self._once("teacher", lambda: self.teacher)]
        rows.append(self._once(f"teacher, cache in {BITS} bits", partial(self._under, WindowPolicy((), None))))
        spread = [layer for (layer,) in evenly([(i,) for i in range(len(self.teacher.model.layers))], len(kept))]
        for layers, where in (([], "all layers"), (spread, f"all but {len(kept)} evenly spread layers"), (kept, "")):
            window = longest_window(narrow, layers, round(megabytes * 1e6), LENGTH, BITS)
            assert window is not None
            name = f"untrained: window of {window} in {where or f'all but the {len(kept)} chosen layers'}"
            rows.append(self._once(name, partial(self._under, WindowPolicy(tuple(layers), window))))
        return rows

    def _under(self, policy: WindowPolicy) -> PreTrainedModel:
        return set_cache_bits(policy.apply(self.teacher), BITS)

    def _once(self, name: str, load: Callable[[], PreTrainedModel]) -> Row:
        """The row of this name; measured unless there is one."""
        if name in self._journal.steps:
            return _row(self._journal.steps[name])
        model = load()
        clusters, bits = measure(model, self._settings).clusters, cache_bits_of(model)
        near, far = (stored_bytes(model, tokens, bits, torch.bfloat16) / 1e6 for tokens in (LENGTH, FAR))
        kl, repeat = clusters["kl_running"].score, clusters["loss_repeat"].score
        row = Row(name, (near, far), (kl.value, kl.stderr), (repeat.value, repeat.stderr))
        self._say(f"{name}: KL {row.kl[0]:.3f}")
        self._journal.done(name, asdict(row))
        return row


def softmax_layers(folder: Path) -> list[int]:
    """The layers of a converted model that keep softmax attention."""
    layers = json.loads((folder / "config.json").read_text())["deltanet"]["layers"]
    return [index for index, kind in enumerate(layers) if kind == SOFTMAX]


def _load(folder: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    return model.eval()


def _narrow(model: PreTrainedModel) -> PreTrainedModel:
    """A random bfloat16 model with the same attention heads and little else, which is quickly copied."""
    config = copy.deepcopy(model.config)
    config.hidden_size, config.intermediate_size, config.vocab_size = 8, 8, 8
    config.pad_token_id = config.bos_token_id = config.eos_token_id = None
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()


def _row(values: dict[str, object]) -> Row:
    numbers = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    return Row(**numbers)  # type: ignore[arg-type]

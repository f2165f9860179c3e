"""The models that the demo compares, without any training: what they take, what they answer, how far they are."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from deltanet_hf.data import shipped_texts
from deltanet_hf.evaluation.baselines import switch_off_state
from deltanet_hf.evaluation.measures.measure import Settings, Text, measure
from deltanet_hf.evaluation.measures.relative import Clusters
from deltanet_hf.evaluation.training_free import SINKS, longest_window
from deltanet_hf.models.cache_bits import cache_bits_of, set_cache_bits, stored_bytes
from deltanet_hf.models.layers import LayerTable
from deltanet_hf.models.restrict import restrict_to_window

CONTEXTS = tuple(1 << power for power in range(10, 16))  # tokens of the sequences whose memory is shown
EQUAL_AT = 2048  # tokens of the sequence in which windows take as many bytes as the converted model
ASKED, AFTER = 1500, 300  # tokens of the text with a question at its end, and of the text before the fact
FACT, QUESTION = " The code of the safe is 4071.", " The code of the safe is"
ANSWER = 8  # tokens
LENGTH, BLOCK = 3072, 256  # tokens of running text; tokens whose mean divergence is one sample
SHORT = 65  # tokens of windows that leave nearly all of a text to the states
TEACHER, CONVERTED = "teacher", "converted"
SHORTENED = f"{CONVERTED}, windows of {SHORT}"
STATELESS = f"{SHORTENED}, states off"


class DemoMeasure:
    """The models, and the end of the shipped text, which conversion does not read.

    Args:
        teacher, converted: folders.

    Attributes:
        models: what loads the teacher, the teacher with windows of as many bytes as the converted model, that model,
            and the same with short windows; each is in memory only while it is measured.
    """

    def __init__(self, teacher: Path, converted: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(teacher)
        self._ids = torch.tensor(self._encoded(shipped_texts()[-1].read_text(encoding="utf-8")))
        student = _load(converted)
        bits, config = cache_bits_of(student), copy.deepcopy(student.config)
        narrow = _narrow(AutoConfig.from_pretrained(teacher))
        window = longest_window(narrow, (), _bytes(student, EQUAL_AT), EQUAL_AT, bits)
        assert window is not None
        config.deltanet = LayerTable.of(config).with_windows([SHORT] * config.num_hidden_layers).to_dict()
        self.models: dict[str, Callable[[], Any]] = {
            TEACHER: partial(_load, teacher),
            f"windows of {window:,}": lambda: set_cache_bits(restrict_to_window(_load(teacher), window, SINKS), bits),
            CONVERTED: partial(_load, converted),
            SHORTENED: partial(_load, converted, config=config),
        }

    def megabytes(self, name: str) -> list[float]:
        """MB of a sequence of each of `CONTEXTS`, from the layout."""
        model = self.models[name]()
        return [_bytes(model, tokens) / 1e6 for tokens in CONTEXTS]

    @torch.inference_mode()
    def answer(self, name: str) -> str:
        """The greedy continuation of `question()`."""
        ids = self.question()
        made = self.models[name]().generate(ids, max_new_tokens=ANSWER, do_sample=False)
        return " ".join(self.tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True).split())

    def question(self) -> Tensor:
        """Token ids [1, ASKED]: running text with a fact in it, and the beginning of the fact at the end."""
        fact, question = self._encoded(FACT), self._encoded(QUESTION)
        text = self._ids[-(ASKED - len(fact) - len(question)) :].tolist()
        return torch.tensor([text[:AFTER] + fact + text[AFTER:] + question])

    def divergences(self) -> Iterator[tuple[str, Clusters]]:
        """KL to the teacher on running text in nats per token: of the others, and of the last with its states off."""
        running = self._ids[-LENGTH:].unsqueeze(0)
        with torch.inference_mode():
            loaded = self.models[TEACHER]()
            hidden, head = loaded.model(running, use_cache=False).last_hidden_state, loaded.lm_head
            del loaded

        def teacher(ids: Tensor, use_cache: bool, logits_to_keep: Tensor) -> Any:
            """The teacher on the running text, which it reads once for all models."""
            return SimpleNamespace(logits=head(hidden[:, logits_to_keep]))

        settings = Settings({"running": Text(running, block=BLOCK)}, teacher)
        models = {**self.models, STATELESS: lambda: switch_off_state(self.models[SHORTENED]())}
        for name, load in models.items():
            if name != TEACHER:
                yield name, measure(load(), settings).clusters["kl_running"]

    def _encoded(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def _load(folder: Path, **options: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa", **options)
    return model.eval()


def _bytes(model: PreTrainedModel, tokens: int) -> int:
    """Of the cache of one sequence, by a model that runs in bfloat16."""
    return stored_bytes(model, tokens, cache_bits_of(model), torch.bfloat16)


def _narrow(config: Any) -> PreTrainedModel:
    """A random bfloat16 model with the attention heads of a config and little else, which is quickly copied."""
    config.hidden_size, config.intermediate_size, config.vocab_size = 8, 8, 8
    config.pad_token_id = config.bos_token_id = config.eos_token_id = None
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()

"""A byte-level tokenizer, folders of tiny models, and a small data folder."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from deltanet_hf import converted_config
from deltanet_hf.evaluation.report.material import ReportOptions
from deltanet_hf.models.factory import model_class
from support.tiny_models import randomise, teacher_config, tiny_table, tiny_teacher

VOCABULARY = 340


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and 70 words in the vocabulary besides."""
    specials = ["<pad>", "<s>", "</s>"]
    words = ["Ġ" + a + b + c for a in "bcdfghk" for b in "ao" for c in "lmnpr"]
    symbols = specials + sorted(pre_tokenizers.ByteLevel.alphabet()) + words
    backend = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(symbols)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", model_max_length=2048
    )


@pytest.fixture(scope="session")
def teacher_folder(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "teacher"
    tiny_teacher("llama", vocab_size=VOCABULARY, max_position_embeddings=2048).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def student_folder(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid model: layers 0 and 2 of 4 are converted."""
    folder = tmp_path_factory.mktemp("models") / "student"
    teacher = teacher_config("llama", vocab_size=VOCABULARY, max_position_embeddings=2048)
    model = model_class("llama")(converted_config(teacher, tiny_table(layers=(0, 2)))).eval()
    randomise(model, 3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def random_arrays(folder: Path, *names: str) -> None:
    """Token arrays of random text, each of another seed."""
    for seed, name in enumerate(names):
        np.save(folder / f"{name}.npy", np.random.default_rng(seed).integers(5, 60, 2000).astype(np.uint16))


def report_options(teacher: Path, student: Path, data: Path, folder: Path, **changes: Any) -> ReportOptions:
    """The options of a small report in `folder` / out, on a text of one sentence."""
    text = folder / "hay.txt"
    text.write_text("The lamps along the quay went out one by one before the rain came. " * 20)
    shared: dict[str, Any] = {"texts": {"hay": text}, "haystack": text, "suite": "tiny", "limit": 3}
    shared |= {"max_length": 512, "device": "cpu", **changes}
    return ReportOptions(teacher=str(teacher), students=[f"hybrid={student}"], out=folder / "out", data=data, **shared)


def without_times(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The models of a report without their times and speeds."""
    return [{k: v for k, v in model.items() if k not in ("seconds", "speed")} for model in document["models"]]


def _write(folder: Path, name: str, rows: list[dict[str, object]]) -> None:
    path = folder / f"{name}.jsonl.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six rows per task, in the layouts in which these data sets are distributed."""
    folder = tmp_path_factory.mktemp("data")
    count = range(6)
    _write(folder, "lambada_openai/llmfoundry", [{"context": f"Box {i} holds a", "continuation": "cat"} for i in count])
    _write(
        folder,
        "piqa/validation",
        [{"goal": f"Cut {i}", "sol1": "Saw it.", "sol2": "Eat it.", "label": i % 2} for i in count],
    )
    arc = [
        {"id": str(i), "query": f"Question: What is {i}?\nAnswer:", "choices": ["one", "two", "six"], "gold": i % 3}
        for i in count
    ]
    _write(folder, "arc_easy/test", arc)
    _write(
        folder,
        "boolq/validation",
        [{"question": f"is {i} odd", "answer": i % 2 == 1, "passage": "Numbers."} for i in count],
    )
    sciq = {"support": "", "correct_answer": "sun", "distractor1": "fog", "distractor2": "ice", "distractor3": "sea"}
    _write(folder, "sciq/validation", [{"question": f"What shines in {i}?", **sciq} for i in count])
    hellaswag = {"activity_label": "Cooking", "ctx_b": "he", "endings": ["sits.", "runs.", "eats.", "cuts."]}
    _write(folder, "hellaswag/validation", [{"ctx_a": f"Pan {i}.", "label": str(i % 4), **hellaswag} for i in count])
    blimp = [
        {"sentence_good": f"The {n} cats sit.", "sentence_bad": f"The {n} cats sits.", "UID": uid}
        for uid in ("adjunct_island", "wh_island")
        for n in count
    ]
    _write(folder, "blimp/all67", blimp)
    return folder

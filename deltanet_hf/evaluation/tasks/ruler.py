"""RULER (Hsieh et al., 2024): lm-eval's tasks whose texts are generated, at one length.

lm-eval reads the other tasks of RULER from the Hub. Texts, prompts and scores are lm-eval's; the random numbers are
seeded here, so that all models and runs are asked the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from deltanet_hf.evaluation.tasks.lm_eval_patches import replaced
from deltanet_hf.evaluation.tasks.local_data import stock_folder
from deltanet_hf.evaluation.tasks.suites import SEED

# Name -> stock YAML file, the function that makes its rows, and the one that this calls with `num_samples`.
STOCK = {
    "niah_single_1": ("niah_single_1.yaml", "niah_utils.niah_single_1", "generate_samples"),
    "niah_multikey_2": ("niah_multikey_2.yaml", "niah_utils.niah_multikey_2", "generate_samples"),
    "niah_multikey_3": ("niah_multikey_3.yaml", "niah_utils.niah_multikey_3", "generate_samples"),
    "ruler_vt": ("vt.yaml", "vt_utils.get_vt_dataset", "sys_vartrack_w_noise_random"),
    "ruler_cwe": ("cwe.yaml", "cwe_utils.get_cw_dataset", "sys_word_pair_random"),
    "ruler_fwe": ("fwe.yaml", "fwe_utils.fwe_download", "sys_kwext"),
}
SAMPLES = 500  # texts that lm-eval makes for a task
METRIC = "recall"


@dataclass(frozen=True)
class Ruler:
    """How RULER's texts are made.

    Attributes:
        length: largest number of tokens of a text with its question and answer.
        tokenizer: folder of the tokenizer that counts them.
        samples: texts per task; fewer are the first of them.
    """

    length: int
    tokenizer: str
    samples: int = SAMPLES

    def write_tasks(self, folder: Path) -> list[str]:
        """Write the YAML files of the tasks into a folder, and return their names."""
        for task, (stock, *_) in STOCK.items():
            made = {"ruler_task": task, "samples": self.samples, "max_seq_lengths": [self.length]}
            config = {
                "include": str(stock_folder() / "ruler" / stock),
                "task": task,
                "dataset_kwargs": {**made, "tokenizer": self.tokenizer},
                "metric_list": [{"metric": METRIC, "aggregation": "mean", "higher_is_better": True}],
            }
            functions = f"custom_dataset: !function {__name__}.rows\nprocess_results: !function {__name__}.score\n"
            (folder / f"ruler_{task}.yaml").write_text(yaml.safe_dump(config, sort_keys=False) + functions)
        return list(STOCK)


def rows(ruler_task: str, samples: int = SAMPLES, **kwargs: Any) -> Any:
    """The `custom_dataset` function for lm-eval: the rows of a task."""
    _, function, generator = STOCK[ruler_task]
    name, _, function = function.partition(".")
    module: Any = import_module(f"lm_eval.tasks.ruler.{name}")
    stock = getattr(module, generator)

    def fewer(*args: Any, num_samples: int = SAMPLES, **options: Any) -> Any:
        return stock(*args, num_samples=min(num_samples, samples), **options)

    with _seeded(), replaced(module, generator, fewer):
        return getattr(module, function)(**kwargs)


def score(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """The share of the expected answers that the text holds; lm-eval names it by the length."""
    stock: Any = import_module("lm_eval.tasks.ruler.common_utils")
    return {METRIC: stock.process_results(doc, results)[str(doc["max_length"])]}


@contextmanager
def _seeded() -> Iterator[None]:
    """The global random numbers from a seed, and afterwards as they were."""
    before, arrays_before = random.getstate(), np.random.get_state()
    random.seed(SEED)
    np.random.seed(SEED)
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(arrays_before)

"""Rows of students with different mixers by one set of figures, `python -m measuring.study.measure mixers`.

A row of the results file has, with the standard error NAME_se beside each measured quality:

- mixer, set: the kind of the converted layers ("softmax" for the teacher) and its settings that are not the recommended
  ones; kept: indices of the layers with the teacher's attention; tokens, seed, rate (of the new layers): of the
  training;
- kl: KL(teacher || model) in nats per token on held-out Wikipedia; heldwiki, wt2: perplexity there and on WikiText-2;
  repeat: perplexity of the second copy of a passage of 256 tokens (the texts of `results_row.py`);
- needles_1k, pairs_8: exact answers in per cent (`recall_cells.py`);
- train_tokens_per_s: median speed of the last training stage;
- decode_ms: milliseconds per token at batch size 1 behind a prompt of 2,048 tokens;
- state_mb: MB that a sequence of 2,048 tokens takes, measured on the cache.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from deltanet_hf.evaluation.measures.measure import measure
from deltanet_hf.evaluation.measures.speed import measure_speed
from deltanet_hf.models.layers import SOFTMAX
from measuring.study.hybrid_row import layer_facts
from measuring.study.recall_cells import recall_cells
from measuring.study.results_row import conversion_facts, run_facts, text_settings

LENGTH = 2048  # tokens of the prompt behind which decoding is timed, and whose bytes are given
HAYSTACK = "novels"
CELLS = ("needles_1k", "pairs_8")
PERPLEXITIES = ("wt2", "heldwiki", "repeat")


class MixerMeasure:
    """Measures models against one teacher.

    Args:
        arrays: folder with the arrays of `results_row.text_settings` and novels.npy (token ids).
        limit: largest number of windows per text and of probes per cell; None for no limit.
    """

    def __init__(self, arrays: Path, teacher: Any, tokenizer: Any, limit: int | None = None) -> None:
        haystack = np.load(arrays / f"{HAYSTACK}.npy").astype(np.int64)
        self.longest = int(teacher.config.get_text_config().max_position_embeddings)
        cells = recall_cells(tokenizer, haystack, self.longest, limit=limit)
        settings = text_settings(arrays, teacher, limit)
        texts = {name: text for name, text in settings.texts.items() if name != "anarchism"}
        self.settings = replace(
            settings, texts=texts, probes={name: cells[name] for name in CELLS if name in cells}, words={}
        )

    def __call__(self, model: PreTrainedModel) -> dict[str, Any]:
        """The measured keys of a row."""
        clusters = measure(model, self.settings).clusters
        found = {"kl": clusters["kl_heldwiki"].score}
        found |= {name: clusters[f"loss_{name}"].perplexity for name in PERPLEXITIES}
        row: dict[str, Any] = {}
        for name, score in found.items():
            row[name], row[f"{name}_se"] = round(score.value, 5), round(score.stderr, 5)
        for name in self.settings.probes:
            score = clusters[name].score
            row[name], row[f"{name}_se"] = round(100 * score.value, 3), round(100 * score.stderr, 3)
        speed = measure_speed(model, min(LENGTH, self.longest // 2))
        row["decode_ms"] = round(1000 / speed.decode_tokens_per_second, 3)
        row["state_mb"] = round(speed.cache_bytes / 1e6, 3)
        return row


def make_row(name: str, folder: Path, model: Any, measure: MixerMeasure) -> dict[str, Any]:
    """The row of a model that was loaded from `folder`."""
    facts, trained = layer_facts(model), run_facts(folder)
    kinds = [kind for kind in facts["kinds"] if kind != SOFTMAX]
    row = {"run": name, "mixer": ", ".join(kinds) or SOFTMAX, "kept": facts["kept"]}
    row["set"] = conversion_facts(folder).get("conversion", {}).get("set") or {}
    row |= {"tokens": trained.get("tokens", 0), "seed": trained.get("seed")}
    if "recipe" in trained:
        row["rate"] = trained["recipe"]["stages"][-1]["optimizer"]["mixer_lr"]
    if speeds := trained.get("tokens_per_second"):
        row["train_tokens_per_s"] = round(list(speeds.values())[-1])
    return {**row, **measure(model)}


def shown(row: dict[str, Any]) -> str:
    """The figures of a row in one line."""
    names = ("kl", *PERPLEXITIES, *CELLS, "train_tokens_per_s", "decode_ms", "state_mb")
    return "  ".join(f"{name} {row[name]:.4g}" for name in names if name in row)

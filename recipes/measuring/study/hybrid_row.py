"""The columns of a model's row by what a `HybridMeasure` finds, with the standard error NAME_se beside each value:

- mb_2k: MB that a sequence of 2,048 tokens takes, measured on the cache;
- kl_1k to kl_32k: KL(teacher || model) in nats per token, on Wikipedia at 1,024 tokens and novels at the others;
- top1: tokens of the novels at 4,096 whose most likely value is the teacher's, in per cent;
- needles_*, prose_*, pairs_*: exact answers in per cent;
- bigram: recall of bigrams in running text, in per cent of the teacher (`bigram_recall.py`);
- exact_repeat, wt2: perplexity of a repeated passage and of WikiText-2;
- relative: recall in per cent of the teacher's, (model - control) / (teacher - control), where the control is the
  teacher without the facts; cells in which the teacher is below 20% are left out;
- cells: for every probe the first token and all tokens in per cent, and the nats of the answer;
- the columns of `task_suites.py`, if its suites were measured.
"""

from __future__ import annotations

import math
from typing import Any

from transformers import PreTrainedModel

from deltanet_hf.evaluation.measures.measure import Measured
from deltanet_hf.evaluation.measures.relative import paired_difference, relative_score
from deltanet_hf.evaluation.measures.scores import Score
from deltanet_hf.mixers.attention.family_attention import kind_of
from deltanet_hf.models.layers import SOFTMAX
from measuring.study import task_suites
from measuring.study.shared_figures import SharedFigures

KL = ("kl_1k", "kl_4k", "kl_8k", "kl_16k", "kl_32k")
RECALL = (
    *(f"{name}_{length}" for name in ("needles", "prose") for length in ("1k", "2k", "4k", "8k", "16k", "32k")),
    *("pairs_8", "pairs_32", "pairs_128"),
)
SHARES = {"top1": "top1_4k"} | {name: name for name in (*RECALL, *task_suites.COLUMNS)}
"""Column in per cent -> the clusters that it comes from."""
PERPLEXITIES = {"exact_repeat": "loss_repeat", "wt2": "loss_wt2"}
CLEAR = 2.0  # standard errors


def figures(measured: Measured, references: SharedFigures) -> dict[str, Any]:
    """The part of a row that follows from one model's measures."""
    clusters, teacher, control = measured.clusters, references.teacher.clusters, references.control.clusters
    row: dict[str, Any] = {"mb_2k": round(measured.bytes / 1e6, 3)}
    for name in KL:
        if name in clusters:
            _put(row, name, clusters[name].score)
    for name, source in SHARES.items():
        if source in clusters:
            _put(row, name, clusters[source].score, 100)
    if "bigram" in clusters:
        _put(row, "bigram", relative_score(clusters["bigram"], teacher["bigram"], control["bigram"]), 100)
        _put(row, "bigram_kl", clusters["bigram_kl"].score)
    for name, loss in PERPLEXITIES.items():
        _put(row, name, clusters[loss].perplexity)
    row["relative"], row["cells"] = {}, {}
    for name in measured.probes:
        _put(row["relative"], name, relative_score(clusters[name], teacher[name], control[name]), 100)
        cell: dict[str, Any] = {}
        _put(cell, "exact", clusters[name].score, 100)
        _put(cell, "first", clusters[f"{name}.first"].score, 100)
        _put(cell, "nats", clusters[f"{name}.nats"].score)
        _put(cell, "control", control[name].score, 100)
        row["cells"][name] = cell
    for name in [name for name in clusters if name.startswith("bigram_") and not name.endswith("_kl")]:
        row["cells"][name] = {}
        _put(row["cells"][name], "accuracy", clusters[name].score, 100)
        _put(row["cells"][name], "kl", clusters[f"{name}_kl"].score)
    return row


def _put(row: dict[str, Any], name: str, score: Score | None, scale: float = 1.0) -> None:
    """Add a value and its standard error; nothing for a score that is not defined."""
    if score is not None and math.isfinite(score.value):
        row[name] = round(scale * score.value, 5)
        row[f"{name}_se"] = round(scale * score.stderr, 5) if math.isfinite(score.stderr) else None


def compared(student: Measured, policy: Measured) -> dict[str, list[str]]:
    """The columns in which the student is better and worse than a policy by more than two standard errors."""
    better, worse = [], []
    for name in (*KL, *SHARES, "bigram", *PERPLEXITIES):
        source = (SHARES | PERPLEXITIES).get(name, name)
        if source not in student.clusters or source not in policy.clusters:
            continue
        difference = paired_difference(student.clusters[source], policy.clusters[source])
        gain = -difference.value if name in KL or name in PERPLEXITIES else difference.value
        if gain > CLEAR * difference.stderr:
            better.append(name)
        elif -gain > CLEAR * difference.stderr:
            worse.append(name)
    return {"better": better, "worse": worse}


def layer_facts(model: PreTrainedModel) -> dict[str, Any]:
    """The kinds of a model's layers with their numbers, and the indices of those with the teacher's attention.

    With mixed heads, `kept_heads` lists [layer, key/value head] of the other heads with the teacher's attention.
    """
    kinds: dict[str, int] = {}
    kept: list[int] = []
    heads: list[list[int]] = []
    for index, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        kind = kind_of(attention)
        name = kind.name
        if name == SOFTMAX:
            kept.append(index)
        heads += [[index, head] for head in kind.branch_heads.get(SOFTMAX, ())]
        if kind.window_tokens:
            name += f"{'+window' if kind.has_state else ''} {kind.window_tokens}"
        kinds[name] = kinds.get(name, 0) + 1
    return {"kinds": kinds, "kept": kept, **({"kept_heads": heads} if heads else {})}


def shown(row: dict[str, Any]) -> str:
    """The columns of a row in one line."""
    return "  ".join(f"{key} {row[key]:.4g}" for key in ("mb_2k", *KL, *RECALL, "bigram", *PERPLEXITIES) if key in row)

"""Scores a model on the suites that papers report: the task columns of a row of `measuring.study.state_rows`.

In per cent, with the standard error NAME_se beside each value:

- niah_2k to niah_32k: RULER's `niah_single_1` and `niah_multikey_2` together, `RULER_ITEMS` texts of each, at lengths
  that the model has positions for;
- vt_4k: RULER's `ruler_vt`, the share of the expected variables;
- completion: SQuAD, whether the text that is generated holds the answer;
- ifeval: all prompts of IFEval, in the chat template if the tokenizer has one; those of which all instructions are
  followed (strict);
- standard: accuracy over the eight tasks of the suite of this name, 500 items of each;
- humaneval, mbpp: the programs that pass their tests, if `HF_ALLOW_CODE_EVAL=1` allows to run them, and gsm8k, the
  problems whose last number is right, of all items; generated greedily.

Texts, prompts and scores are lm-eval's, the others without a chat template. Answers to RULER end after `ANSWER` tokens,
where lm-eval lets niah_* have 128: they are to be the first tokens. A column without data or packages is `missing`.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from deltanet_hf.evaluation.measures.relative import Clusters
from deltanet_hf.evaluation.tasks.suites import (
    ALLOW_CODE,
    CODE,
    COMPLETION,
    GSM8K,
    IFEVAL,
    RULER,
    STANDARD,
    SuiteTask,
    code_allowed,
    missing_packages,
)

SETS: dict[str, tuple[tuple[SuiteTask, ...], int, int | str]] = {
    "completion": (COMPLETION, 500, "auto"),
    "ifeval": (IFEVAL, 541, 541),
    "standard": (STANDARD, 500, "auto"),
    "humaneval": (CODE[:1], 164, 164),
    "mbpp": (CODE[1:], 500, 125),
    "gsm8k": (GSM8K, 1319, 120),
}
"""Column -> its tasks, items of a task, and how many are answered together: many, for a step takes as long for one."""
RULER_ITEMS = {2048: 128, 4096: 128, 8192: 128, 16384: 32, 32768: 16}  # by the tokens of a text
ANSWER = 32  # tokens
NIAH, VT = ("niah_single_1", "niah_multikey_2"), ("ruler_vt",)
LENGTHS = {
    2048: (("niah_2k", NIAH),),
    4096: (("niah_4k", NIAH), ("vt_4k", VT)),
    8192: (("niah_8k", NIAH),),
    16384: (("niah_16k", NIAH),),
    32768: (("niah_32k", NIAH),),
}
"""Tokens of RULER's texts -> the columns with their tasks."""
COLUMNS = (*(column for columns in LENGTHS.values() for column, _ in columns), *SETS)
_PROMPT_TOKENS = 2**18  # of the prompts that are continued at the same time
_PROMPT_PAIRS = 2**31  # of their tokens: sliding layers of a teacher have a mask over all


class Part(NamedTuple):
    """Tasks whose prompts are built once, the columns that come from them, and how many prompts run together."""

    harness: Any
    columns: dict[str, list[str]]
    rows: int | str


class TaskSuites:
    """The suites, which any number of models can answer.

    Args:
        data: folder of NAME/SPLIT.jsonl.gz files.
        teacher: folder of the teacher, whose tokenizer counts the tokens of RULER's texts.
        limit: largest number of items per task; None for those of `SETS` and `RULER_ITEMS`.
        columns: those to measure.
    """

    def __init__(
        self,
        data: Path,
        teacher: str,
        tokenizer: PreTrainedTokenizerBase,
        longest: int,
        limit: int | None = None,
        columns: Collection[str] = COLUMNS,
    ) -> None:
        # Imports lm-eval, which state_rows.py does without where no suites are measured.
        from deltanet_hf.evaluation.tasks.local_data import missing_files
        from deltanet_hf.evaluation.tasks.ruler import Ruler

        self.tokenizer = tokenizer
        self.missing = {column: "no such suite" for column in columns if column not in COLUMNS}
        self.parts: list[Part] = []
        for column in (name for name in SETS if name in columns):
            tasks, items, rows = SETS[column]
            chat = tokenizer if tasks is IFEVAL else None
            of = {column: [task.name for task in tasks]}
            if tasks[0] in CODE and not code_allowed():
                self.missing[column] = f"needs {ALLOW_CODE}=1"
            elif files := missing_files(of[column], data):
                self.missing[column] = f"no {', '.join(files)}"
            else:
                self.parts.append(_part(tasks, data, min(limit or items, items), of, rows, chat=chat))
        known = {task.name: task for task in RULER}
        absent = missing_packages("ruler")
        for length, texts in LENGTHS.items():
            if not (asked := {column: list(names) for column, names in texts if column in columns}):
                continue
            if absent or length > longest:
                reason = f"needs {' and '.join(absent)}" if absent else f"the model has {longest:,} positions"
                self.missing |= dict.fromkeys(asked, reason)
                continue
            ruler = Ruler(length, teacher, min(limit or RULER_ITEMS[length], RULER_ITEMS[length]))
            tasks = tuple(known[name] for names in asked.values() for name in names)
            rows = max(1, min(_PROMPT_TOKENS // length, _PROMPT_PAIRS // length**2))
            self.parts.append(_part(tasks, None, None, asked, rows, ruler))

    def __call__(self, model: PreTrainedModel) -> dict[str, Clusters]:
        """Column -> one cluster per item."""
        from measuring.study.unpadded_lm import UnpaddedLM

        found = {}
        for part in self.parts:
            rows = part.rows if model.device.type == "cuda" else 1
            results = part.harness.run(UnpaddedLM(model, tokenizer=self.tokenizer, batch_size=rows))
            for column, tasks in part.columns.items():
                found[column] = Clusters.each(np.concatenate([results[task].samples for task in tasks]))
        return found


def _part(
    tasks: tuple[SuiteTask, ...],
    data: Path | None,
    items: int | None,
    columns: dict[str, list[str]],
    rows: int | str,
    ruler: Any = None,
    chat: PreTrainedTokenizerBase | None = None,
) -> Part:
    from deltanet_hf.evaluation.tasks.harness import Harness

    harness = Harness(tasks, data, items, ruler, chat)
    for instance in (i for parts in harness.parts.values() for part in parts for i in part.instances):
        if ruler is not None:
            options = instance.args[1]
            options["max_gen_toks"] = min(ANSWER, options["max_gen_toks"])
    return Part(harness, columns, rows)

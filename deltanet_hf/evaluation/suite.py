"""What a report measures: tasks, the metric that stands for each, its chance level, and how many rows are scored."""

from __future__ import annotations

import random
from dataclasses import dataclass

SEED = 1234


@dataclass(frozen=True)
class SuiteTask:
    """A task of a suite.

    Attributes:
        metric: lm-eval's metric, `acc` or the length-normalised `acc_norm` as usually published, or `exact_match`.
        chance: score of guessing; the chance-corrected average subtracts it.
        rows: rows scored, drawn with a fixed seed; None for all.
        averaged: the task counts in "% of teacher".
    """

    name: str
    metric: str
    chance: float
    rows: int | None = None
    averaged: bool = True


# BLiMP is 67 paradigms of 1000 pairs. 200 pairs of each leave a standard error of 0.3 points.
_BLIMP_SMALL = SuiteTask("blimp", "acc", 0.5, rows=200 * 67)

SMALL = (
    SuiteTask("lambada_openai", "acc", 0.0),
    SuiteTask("hellaswag", "acc_norm", 0.25),
    SuiteTask("piqa", "acc", 0.5),
    SuiteTask("arc_easy", "acc", 0.25),
    SuiteTask("sciq", "acc", 0.25),
    _BLIMP_SMALL,
)
FULL = (
    *SMALL[:-1],
    SuiteTask("blimp", "acc", 0.5),
    SuiteTask("arc_challenge", "acc_norm", 0.25),
    SuiteTask("winogrande", "acc", 0.5),
    SuiteTask("boolq", "acc", 0.5),
    SuiteTask("openbookqa", "acc_norm", 0.25),
    SuiteTask("lambada_last_word", "exact_match", 0.0, rows=1000, averaged=False),
    SuiteTask("triviaqa", "exact_match", 0.0, rows=1000, averaged=False),
    SuiteTask("nq_open", "exact_match", 0.0, rows=1000, averaged=False),
    SuiteTask("gsm8k", "exact_match", 0.0, rows=250, averaged=False),
    SuiteTask("arc_easy_rotated", "acc", 0.25, averaged=False),
    SuiteTask("arc_challenge_rotated", "acc", 0.25, averaged=False),
    SuiteTask("openbookqa_rotated", "acc", 0.25, averaged=False),
    SuiteTask("sciq_rotated", "acc", 0.25, averaged=False),
)


@dataclass(frozen=True)
class Suite:
    """Everything a report measures besides the texts that the user names.

    Attributes:
        tasks: lm-eval tasks; none in the suite `texts`.
        pairs: sizes of the associative recall lists.
        needle_lengths: tokens of the haystacks.
        probes: recall probes per size or length.
        speed_lengths: context lengths at which memory and speed are measured; empty for none.
    """

    tasks: tuple[SuiteTask, ...]
    pairs: tuple[int, ...]
    needle_lengths: tuple[int, ...]
    probes: int
    speed_lengths: tuple[int, ...]


_LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
SUITES = {
    "texts": Suite((), (8, 32), (1024, 2048), 32, ()),
    # 128 probes of 4 needles leave an error of 2 to 4 points.
    "small": Suite(SMALL, (8, 32), (1024, 2048), 128, (1024, 4096)),
    "full": Suite(FULL, (4, 8, 16, 32, 64), _LENGTHS, 128, _LENGTHS),
}


def draw_rows(task: str, available: int, wanted: int | None) -> list[int]:
    """Indices of the rows to score, in order: the same for every model, machine and rerun."""
    if wanted is None or wanted >= available:
        return list(range(available))
    return sorted(random.Random(f"{SEED} {task}").sample(range(available), wanted))

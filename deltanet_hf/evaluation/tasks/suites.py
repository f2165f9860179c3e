"""The suites of a report: their tasks, with metric, chance level and number of rows, and their other measurements."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

from deltanet_hf.errors import UserError
from deltanet_hf.version import install_command

SEED = 1234


@dataclass(frozen=True)
class SuiteTask:
    """A task of a suite.

    Attributes:
        metric: the metric of lm-eval that is usually published: `acc`, `acc_norm` (normalised by length) or
            `exact_match`.
        chance: expected score of guessing, which the chance-corrected average subtracts.
        rows: number of rows to score, drawn with a fixed seed; None for all.
        averaged: whether the task is part of the "% of teacher" average.
    """

    name: str
    metric: str
    chance: float
    rows: int | None = None
    averaged: bool = True


# BLiMP has 67 paradigms of 1000 pairs; with 200 pairs of each, the standard error is 0.3 points.
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
)

# Sets that papers report, 0-shot.
STANDARD = (
    *SMALL[:4],
    SuiteTask("arc_challenge", "acc_norm", 0.25),
    SuiteTask("winogrande", "acc", 0.5),
    SuiteTask("openbookqa", "acc_norm", 0.25),
    SuiteTask("boolq", "acc", 0.5),
)
RULER = tuple(
    SuiteTask(name, "recall", 0.0)
    for name in ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "ruler_vt", "ruler_cwe", "ruler_fwe")
)
COMPLETION = (SuiteTask("squad_completion", "contains", 0.0),)
IFEVAL = (SuiteTask("ifeval", "prompt_level_strict_acc", 0.0),)
CODE = (SuiteTask("humaneval", "pass@1", 0.0), SuiteTask("mbpp", "pass_at_1", 0.0))
GSM8K = (SuiteTask("gsm8k", "exact_match", 0.0),)


@dataclass(frozen=True)
class Suite:
    """The measurements of a report.

    Attributes:
        tasks: lm-eval tasks; none in the suites `texts` and `long`.
        pairs: list sizes of associative recall, in pairs.
        needle_lengths: lengths of the needle probes, in tokens.
        probes: number of recall probes per list size or length.
        speed_lengths: context lengths in tokens at which memory and speed are measured.
        prose_lengths: lengths of the probes with facts in running text, in tokens.
        text_windows: tokens per window of a text; each further length takes as many tokens of it as the first.
        repeated: tokens per segment of the exact repeat.
        chat: whether prompts are put into the tokenizer's chat template, if it has one.
    """

    tasks: tuple[SuiteTask, ...]
    pairs: tuple[int, ...] = ()
    needle_lengths: tuple[int, ...] = ()
    probes: int = 0
    speed_lengths: tuple[int, ...] = ()
    prose_lengths: tuple[int, ...] = ()
    text_windows: tuple[int, ...] = (1024,)
    repeated: int = 256
    chat: bool = False


_LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
SUITES = {
    "texts": Suite((), (8, 32), (1024, 2048), 32, (), (1024, 2048)),
    # With 128 probes of 4 needles, the standard error is 2 to 4 points.
    "small": Suite(SMALL, (8, 32), (1024, 2048), 128, (1024, 4096), (1024, 2048)),
    "full": Suite(FULL, (4, 8, 16, 32, 64), _LENGTHS, 128, _LENGTHS, _LENGTHS),
    "long": Suite((), text_windows=(1024, 8192, 32768)),
    "standard": Suite(STANDARD),
    "ruler": Suite(RULER),
    "completion": Suite(COMPLETION),
    "ifeval": Suite(IFEVAL, chat=True),
    "code": Suite(CODE),
    "gsm8k": Suite(GSM8K),
}
PACKAGES = {"ruler": ("nltk", "scipy", "wonderwords"), "ifeval": ("immutabledict", "langdetect", "nltk")}
ALLOW_CODE = "HF_ALLOW_CODE_EVAL"  # the variable of the metric `code_eval`
RULER_LENGTH = 4096  # tokens, unless another length is given


def draw_rows(task: str, available: int, count: int | None) -> list[int]:
    """Sorted indices of `count` of a task's rows, all for None; equal for every model, machine and rerun."""
    if count is None or count >= available:
        return list(range(available))
    return sorted(random.Random(f"{SEED} {task}").sample(range(available), count))


def missing_packages(suite: str) -> list[str]:
    """The packages that lm-eval needs for a suite and that are not installed."""
    return [package for package in PACKAGES.get(suite, ()) if find_spec(package) is None]


def code_allowed() -> bool:
    """Whether the environment allows programs that a model writes to be run."""
    return os.environ.get(ALLOW_CODE) == "1"


def check_packages(suite: str) -> None:
    """Raises UserError if what a suite needs is missing: packages, IFEval's data of NLTK, leave to run programs."""
    if suite == "code" and not code_allowed():
        raise UserError(
            f"--suite code runs programs that the model writes; allow it with {ALLOW_CODE}=1, best in a container"
        )
    if missing := missing_packages(suite):
        raise UserError(f"--suite {suite} needs {' and '.join(missing)}; run {install_command('eval')}")
    if suite == "ifeval":
        nltk = import_module("nltk")
        try:
            nltk.data.find("tokenizers/punkt_tab")
        except LookupError as error:
            if not nltk.download("punkt_tab", quiet=True):
                raise UserError(
                    "--suite ifeval needs NLTK's punkt_tab, which cannot be downloaded; unpack it in "
                    "~/nltk_data/tokenizers"
                ) from error

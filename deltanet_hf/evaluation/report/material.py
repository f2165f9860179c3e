"""The options of a report, and the inputs that all of its models are measured on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from deltanet_hf.data import shipped_texts, with_prefix
from deltanet_hf.data.text_files import TextFile
from deltanet_hf.errors import UserError
from deltanet_hf.evaluation.measures.probes import Probe
from deltanet_hf.evaluation.report.model_rows import DEFAULT_BASELINES
from deltanet_hf.evaluation.tasks.harness import Harness
from deltanet_hf.evaluation.tasks.haystack import Haystack
from deltanet_hf.evaluation.tasks.prose_facts import prose_facts
from deltanet_hf.evaluation.tasks.recall_tasks import associative_recall, needles
from deltanet_hf.evaluation.tasks.ruler import SAMPLES, Ruler
from deltanet_hf.evaluation.tasks.suites import RULER_LENGTH, SUITES, Suite
from deltanet_hf.evaluation.tasks.text_windows import encode_documents, token_ids, wikitext_texts, windows
from deltanet_hf.hub import loadable_folder

_HAYSTACKS = 10  # length of the haystack text, in contexts


@dataclass(frozen=True)
class ReportOptions:
    """The models of a report and its inputs.

    Attributes:
        teacher: folder or Hub id.
        students: folders or Hub ids, or NAME=FOLDER.
        out: folder for the report's files.
        suite: a name in `SUITES`.
        data: folder of NAME/SPLIT.jsonl.gz files; None loads rows from the Hub.
        texts: name -> file, for perplexity and KL divergence. WikiText-2 is added if `data` holds it. The first file
            also gives the segments of the exact repeat.
        windows: number of windows per text, of the first length of the suite.
        haystack: text file of the needle task; None for the text that ships with this package.
        baselines: names in `BASELINES`.
        limit: largest number of rows per task, windows per text and recall probes; None for no limit.
        max_length: longest context of needles, speed and long windows in tokens; None for the teacher's limit.
        device: torch device; None for CUDA if there is a GPU, else the CPU.
        dtype: name of a torch dtype, or "auto" for the dtype that each model is stored in.
        processes: number of models measured in parallel; with GPUs, each process has its own.
        length: tokens of RULER's texts, in the suite of this name.
    """

    teacher: str
    students: list[str]
    out: Path
    suite: str = "small"
    data: Path | None = None
    texts: dict[str, Path] = field(default_factory=dict)
    windows: int = 64
    haystack: Path | None = None
    baselines: tuple[str, ...] = DEFAULT_BASELINES
    limit: int | None = None
    max_length: int | None = None
    device: str | None = None
    dtype: str = "auto"
    processes: int = 1
    length: int = RULER_LENGTH


@dataclass
class Material:
    """The inputs of a report, read and tokenised.

    Attributes:
        harness: lm-eval tasks; None if the suite has none.
        texts: name, or NAME@LENGTH of several lengths -> windows [N, T] int64 of token ids.
        repeat: segments [N, T] int64 of the exact repeat.
        recall: `needle_LENGTH`, `prose_LENGTH` or `mqar_PAIRS` -> probes.
        speed_lengths: context lengths at which memory and speed are measured.
    """

    harness: Harness | None
    texts: dict[str, Tensor]
    repeat: Tensor
    recall: dict[str, list[Probe]]
    speed_lengths: tuple[int, ...]


def read_material(options: ReportOptions, tokenizer: PreTrainedTokenizerBase, longest: int) -> Material:
    """Read, tokenise and check all inputs before any model runs; UserError for one that cannot be used.

    Args:
        longest: the longest context of the teacher in tokens, which `options.max_length` replaces.
    """
    suite = SUITES[options.suite]
    first, *longer = suite.text_windows
    repeated = suite.repeated
    count = min(options.windows, options.limit or options.windows)
    context = options.max_length or longest
    lengths = [first, *(length for length in longer if length <= context)]
    wanted = max(count * first, lengths[-1])
    texts: dict[str, Tensor] = {}
    repeat: Tensor | None = None

    def cut(name: str, ids: np.ndarray) -> None:
        for length in lengths:
            key = name if len(suite.text_windows) == 1 else f"{name}@{length}"
            texts[key] = with_prefix(windows(ids, length, wanted // length), tokenizer)

    for name, path in options.texts.items():
        ids = token_ids(path, tokenizer, lengths[-1], wanted)
        cut(name, ids)
        if repeat is None:
            repeat = windows(ids, repeated, count)
    for name, text in wikitext_texts(options.data).items():
        cut(name, encode_documents([text], tokenizer, wanted))
    if not (texts or suite.tasks or suite.probes):  # the exact repeat alone says nothing
        raise UserError(f"--suite {options.suite} measures KL on texts; name at least one with --text NAME=FILE")
    sources = [options.haystack] if options.haystack else shipped_texts()
    documents = (text for path in sources for text in TextFile(path, option="--haystack").documents())
    haystack = encode_documents(documents, tokenizer, _HAYSTACKS * context)
    made = min(options.limit or SAMPLES, SAMPLES)
    ruler = Ruler(options.length, str(loadable_folder(options.teacher)), made) if options.suite == "ruler" else None
    chat = tokenizer if suite.chat else None
    probes = min(suite.probes, options.limit or suite.probes)
    return Material(
        harness=Harness(suite.tasks, options.data, options.limit, ruler, chat) if suite.tasks else None,
        texts=texts,
        repeat=windows(haystack, repeated, count) if repeat is None else repeat,
        recall=_recall(suite, tokenizer, haystack, context, probes),
        speed_lengths=tuple(length for length in suite.speed_lengths if length <= context),
    )


def _recall(
    suite: Suite, tokenizer: PreTrainedTokenizerBase, haystack: np.ndarray, longest: int, count: int
) -> dict[str, list[Probe]]:
    """The recall probes of the suite; lengths above `longest` tokens are left out."""
    built = {f"mqar_{pairs}": associative_recall(tokenizer, pairs, count) for pairs in suite.pairs}
    for length in suite.needle_lengths:
        if length <= longest:
            built[f"needle_{length}"] = needles(tokenizer, haystack, length, count)
    text = Haystack(tokenizer, haystack)
    for length in suite.prose_lengths:
        if length <= longest:
            built[f"prose_{length}"] = prose_facts(tokenizer, text, length, count)
    return built

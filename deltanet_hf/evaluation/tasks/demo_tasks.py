"""Two small offline tasks, built from the public-domain text that ships with this package.

`demo_cloze`: choose the next word of a passage among four words that follow its last word somewhere in the text.
`demo_repeat`: a passage is given twice, the second time cut short; choose its next word among four of the passage.
The first measures language modelling. The second measures recall, because the answer lies further back than a short
window reaches.
"""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from datasets import Dataset

from deltanet_hf.data import shipped_texts
from deltanet_hf.errors import UserError
from deltanet_hf.evaluation.tasks.suites import SEED

ITEMS = 60
OPTIONS = 4
_CLOZE_WORDS = 60
_REPEAT_WORDS = 90
# Most vocabularies hold frequent words of these lengths as one token, so one forward pass scores all four options.
_LENGTHS = range(3, 8)
_COMMON = 800
# The most frequent words are skipped, because grammar alone predicts them.
_TOO_COMMON = 60


def cloze(text_folder: str | None = None, items: int = ITEMS, **_: Any) -> dict[str, Dataset]:
    """The `custom_dataset` function of `demo_cloze` for lm-eval: rows of context, options and index of the answer."""
    words = _words(text_folder)
    common = _common_words(words)
    rng = random.Random(SEED)
    followers: dict[str, dict[str, None]] = defaultdict(dict)  # dicts keep the order of the text
    for previous, word in pairwise(words):
        if word in common:
            followers[previous][word] = None
    fitting = [i for i in range(1, len(words)) if words[i] in common and len(followers[words[i - 1]]) >= OPTIONS]
    rows = []
    for end in _spread(fitting, len(words), items, _CLOZE_WORDS, rng):
        context = " ".join(words[end - _CLOZE_WORDS : end])
        others = [word for word in followers[words[end - 1]] if word != words[end]]
        rows.append(_row(context, words[end], rng.sample(others, OPTIONS - 1), rng))
    return {"test": Dataset.from_list(rows)}


def repeat(text_folder: str | None = None, items: int = ITEMS, **_: Any) -> dict[str, Dataset]:
    """The `custom_dataset` function of `demo_repeat` for lm-eval; a context is a passage and its cut copy."""
    words = _words(text_folder)
    common = _common_words(words)
    rng = random.Random(SEED + 1)
    half = _REPEAT_WORDS // 2
    rows = []
    for end in _spread([i for i, word in enumerate(words) if word in common], len(words), items, half, rng):
        passage = words[end - half : end + half]
        others = sorted({word for word in passage if word in common and word != words[end]})
        if len(others) >= OPTIONS - 1:
            context = " ".join(passage) + "\n\n" + " ".join(passage[:half])
            rows.append(_row(context, words[end], rng.sample(others, OPTIONS - 1), rng))
    return {"test": Dataset.from_list(rows)}


def _words(text_folder: str | None) -> list[str]:
    files = sorted(Path(text_folder).glob("*.txt")) if text_folder else shipped_texts()
    words = [word for path in files for word in path.read_text(encoding="utf-8").split()]
    if len(words) < 10 * _REPEAT_WORDS:
        raise UserError(f"{text_folder}: {len(words)} words in *.txt; the tasks need at least {10 * _REPEAT_WORDS}")
    return words


def _common_words(words: Sequence[str]) -> set[str]:
    """Frequent lower-case words, without the most frequent ones, that most vocabularies hold as one token."""
    plain = Counter(word for word in words if len(word) in _LENGTHS and re.fullmatch("[a-z]+", word))
    ranked = sorted(plain, key=lambda word: (-plain[word], word))
    return set(ranked[_TOO_COMMON:_COMMON])


def _spread(positions: Sequence[int], length: int, items: int, span: int, rng: random.Random) -> list[int]:
    """A random one of `positions` per part of the text.

    Args:
        positions: indices of words.
        length: words of the text.
        items: number of equal parts.
        span: words at both ends of the text that are left out.
    """
    stride = (length - 2 * span) // items
    parts: dict[int, list[int]] = defaultdict(list)
    for position in positions:
        if span <= position < length - span:
            parts[(position - span) // stride].append(position)
    return [rng.choice(parts[index]) for index in range(items) if parts[index]]


def _row(context: str, answer: str, others: list[str], rng: random.Random) -> dict[str, Any]:
    options = [answer, *others]
    rng.shuffle(options)
    return {"context": context, "options": options, "gold": options.index(answer)}

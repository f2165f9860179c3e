"""Two small offline tasks built from the public-domain text that ships with this package.

`demo_cloze`: the next word of a passage among four that follow the same previous word somewhere in the text.
`demo_repeat`: a passage is given twice, the second time cut short; its next word among four words of the passage.
The first measures language, the second recall: the answer lies further back than a short window reaches.
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

ITEMS = 60
OPTIONS = 4
_SEED = 1234
_CLOZE_WORDS = 60
_REPEAT_WORDS = 90
# Words of this length among the most frequent of the text are one token in most vocabularies: the four candidates
# then need one forward pass.
_LENGTHS = range(3, 8)
_COMMON = 800
# The most frequent words are skipped: grammar alone gives them away.
_TOO_COMMON = 60


def cloze(text_folder: str | None = None, items: int = ITEMS, **_: Any) -> dict[str, Dataset]:
    """lm-eval's `custom_dataset` of `demo_cloze`: rows of context, options and gold."""
    words = _words(text_folder)
    common = _common_words(words)
    rng = random.Random(_SEED)
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
    """lm-eval's `custom_dataset` of `demo_repeat`: rows of context (a passage and its cut copy), options and gold."""
    words = _words(text_folder)
    common = _common_words(words)
    rng = random.Random(_SEED + 1)
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
    """Frequent plain words of a fitting length."""
    plain = Counter(word for word in words if len(word) in _LENGTHS and re.fullmatch("[a-z]+", word))
    ranked = sorted(plain, key=lambda word: (-plain[word], word))
    return set(ranked[_TOO_COMMON:_COMMON])


def _spread(positions: Sequence[int], length: int, items: int, span: int, rng: random.Random) -> list[int]:
    """One of `positions` from each of `items` equal parts of the text, `span` words away from both of its ends."""
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

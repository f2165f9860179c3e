"""Two small offline tasks built from the public-domain text that ships with this package.

`demo_cloze`: the next word of a passage among four candidates. `demo_repeat`: a passage is given twice, the second
time cut short; its next word among four words of the passage. The first measures language, the second recall: the
answer lies further back than a short window reaches.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset

from deltanet_hf.errors import UserError

TEXT_FOLDER = Path(__file__).parents[1] / "data" / "text"
ITEMS = 60
OPTIONS = 4
_SEED = 1234
_CLOZE_WORDS = 60
_REPEAT_WORDS = 90
# Words of this length among the most frequent of the text are one token in most vocabularies: the four candidates
# then need one forward pass.
_LENGTHS = range(3, 8)
_COMMON = 600


def cloze(text_folder: str | None = None, items: int = ITEMS, **_: Any) -> dict[str, Dataset]:
    """lm-eval's `custom_dataset` of `demo_cloze`: rows of context, options and gold."""
    words = _words(text_folder)
    common = _common_words(words)
    rng = random.Random(_SEED)
    rows = []
    for end in _positions(words, common, items, _CLOZE_WORDS, rng):
        answer = words[end]
        context = words[end - _CLOZE_WORDS : end]
        others = [word for word in common if word != answer]
        rows.append(_row(" ".join(context), answer, rng.sample(others, OPTIONS - 1), rng))
    return {"test": Dataset.from_list(rows)}


def repeat(text_folder: str | None = None, items: int = ITEMS, **_: Any) -> dict[str, Dataset]:
    """lm-eval's `custom_dataset` of `demo_repeat`: rows of context (a passage and its cut copy), options and gold."""
    words = _words(text_folder)
    common = set(_common_words(words))
    rng = random.Random(_SEED + 1)
    rows = []
    for end in _positions(words, list(common), items, _REPEAT_WORDS, rng):
        passage = words[end - _REPEAT_WORDS // 2 : end + _REPEAT_WORDS // 2]
        first, copy = " ".join(passage), " ".join(passage[: _REPEAT_WORDS // 2])
        others = sorted({word for word in passage if word in common and word != words[end]})
        if len(others) >= OPTIONS - 1:
            rows.append(_row(f"{first}\n\n{copy}", words[end], rng.sample(others, OPTIONS - 1), rng))
    return {"test": Dataset.from_list(rows)}


def _words(text_folder: str | None) -> list[str]:
    folder = Path(text_folder) if text_folder else TEXT_FOLDER
    files = sorted(folder.glob("*.txt"))
    words = [word for path in files for word in path.read_text(encoding="utf-8").split()]
    if len(words) < 10 * _REPEAT_WORDS:
        raise UserError(f"{folder}: {len(words)} words in *.txt; the demo tasks need at least {10 * _REPEAT_WORDS}")
    return words


def _common_words(words: Sequence[str]) -> list[str]:
    """The most frequent plain words of a fitting length, most frequent first."""
    plain = Counter(word for word in words if len(word) in _LENGTHS and re.fullmatch("[a-z]+", word))
    return [word for word, _ in sorted(plain.items(), key=lambda item: (-item[1], item[0]))[:_COMMON]]


def _positions(words: Sequence[str], common: Sequence[str], items: int, span: int, rng: random.Random) -> list[int]:
    """Positions of common words with `span` words on both sides, spread over the whole text."""
    allowed = set(common)
    stride = (len(words) - 2 * span) // items
    found = []
    for index in range(items):
        begin = span + index * stride
        candidates = [i for i in range(begin, begin + stride) if words[i] in allowed]
        if candidates:
            found.append(rng.choice(candidates))
    return found


def _row(context: str, answer: str, others: list[str], rng: random.Random) -> dict[str, Any]:
    options = [answer, *others]
    rng.shuffle(options)
    return {"context": context, "options": options, "gold": options.index(answer)}

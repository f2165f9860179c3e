"""The formats of synthetic recall rows: how a fact (a key with a value) is written and asked for.

All are notations, with random delimiters and names, and keys and values are made up. Those of the evaluation are kept
out: sentences ("The secret code of ..."), lists of two bare words, six-digit codes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

TITLES = 2000  # names are drawn from at most so many words of the vocabulary
_KEY_FIELDS = ("name", "key", "id", "item", "label", "field", "ref", "subject")
_VALUE_FIELDS = ("value", "entry", "result", "content", "setting", "data", "reading", "note")
_TAGS = ("entry", "fact", "item", "record", "node", "var", "row", "cell")
_DELIMITERS = (": ", " -> ", " => ", " | ", " ~ ", "; ", " :: ", " .. ", " / ", ":\t", " >> ")
_BRACKETS = ((" (", ")"), (" [", "]"), (" <", ">"), (" {", "}"), (' "', '"'))
_BULLETS = ("", "- ", "* ", "+ ", "# ", "> ", "o ")


@dataclass(frozen=True)
class Layout:
    """A fact is a line: `before` + key + `between` + value + `after`; a question ends where the value begins."""

    before: str
    between: str
    after: str
    head: str = ""  # stands before the first fact

    def question(self, key: str) -> str:
        """The text up to the value, without the space that separates them (`gap`)."""
        return self.before + key + self.between.removesuffix(" ")

    @property
    def gap(self) -> str:
        """A space that belongs to the value, because tokenizers join it to the word that follows."""
        return " " if self.between.endswith(" ") else ""


def _lines(rng: random.Random) -> Layout:
    return Layout(rng.choice(_BULLETS), rng.choice(_DELIMITERS), "\n")


def _list(rng: random.Random) -> Layout:
    opening, closing = rng.choice(_BRACKETS)
    return Layout(rng.choice(_BULLETS), opening, closing + rng.choice(("", ",", ";", ".")) + "\n")


def _json(rng: random.Random) -> Layout:
    if rng.random() < 0.5:
        return Layout('"', '": "', '",\n')
    fields = rng.choice(_KEY_FIELDS), rng.choice(_VALUE_FIELDS)
    return Layout(f'{{"{fields[0]}": "', f'", "{fields[1]}": "', '"}\n')


def _table(rng: random.Random) -> Layout:
    fields = rng.choice(_KEY_FIELDS), rng.choice(_VALUE_FIELDS)
    if rng.random() < 0.5:
        return Layout("| ", " | ", " |\n", f"| {fields[0]} | {fields[1]} |\n|---|---|\n")
    separator = rng.choice((",", "\t", ";"))
    return Layout("", separator, "\n", f"{fields[0]}{separator}{fields[1]}\n")


def _tags(rng: random.Random) -> Layout:
    tag, key, value = rng.choice(_TAGS), rng.choice(_KEY_FIELDS), rng.choice(_VALUE_FIELDS)
    if rng.random() < 0.5:
        return Layout(f'<{tag} {key}="', '">', f"</{tag}>\n")
    return Layout(f"<{tag}><{key}>", f"</{key}><{value}>", f"</{value}></{tag}>\n")


def _repeat(rng: random.Random) -> Layout:
    opening, closing = rng.choice((("[", "]"), ("== ", " =="), ("<<", ">>"), ("** ", " **"), ("#", ":")))
    return Layout(opening, f"{closing}\n", "\n")


FORMATS: dict[str, Callable[[random.Random], Layout]] = {
    "lines": _lines,
    "list": _list,
    "json": _json,
    "table": _table,
    "tags": _tags,
    "repeat": _repeat,  # its values are passages of the text
}


class Words:
    """Makes up keys and values: capitalised words of the tokenizer's vocabulary, pseudo-words, numbers and codes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        found = []
        for text in tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))):
            word = (text or "")[1:]
            # Byte-level vocabularies write a leading space as Ġ, SentencePiece as ▁.
            if (
                text
                and text[0] in ("Ġ", "▁")
                and len(word) >= 4
                and word.isascii()
                and word.isalpha()
                and word.istitle()
            ):
                found.append(word)
        self.titles = found[:TITLES] if len(found) >= 100 else []

    def key(self, rng: random.Random) -> str:
        kind = rng.randrange(4 if self.titles else 3)
        if kind == 0:
            return _pseudo_word(rng).capitalize()
        if kind == 1:
            return f"{_pseudo_word(rng)}_{rng.randrange(10, 100)}"
        if kind == 2:
            return f"{_pseudo_word(rng).capitalize()} {_pseudo_word(rng).capitalize()}"
        return f"{rng.choice(self.titles)} {rng.choice(self.titles)}"

    def value(self, rng: random.Random) -> str:
        kind = rng.randrange(6 if self.titles else 5)
        if kind == 0:
            return str(rng.randrange(10, 100_000))
        if kind == 1:
            return f"{_letters(rng)}-{rng.randrange(10, 1000)}"
        if kind == 2:
            return f"{_pseudo_word(rng)} {rng.randrange(2, 100)}"
        if kind == 3:
            return f"{rng.randrange(24):02d}:{rng.randrange(60):02d}"
        if kind == 4:
            return f"{_pseudo_word(rng)} {_pseudo_word(rng)}"
        return f"{rng.choice(self.titles)} {rng.choice(self.titles)}"


def _pseudo_word(rng: random.Random) -> str:
    syllables = rng.randrange(2, 4)
    return "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(syllables)) + rng.choice("lnrst")


def _letters(rng: random.Random) -> str:
    return "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(2))

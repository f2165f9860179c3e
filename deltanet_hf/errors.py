"""The exceptions that the command line shows as one line, and the function that makes one line of any exception."""

import difflib
import re
from collections.abc import Iterable

LONGEST_WORD = 400  # characters; names and values out of files may have any length
SHOWN = 200


class UserError(Exception):
    """A mistake that the user can correct; `deltanet-hf` prints it and exits with status 2.

    The message is one line: the file or option, the key or tensor, what is wrong with it, and the remedy. What it
    quotes from files is made printable, and cut where it is longer than any name.
    """

    def __init__(self, message: str) -> None:
        printable = "".join(
            character if character.isprintable() or character == "\n" else ascii(character)[1:-1]
            for character in message
        )
        super().__init__(re.sub(rf"\S{{{LONGEST_WORD},}}", lambda word: word[0][:SHOWN] + "...", printable))


class QualityError(Exception):
    """A check of the result failed (verification, divergence); `deltanet-hf` prints it and exits with status 1."""


def did_you_mean(got: str, known: Iterable[str]) -> str:
    """', did you mean X?' for the name that `got` resembles or else abbreviates; '' if none is.

    Up to three letters are first taken for an abbreviation: gdn is gated_deltanet, although it resembles gdn2.
    """
    names = list(known)
    close = [name for name in names if _abbreviates(got, name)]
    if len(got) > 3 or not close:
        close = difflib.get_close_matches(got, names, cutoff=0.7) or difflib.get_close_matches(got, close, cutoff=0)
    return f", did you mean {close[0]}?" if close else ""


def _abbreviates(got: str, name: str) -> bool:
    """Whether the letters of `got`, of which there are several, stand in `name` in this order, the first one first."""
    letters = iter(name)
    return len(got) > 1 and name.startswith(got[0]) and all(letter in letters for letter in got)


def one_line(error: BaseException, limit: int | None = None) -> str:
    """The exception's message on one line, cut to `limit` characters; the exception's type if it has no message."""
    return " ".join(str(error).split())[:limit] or type(error).__name__

"""The exceptions that the command line shows as one line, and the function that makes one line of any exception."""


class UserError(Exception):
    """A mistake that the user can correct; `deltanet-hf` prints it and exits with status 2.

    The message is one line: the file or option, the key or tensor, what is wrong with it, and the remedy.
    """


class QualityError(Exception):
    """A check of the result failed (verification, divergence); `deltanet-hf` prints it and exits with status 1."""


def one_line(error: BaseException, limit: int | None = None) -> str:
    """The exception's message on one line, cut to `limit` characters; the exception's type if it has no message."""
    return " ".join(str(error).split())[:limit] or type(error).__name__

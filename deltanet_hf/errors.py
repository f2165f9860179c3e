"""The one exception that the command line shows without a traceback."""


class UserError(Exception):
    """Something the user can put right.

    The message is one line: the file (or option), the key or tensor, what is wrong with it, and the remedy.
    `deltanet-hf` prints it and exits with status 2.
    """


class QualityError(Exception):
    """A check of the result failed (verification, divergence). `deltanet-hf` prints it and exits with status 1."""

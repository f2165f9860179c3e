"""Keeps the progress bars of other libraries out of logs, where nothing can redraw them."""

from __future__ import annotations

import os
import sys


def hide_bars_in_logs() -> None:
    """Turns off the bars of transformers and huggingface_hub, unless standard error is a terminal.

    Both read the environment when they are imported. A value that the user has set stays as it is.
    """
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

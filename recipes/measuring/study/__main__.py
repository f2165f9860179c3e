"""`python -m measuring.study STUDY.yaml NAME=VALUE ...`: convert, distil and measure every run of a study."""

from __future__ import annotations

import signal
from types import FrameType

from deltanet_recipes.cpu_threads import settle_threads
from deltanet_recipes.log_bars import hide_bars_in_logs


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    settle_threads()  # here for the processes that the study starts
    hide_bars_in_logs()
    import typer

    from deltanet_hf.exit_codes import run_command
    from measuring.study.runner import main

    signal.signal(signal.SIGTERM, _interrupt)  # `timeout` and job schedulers end a command by SIGTERM.
    run_command(lambda: typer.run(main))

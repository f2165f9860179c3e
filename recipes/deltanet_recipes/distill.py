"""`accelerate launch -m deltanet_recipes.distill RECIPE [key=value ...]`: `deltanet-hf distill` on several GPUs."""

from __future__ import annotations

import typer
from accelerate import PartialState

from deltanet_hf.exit_codes import run_command
from deltanet_recipes.command import distill


def main() -> None:
    try:
        run_command(lambda: typer.run(distill))
    finally:
        PartialState().destroy_process_group()


if __name__ == "__main__":
    main()

"""`accelerate launch -m deltanet_recipes.distill RECIPE.yaml [key=value ...]`: the same as `deltanet-hf distill`."""

from __future__ import annotations

import sys

import typer
from accelerate import PartialState

from deltanet_hf.errors import QualityError, UserError
from deltanet_recipes.command import distill


def main() -> None:
    try:
        typer.run(distill)  # exits by SystemExit
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except QualityError as error:
        print(error, file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        PartialState().destroy_process_group()


if __name__ == "__main__":
    main()

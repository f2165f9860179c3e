"""The options of `deltanet-hf select` and their checks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field, model_validator
from typer import Option

from deltanet_hf.errors import UserError
from deltanet_hf.token_count import parse_tokens

from ..command_options import Options
from ..options import AUTO
from .budget import Budget
from .units import UNITS

if TYPE_CHECKING:
    import torch

METHODS = ("forward", "gradient", "kl", "uniform")
EXPORTABLE = "exportable"  # how the file names the choice of `--exportable`


def _budget(value: str | Budget | None) -> Budget | None:
    """The value of `--keep`; None for `auto`, of which the teacher decides."""
    if value == AUTO:
        return None
    return Budget.parse(value) if isinstance(value, str) else value


class SelectOptions(Options):
    """The options of one selection.

    Raises:
        UserError: a value cannot be used, or two options contradict each other; the message names the option.
    """

    revision: Annotated[
        str | None, Option(help="Branch, tag or commit of TEACHER on the Hub.", show_default="the main branch")
    ] = None
    out: Annotated[Path, Option(help="File to write; `convert --keep FILE` reads it.")] = Path("selection.json")
    unit: Annotated[
        str | None,
        Option(
            help=f"Choose layers or single key/value heads: {', '.join(UNITS)}.",
            show_default="layer; kv_head where windows are planned",
        ),
    ] = None
    method: Annotated[
        str,
        Option(
            help="`forward` restricts everything to windows and gives full attention back to the unit that lowers the "
            "loss on recall probes most, one by one. `gradient` ranks all units, and the lengths of windows, by a few "
            "derivatives. "
            "`kl` is `forward` by the KL divergence from the teacher on running text. `uniform` spreads the units "
            "evenly, without running the teacher.",
            show_default="forward; gradient without a GPU",
        ),
    ] = "forward"
    exportable: Annotated[
        bool,
        Option(
            "--exportable",
            help="Keep every n-th layer, which mlx-lm and llama.cpp need; the budget decides n, no method runs.",
        ),
    ] = False
    keep: Annotated[
        Budget | None,
        BeforeValidator(_budget),
        Option(
            help="How much to keep, as in `deltanet-hf convert`: `5%@32k` or `40MB@32k` of the cache at that length, "
            "which also plans how long the windows elsewhere are; `25%` or `7` of the layers or heads; `auto`: a ninth "
            "of the teacher's cache; where no windows can be planned, a quarter of the layers (half, if "
            "others slide).",
            show_default=AUTO,
        ),
    ] = None
    mixer: Annotated[
        str | None,
        Option(
            help="Layer that will replace softmax attention, whose cache a budget in bytes counts, as in `deltanet-hf "
            "convert`.",
            show_default="that of convert",
        ),
    ] = None
    window: Annotated[
        int, Option(help="Number of tokens that units see which are not kept, while others are scored."), Field(ge=1)
    ] = 64
    sinks: Annotated[
        int, Option(help="Number of tokens at the start of the text that they see as well."), Field(ge=0)
    ] = 4
    length: Annotated[int, Option(help="Tokens per probe; cut to the teacher's context."), Field(ge=32)] = 1024
    context: Annotated[
        int | None,
        BeforeValidator(lambda tokens: parse_tokens(tokens, "--context") if isinstance(tokens, str) else tokens),
        Option(
            help="Tokens that the converted model will read (`convert --context`): units that are kept are scored with "
            "the positions that reach so far.",
            show_default="the teacher's",
        ),
    ] = None
    probes: Annotated[
        int,
        Option(
            help="Number of probes of each format; `kl` takes four times as many rows of text.",
            show_default="8; 2 without a GPU, unless --method is given",
        ),
        Field(ge=1),
    ] = 8
    seed: Annotated[int, Option(help="Random seed for the probes."), Field(ge=0, le=2**32 - 1)] = 0
    device: Annotated[
        str | None, Option(help="Device, such as cpu, cuda or cuda:1.", show_default="a GPU if there is one")
    ] = None
    overwrite: Annotated[
        bool,
        Option("--overwrite", help="Replace an existing file, and discard an unfinished run with other options."),
    ] = False

    @model_validator(mode="before")
    @classmethod
    def _dependent_defaults(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Few derivatives where there is no GPU."""
        from deltanet_hf.loading import chosen_device

        on_gpu = chosen_device(values.get("device")).type == "cuda"
        if on_gpu or "method" in values or values.get("exportable"):
            return values
        return {"method": "gradient", "probes": 2, **values}

    @model_validator(mode="after")
    def _consistent(self) -> SelectOptions:
        if self.out.suffix == ".png":
            raise UserError(f"--out {self.out}: the plot is written to this name; give a name such as selection.json")
        if self.unit not in (None, *UNITS):
            raise UserError(f"--unit: got '{self.unit}', expected one of {', '.join(UNITS)}")
        if self.method not in METHODS:
            raise UserError(f"--method: got '{self.method}', expected one of {', '.join(METHODS)}")
        if self.exportable and self.method != "forward":
            raise UserError(
                f"--exportable: keeps every n-th layer, so --method {self.method} has no effect; leave out one"
            )
        if self.exportable and self.unit not in (None, "layer"):
            raise UserError("--exportable: other runtimes keep whole layers; leave out --unit or --exportable")
        if self.exportable and (self.mixer not in (None, "gated_deltanet") or self.context is not None):
            raise UserError(
                "--exportable: other runtimes have gated_deltanet and the teacher's positions; leave out --mixer and "
                "--context, or --exportable"
            )
        return self

    @property
    def choice(self) -> str:
        """How the units are chosen, as the file names it: one of `METHODS`, or `EXPORTABLE`."""
        return EXPORTABLE if self.exportable else self.method

    @property
    def measured(self) -> bool:
        """Whether the method runs the teacher."""
        return self.choice not in ("uniform", EXPORTABLE)

    @property
    def torch_device(self) -> torch.device:
        """The device that the teacher runs on; UserError if there is no such device."""
        from deltanet_hf.loading import chosen_device

        return chosen_device(self.device)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype that it runs in: bfloat16 on a GPU, and for derivatives on CPUs that multiply in it (2.5 times as
        fast as float32)."""
        import torch

        from deltanet_hf.cpu_dtype import native_bfloat16

        if self.torch_device.type == "cuda" or (self.method == "gradient" and native_bfloat16()):
            return torch.bfloat16
        return torch.float32

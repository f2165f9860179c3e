"""The options of `deltanet-hf convert` and their checks."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from typer import Exit, Option

from deltanet_hf.errors import UserError, did_you_mean
from deltanet_hf.token_count import parse_tokens

from .command_options import ASIDE, DTYPES, Options, parse_size, torch_dtype

if TYPE_CHECKING:  # the help of a command imports neither torch nor transformers
    import torch
    from transformers import PreTrainedConfig

    from deltanet_hf.mixers import LayerKind
    from deltanet_hf.mixers.layer.settings import MixerSettings
    from deltanet_hf.models.layers import LayerTable

FEWEST_TOKENS = 64  # of calibration
MOST_TOKENS = 10**9
MOST_DIGITS = 9  # of a whole number in an option
HELP = "help"  # the value of `--set` that prints mixers and settings
AUTO = "auto"  # the value of `--keep` that leaves the budget to the command
BUDGET = re.compile(r"\d+(\.\d+)?\s*[A-Za-z%]*(@\w*)?")  # a number of units, a share, or bytes at a length
DEFAULT_MIXER = "gated_deltanet+window"  # of `convert` and `select`: trained, ahead of windows alone in equal bytes


def keep_of_layers(layers: str) -> str:
    """The value of `--keep` for one of `--layers`, its earlier form."""
    if layers == "all":
        return "none"
    return re.sub("^keep:", "layers:", layers.removeprefix(f"{AUTO}:"))


def settings_help(changes: list[str] | None) -> list[str] | None:
    """The values of `--set`; with `help` among them, mixers and settings are printed and the command ends."""
    if HELP in (changes or ()):
        from rich.console import Console

        from .views.settings_view import print_settings

        print_settings(Console())
        raise Exit
    return changes


class ConvertOptions(Options):
    """The options of one conversion. Layers, mixer and bits have defaults that depend on the others
    (`_dependent_defaults`); those at the fields are of `--pure` and the profile for export.

    What depends on the teacher is checked where it is known: layer indices by `chosen_layers`.

    Raises:
        UserError: a value cannot be used, or two options contradict each other; the message names the option.
    """

    revision: Annotated[
        str | None,
        Option(help="Branch, tag or commit of TEACHER on the Hub.", show_default="the main branch"),
        ASIDE,
    ] = None
    keep: Annotated[
        str,
        Option(
            help="What keeps softmax attention to all tokens. `auto`: key/value heads, with windows elsewhere, for a "
            "ninth of the teacher's cache; where no windows can be planned, a quarter of the layers (half, if others "
            "slide), measured. `5%@16k` or `40MB@32k`: as much of the cache at that length. `25%` or `7`: as many "
            "layers, measured. "
            "`every:4`, `layers:3,7,11` or `none`: these layers. FILE: what `deltanet-hf select` wrote.",
            show_default="auto",
        ),
        ASIDE,
    ] = "none"
    layers: Annotated[str | None, Option(hidden=True), ASIDE] = None  # the earlier form of `keep`, which it becomes
    mixer: Annotated[
        str,
        Option(
            help=f"Layer that replaces softmax attention, by default `{DEFAULT_MIXER}` (a window, and a state of what "
            "has left it), but `window` (the last tokens only) with --context, for teachers with sliding layers, for "
            "selections made for it, and where states would take more than a sixth of the bytes. "
            "Others: `gated_deltanet`, those of `--set help`, and `NAME+window` for each that has a state.",
            show_default=False,
        ),
    ] = "gated_deltanet"
    pure: Annotated[
        bool,
        Option(
            "--pure",
            help="Convert every layer to Gated DeltaNet alone: no softmax attention, no window, a cache of one size at "
            "any length. After training it finds 1% of the needles in 2,048 tokens; windows of these bytes are better "
            "without training.",
        ),
        ASIDE,
    ] = False
    profile: Annotated[
        Literal["faithful", "qwen3_5"],
        Option(
            help="Recommended settings. `faithful` keeps everything that the teacher's attention has. `qwen3_5` makes "
            "exactly Qwen3.5's layer, so that the model can be exported to other runtimes."
        ),
    ] = "faithful"
    training: Annotated[
        bool,
        Option("--no-training", help="Take the settings that are better for a model that nobody will distil."),
    ] = True
    changes: Annotated[
        tuple[str, ...],
        Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change one setting of the mixer, for example `rope=false`. Repeat the option for several; `--set "
            "help` lists mixers and settings.",
            show_default=False,
            callback=settings_help,
            is_eager=True,
        ),
    ] = ()
    text: Annotated[
        Path | None,
        Option(
            help="Calibration text: .txt, .md or .jsonl (each also as .gz or .xz) or .parquet.",
            show_default="text shipped with deltanet-hf",
        ),
        ASIDE,
    ] = None
    calibration_tokens: Annotated[
        int,
        Option(help="Number of tokens of the calibration text that the layers are fitted on."),
        Field(ge=FEWEST_TOKENS, le=MOST_TOKENS),
    ] = 8192
    cache_bits: Annotated[
        Literal[16, 8, 4],
        Option(
            help="Bits of the keys and values that the model keeps in its cache: 16, 8 or 4. Of 4, the key channels "
            "that weigh most get 5 and those that weigh least 3, as measured on the calibration text.",
            show_default="4; 16 where nothing is quantised, and for heads that have no form in 4",
        ),
    ] = 16
    context: Annotated[
        int | None,
        BeforeValidator(lambda tokens: parse_tokens(tokens, "--context") if isinstance(tokens, str) else tokens),
        Option(
            help="Tokens that the converted model reads, such as 32k, if these are more than the teacher's positions. "
            "Windows and their states keep the teacher's, full-attention heads get further ones (--positions).",
            show_default="the teacher's",
        ),
    ] = None
    positions: Annotated[
        Literal["yarn", "nope", "cut"],
        Option(
            help="Positions of full-attention heads with --context. `yarn`: the teacher's, stretched (YaRN). `nope`: "
            "none, with scores that grow with the length; train such a model before use. `cut`: the teacher's, with "
            "longer distances than its own cut (ReRoPE); only with --cache-bits 16.",
            show_default="yarn",
        ),
    ] = "yarn"
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        Option(help=f"Dtype of the weights: {', '.join(DTYPES)}.", show_default="the teacher's"),
    ] = None
    shard_size: Annotated[
        int,
        BeforeValidator(lambda size: parse_size(size) if isinstance(size, str) else size),
        Option(help="Largest size of a weight file."),
        Field(ge=1, validate_default=True),
    ] = "5GB"  # type: ignore[assignment]  # bytes, once it is read
    dry_run: Annotated[bool, Option("--dry-run", help="Print the plan and stop; nothing is measured."), ASIDE] = False
    resume: Annotated[bool, Option("--resume", help="Complete an interrupted conversion."), ASIDE] = False
    overwrite: Annotated[
        bool,
        Option("--overwrite", help="Replace an existing folder OUT as soon as the new model is complete."),
        ASIDE,
    ] = False
    seed: Annotated[
        int,
        Option(help="Random seed for the choice of calibration text and for new weights."),
        Field(ge=0, le=2**32 - 1),
    ] = 0
    device: Annotated[
        str | None,
        Option(
            help="Device on which the layers are fitted, such as cpu, cuda or cuda:1.",
            show_default="a GPU if there is one",
        ),
        ASIDE,
    ] = None
    as_json: Annotated[bool, Option("--json", help="Print the plan or the result as JSON."), ASIDE] = False

    @model_validator(mode="before")
    @classmethod
    def _dependent_defaults(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Windows and states beside what `auto` chooses, and 4 bits where layers can have them; `layers` as `keep`."""
        layers = values.get("layers")
        if layers is not None:
            if "keep" in values:
                raise UserError("--layers: is the earlier form of --keep; leave it out")
            values = {**values, "layers": None, "keep": keep_of_layers(str(layers))}
        if values.get("pure") or values.get("profile") == "qwen3_5":  # whose layer has no window
            return values
        from deltanet_hf.mixers import MIXERS

        mixer = MIXERS.get(values.get("mixer", DEFAULT_MIXER))
        whole = mixer is not None and mixer.keeps_all_tokens
        chosen = {"keep": "none", "cache_bits": 16} if whole else {"keep": AUTO, "cache_bits": 4}
        return {**chosen, "mixer": DEFAULT_MIXER, **values}

    @model_validator(mode="after")
    def _consistent(self) -> ConvertOptions:
        """Raises UserError for a mixer that does not exist, and for options that would change nothing."""
        from deltanet_hf.mixers import MIXER_NAMES, MIXERS, unknown_mixer
        from deltanet_hf.mixers.mixed_heads import MixedHeads

        if self.mixer == MixedHeads.name:
            raise UserError(
                f"--mixer {self.mixer}: comes of a selection of key/value heads; give it as --keep FILE "
                "(deltanet-hf select --unit kv_head), and the mixer of the other heads here"
            )
        if self.mixer not in MIXER_NAMES and self.mixer not in MIXERS:
            raise UserError(f"--{unknown_mixer(self.mixer)}")
        if self.pure and self.model_fields_set & {"keep", "mixer"}:
            raise UserError("--pure: converts all layers to gated_deltanet; leave out --keep and --mixer")
        if self.profile == "qwen3_5" and self.changes:
            raise UserError(f"--set {self.changes[0]}: --profile qwen3_5 fixes the settings; leave out one of the two")
        if not self.training and self.profile == "qwen3_5":
            raise UserError(
                "--no-training: --profile qwen3_5 fixes the settings, with or without training; leave out one of the "
                "two"
            )
        if self.context is None and "positions" in self.model_fields_set:
            raise UserError(f"--positions {self.positions}: changes nothing without --context; add it, or leave it out")
        self.table(1, ())
        return self

    def table(self, num_layers: int, softmax: Iterable[int], teacher: PreTrainedConfig | None = None) -> LayerTable:
        """The layer table of the converted model.

        Args:
            num_layers: the teacher's number of decoder layers.
            softmax: indices of the layers that keep the teacher's attention.
            teacher: see `recommended`.
        """
        from deltanet_hf.models.layers import LayerTable

        kind, settings = self._kind(teacher)
        return self._completed(LayerTable.uniform(kind, settings, num_layers, set(softmax)), teacher)

    def head_table(
        self,
        num_layers: int,
        num_heads: int,
        softmax: Collection[tuple[int, int]],
        teacher: PreTrainedConfig | None = None,
    ) -> LayerTable:
        """The same for a choice of key/value heads: `softmax` are the (layer, head) that keep the teacher's attention.

        Raises:
            UserError: the profile is for an export, which has heads of one kind in each layer, or the mixer is for
                complete layers.
        """
        from deltanet_hf.models.layers import LayerTable

        if self._recommended()[0].keeps_all_tokens:
            raise UserError(
                f"--mixer {self.mixer}: keeps all tokens in every head, and --keep keeps single heads softmax; "
                "select whole layers (--unit layer)"
            )
        if self.profile == "qwen3_5":
            raise UserError(
                "--profile qwen3_5: the heads of one layer of Qwen3.5 are of one kind, --keep keeps single heads; "
                "select whole layers (--unit layer), or leave the profile out"
            )
        kind, settings = self._kind(teacher)
        return self._completed(LayerTable.by_heads(kind, settings, num_layers, num_heads, softmax), teacher)

    def _completed(self, table: LayerTable, teacher: PreTrainedConfig | None) -> LayerTable:
        """The table with what all of its layers share: bits, key order, and positions beyond the teacher's."""
        ordered = self.cache_bits == 4 and self.profile != "qwen3_5"
        table = replace(table, cache_bits=self.cache_bits, key_order=ordered)
        if self.context is None or teacher is None:
            return table
        from deltanet_hf.models.far_positions import FarPositions

        longest = int(teacher.max_position_embeddings)  # type: ignore[attr-defined]
        if self.context <= longest:
            raise UserError(
                f"--context {self.context}: the teacher reads {longest:,} tokens itself; give more, or leave it out"
            )
        return replace(table, positions=FarPositions(self.positions, longest, self.context))

    @property
    def automatic(self) -> bool:
        """Whether what keeps softmax attention is chosen by a budget."""
        return self.keep == AUTO or BUDGET.fullmatch(self.keep) is not None

    @property
    def takes_windows(self) -> bool:
        """Whether a selection may decide how long windows are."""
        from deltanet_hf.mixers import WINDOW_SUFFIX
        from deltanet_hf.mixers.window import WindowAttention

        has_windows = self.mixer == WindowAttention.name or self.mixer.endswith(WINDOW_SUFFIX)
        return has_windows and not any(change.startswith("window=") for change in self.changes)

    @property
    def plans_windows(self) -> bool:
        """Whether a budget in bytes may, see `Kind.takes_plan`."""
        from deltanet_hf.models.layers import Kind

        return self.takes_windows and Kind(*self._kind(None)).takes_plan

    def _kind(self, teacher: PreTrainedConfig | None) -> tuple[type[LayerKind], MixerSettings]:
        """The mixer and its settings."""
        kind, defaults = self._recommended(teacher)
        changes = changed_settings(self.changes, defaults, self.mixer)
        try:
            settings = kind.Settings.from_dict({**defaults.to_dict(), **changes}, "--set")
        except ValueError as error:
            raise UserError(str(error).replace("--set.", "--set: ", 1)) from None
        if getattr(settings, "output_norm", "") == "none" and not getattr(settings, "output_gate", True):
            raise UserError(
                "--set: output_norm=none and output_gate=false together leave no parameter that brings the output to "
                "the teacher's scale; keep one of the two"
            )
        return kind, settings

    def _recommended(self, teacher: PreTrainedConfig | None = None) -> tuple[type[LayerKind], MixerSettings]:
        from deltanet_hf.mixers import recommended

        try:
            return recommended(self.mixer, self.profile, self.training, teacher, "delayed=false" not in self.changes)
        except ValueError as error:
            raise UserError(f"--{error}") from None

    @property
    def torch_dtype(self) -> torch.dtype | None:
        return torch_dtype(self.dtype) if self.dtype else None

    def decisive(self) -> dict[str, Any]:
        """The options that affect the result, as JSON values; conversion_record.py records `keep` and text itself."""
        values = self.model_dump() | {"changes": changed_settings(self.changes, self._recommended()[1], self.mixer)}
        return {"set" if name == "changes" else name: value for name, value in values.items()}


def changed_settings(entries: Iterable[str], recommended: Any, mixer: str) -> dict[str, bool | int | str]:
    """Parses ['rope=false', 'conv_size=4'] into {'rope': False, 'conv_size': 4}.

    Args:
        entries: the values of `--set`.
        recommended: settings of the mixer, whose names are the keys that are allowed.
        mixer: its name, for messages.

    Raises:
        UserError: an entry without '=', an unknown key, or a key that is given twice.
    """
    known = [field.name for field in fields(recommended)]
    changes: dict[str, bool | int | str] = {}
    for entry in entries:
        key, separator, text = entry.partition("=")
        if not separator:
            raise UserError(f"--set {entry}: write it as KEY=VALUE, for example rope=false")
        if not known:
            raise UserError(f"--set {entry}: layers of this --mixer have no settings; leave it out")
        if key not in known:
            raise UserError(
                f"--set {entry}: unknown key '{key}' of --mixer {mixer}{did_you_mean(key, known)}; --set help lists "
                "the keys"
            )
        if key in changes:
            raise UserError(f"--set {entry}: {key} is set twice; give each key once")
        if text in ("true", "false"):
            changes[key] = text == "true"
        else:
            if (number := re.fullmatch(r"\d+", text, re.ASCII)) and len(text) > MOST_DIGITS:
                raise UserError(f"--set {key}: got a number of {len(text)} digits, expected at most {MOST_DIGITS}")
            changes[key] = int(text) if number else text
    return changes

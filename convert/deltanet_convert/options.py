"""The options of `deltanet-hf convert` and their checks."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field, model_validator
from transformers import PreTrainedConfig
from typer import Option

from deltanet_hf.errors import UserError
from deltanet_hf.mixers import MIXER_NAMES, MIXERS, WINDOW_SUFFIX, AttentionKind, LayerKind, recommended
from deltanet_hf.mixers.gated_deltanet import GatedDeltaNet
from deltanet_hf.mixers.layer.settings import MixerSettings
from deltanet_hf.mixers.mixed_heads import MixedHeads
from deltanet_hf.mixers.window import WindowAttention
from deltanet_hf.models.far_positions import FarPositions, PositionKind
from deltanet_hf.models.layers import LayerTable
from deltanet_kernels.packed_cache.layout import takes_key_order

from .calibration_text import FEWEST_TOKENS
from .command_options import ASIDE, DTYPES, Options, parse_size, parse_tokens
from .select.selection_file import Selection

MOST_TOKENS = 10**9
MOST_DIGITS = 9  # of a whole number in an option
LISTED_MIXERS = tuple(name for name in MIXER_NAMES if WINDOW_SUFFIX not in name)  # in help texts
AUTO = "auto"  # the value of `--layers`, alone or with a budget, by which convert chooses what stays softmax
DEFAULT_MIXER = "window"  # of the commands `convert` and `select`: ahead of a state in equal bytes (docs/results.md)


def set_keys() -> str:
    """The keys of `--set`, for the help text: those of every mixer with a state, then what single ones have."""
    common = [field.name for field in fields(GatedDeltaNet.Settings)]
    own = {
        mixer: [field.name for field in fields(kind.Settings) if field.name not in common]
        for mixer, kind in MIXERS.items()
        if mixer != MixedHeads.name
    }
    single = (f"{', '.join(names)} ({mixer})" for mixer, names in own.items() if names)
    return f"{', '.join(common)}; {'; '.join(single)}"


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
    layers: Annotated[
        str,
        Option(
            help="Layers to convert. `auto`: key/value heads keep softmax attention, and layers get windows, by a plan "
            "for a ninth of the teacher's bytes, which is shipped for SmolLM2-135M and measured for others on a GPU; "
            "without one, or where no windows can be planned (other mixers, 16 bits, layers that slide), a quarter of "
            "the layers, or half of those that do not slide. `all`: convert every layer. `every:N`: layers N-1, 2N-1, "
            "... keep softmax attention; `every:1` only measures keys, for 4 bits. `keep:3,7,11`: these layers keep "
            "it. `auto:5%@16k` or `auto:40MB@32k`: as much of the cache at this length, spent on heads and windows as "
            "`deltanet-hf select` does; `auto:25%` or `auto:7`: as many layers, measured; all slow without a GPU. "
            "FILE: the layers, or key/value heads, that keep it, such as the file that `deltanet-hf select` writes.",
            show_default="auto",
        ),
        ASIDE,
    ] = "all"
    mixer: Annotated[
        str,
        Option(
            help=f"Layer that replaces softmax attention, by default `{DEFAULT_MIXER}`: the same attention to the last "
            f"tokens only. Others: {', '.join(LISTED_MIXERS)}. `NAME+window` has a window and a state, for those that "
            "have a state.",
            show_default=False,
        ),
    ] = "gated_deltanet"
    pure: Annotated[
        bool,
        Option(
            "--pure",
            help="Convert every layer to Gated DeltaNet alone: no softmax attention, no window, a cache of one size at "
            "any length. After training it finds 1% of the needles in 2,048 tokens; windows of these bytes are better, "
            "untrained.",
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
            help="Change one setting of the mixer, for example `rope=false`. Repeat the option for several. Keys of "
            f"mixers with a state: {set_keys()}.",
            show_default=False,
        ),
    ] = ()
    fit_memory: Annotated[
        bool,
        Option(
            "--no-fit-memory",
            help="Start decay and write strength as in a model trained from scratch, instead of fitting them to the "
            "teacher.",
        ),
    ] = True
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
            "Windows keep the teacher's, whole heads get further ones (--positions). Only with --mixer window.",
            show_default="the teacher's",
        ),
    ] = None
    positions: Annotated[
        PositionKind,
        Option(
            help="Positions of whole heads with --context. `yarn`: the teacher's, stretched (YaRN). `nope`: none, with "
            "scores that grow with the length; train such a model before use. `cut`: the teacher's, with longer "
            "distances than its own cut (ReRoPE); only with --cache-bits 16."
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
    dry_run: Annotated[bool, Option("--dry-run", help="Print the plan and stop."), ASIDE] = False
    resume: Annotated[bool, Option("--resume", help="Complete an interrupted conversion."), ASIDE] = False
    overwrite: Annotated[
        bool,
        Option("--overwrite", help="Replace an existing folder OUT as soon as the new model is complete."),
        ASIDE,
    ] = False
    seed: Annotated[
        int,
        Option(help="Random seed for the choice of calibration text and for start values."),
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
        """Windows but for what `auto` chooses, and 4 bits, where the layers can have them."""
        if values.get("pure") or values.get("profile") == "qwen3_5":  # whose layer has no window
            return values
        keeps_all_tokens = issubclass(MIXERS.get(values.get("mixer", ""), object), AttentionKind)
        chosen = {"layers": "all", "cache_bits": 16} if keeps_all_tokens else {"layers": AUTO, "cache_bits": 4}
        return {**chosen, "mixer": DEFAULT_MIXER, **values}

    @model_validator(mode="after")
    def _consistent(self) -> ConvertOptions:
        """Raises UserError for a mixer that does not exist, and for options that would change nothing."""
        if self.mixer == MixedHeads.name:
            raise UserError(
                f"--mixer {self.mixer}: comes of a selection of key/value heads; give it as --layers FILE "
                "(deltanet-hf select --unit kv_head), and the mixer of the other heads here"
            )
        if self.mixer not in MIXER_NAMES and self.mixer not in MIXERS:
            raise UserError(f"--mixer: got '{self.mixer}', expected one of {', '.join(MIXER_NAMES)}")
        if self.pure and self.model_fields_set & {"layers", "mixer"}:
            raise UserError("--pure: converts all layers to gated_deltanet; leave out --layers and --mixer")
        if self.profile == "qwen3_5" and self.changes:
            raise UserError(f"--set {self.changes[0]}: --profile qwen3_5 fixes the settings; leave out one of the two")
        if not self.training and self.profile == "qwen3_5":
            raise UserError(
                "--no-training: --profile qwen3_5 fixes the settings, with or without training; leave out one of the "
                "two"
            )
        if self.context is None and "positions" in self.model_fields_set:
            raise UserError(f"--positions {self.positions}: changes nothing without --context; add it, or leave it out")
        kind = self._recommended()[0]
        if not self.fit_memory and not kind.fits_memory():
            raise UserError(f"--no-fit-memory: no decay is fitted in layers of --mixer {self.mixer}; leave it out")
        self.table(1, ())
        return self

    def for_heads_of(self, channels: int) -> ConvertOptions:
        """The options for a teacher with such heads: where they have no form in 4 bits, the default is 16."""
        if self.cache_bits != 4 or "cache_bits" in self.model_fields_set or takes_key_order(channels):
            return self
        return self.model_copy(update={"cache_bits": 16})

    def table(self, num_layers: int, softmax: Iterable[int], teacher: PreTrainedConfig | None = None) -> LayerTable:
        """The layer table of the converted model.

        Args:
            num_layers: the teacher's number of decoder layers.
            softmax: indices of the layers that keep the teacher's attention.
            teacher: see `recommended`.
        """
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
        if issubclass(self._recommended()[0], AttentionKind):
            raise UserError(
                f"--mixer {self.mixer}: keeps all tokens in every head, and --layers keeps single heads softmax; "
                "select whole layers (--unit layer)"
            )
        if self.profile == "qwen3_5":
            raise UserError(
                "--profile qwen3_5: the heads of one layer of Qwen3.5 are of one kind, --layers keeps single heads; "
                "select whole layers (--unit layer), or leave the profile out"
            )
        kind, settings = self._kind(teacher)
        return self._completed(LayerTable.by_heads(kind, settings, num_layers, num_heads, softmax), teacher)

    def table_of(self, kept: Iterable[int] | Selection, teacher: PreTrainedConfig) -> LayerTable:
        """The layer table for a teacher, of which these layers, or the units of a selection, keep their attention.

        The windows that a selection plans are those of the mixer, if it has windows and `--set` gives none.
        """
        if not isinstance(kept, Selection):
            return self.table(int(teacher.num_hidden_layers), kept, teacher)  # type: ignore[attr-defined]
        layers, heads = kept.num_hidden_layers, kept.num_key_value_heads
        if kept.unit == "kv_head":
            table = self.head_table(layers, heads, frozenset(kept.heads), teacher)
        else:
            table = self.table(layers, kept.layers, teacher)
        if kept.planned_windows is None or not self.takes_windows:
            return table
        return table.with_windows(kept.planned_windows)

    def _completed(self, table: LayerTable, teacher: PreTrainedConfig | None) -> LayerTable:
        """The table with what all of its layers share: bits, key order, and positions beyond the teacher's."""
        ordered = self.cache_bits == 4 and self.profile != "qwen3_5"
        table = replace(table, cache_bits=self.cache_bits, key_order=ordered)
        if self.context is None or teacher is None:
            return table
        longest = int(teacher.max_position_embeddings)  # type: ignore[attr-defined]
        if self.context <= longest:
            raise UserError(
                f"--context {self.context}: the teacher reads {longest:,} tokens itself; give more, or leave it out"
            )
        return replace(table, positions=FarPositions(self.positions, longest, self.context))

    @property
    def automatic(self) -> bool:
        """Whether `--layers auto` chooses what stays softmax."""
        return self.layers.partition(":")[0] == AUTO

    @property
    def takes_windows(self) -> bool:
        """Whether a selection may decide how long windows are."""
        has_windows = self.mixer == WindowAttention.name or self.mixer.endswith(WINDOW_SUFFIX)
        return has_windows and not any(change.startswith("window=") for change in self.changes)

    @property
    def plans_windows(self) -> bool:
        """Whether a budget in bytes may: a plan has windows without states."""
        return self.mixer == WindowAttention.name and self.takes_windows

    def _kind(self, teacher: PreTrainedConfig | None) -> tuple[type[LayerKind], MixerSettings]:
        """The mixer and its settings."""
        kind, defaults = self._recommended(teacher)
        changes = changed_settings(self.changes, defaults)
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
        try:
            return recommended(self.mixer, self.profile, self.training, teacher)
        except ValueError as error:
            raise UserError(f"--{error}") from None

    @property
    def torch_dtype(self) -> torch.dtype | None:
        return DTYPES[self.dtype] if self.dtype else None

    def decisive(self) -> dict[str, Any]:
        """The options that affect the result, as JSON values; conversion_record.py records layers and text itself."""
        values = self.model_dump() | {"changes": changed_settings(self.changes, self._recommended()[1])}
        return {"set" if name == "changes" else name: value for name, value in values.items()}


def changed_settings(entries: Iterable[str], recommended: Any) -> dict[str, bool | int | str]:
    """Parses ['rope=false', 'conv_size=4'] into {'rope': False, 'conv_size': 4}.

    Args:
        entries: the values of `--set`.
        recommended: settings of the mixer, whose names are the keys that are allowed.

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
            raise UserError(f"--set {entry}: unknown key '{key}'; the keys are {', '.join(known)}")
        if key in changes:
            raise UserError(f"--set {entry}: {key} is set twice; give each key once")
        if text in ("true", "false"):
            changes[key] = text == "true"
        else:
            if (number := re.fullmatch(r"\d+", text, re.ASCII)) and len(text) > MOST_DIGITS:
                raise UserError(f"--set {key}: got a number of {len(text)} digits, expected at most {MOST_DIGITS}")
            changes[key] = int(text) if number else text
    return changes

"""The options of `deltanet-hf convert` and their checks."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from deltanet_hf.errors import UserError
from deltanet_hf.mixers import MIXER_NAMES, MIXERS, WINDOW_SUFFIX, AttentionKind, LayerKind, recommended
from deltanet_hf.mixers.gated_deltanet import GatedDeltaNet
from deltanet_hf.mixers.layer.settings import MixerSettings
from deltanet_hf.mixers.mixed_heads import MixedHeads
from deltanet_hf.models.layers import LayerTable

from .calibration_text import FEWEST_TOKENS
from .select.selection_file import parse_selection

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
MOST_TOKENS = 10**9
MAX_LIST_BYTES = 1_000_000
MOST_DIGITS = 9  # of a whole number in an option
CACHE_BITS = (16, 8, 4)
PROFILES = ("faithful", "qwen3_5")
LISTED_MIXERS = tuple(name for name in MIXER_NAMES if WINDOW_SUFFIX not in name)  # in help texts
DEFAULT_MIXER = f"gated_deltanet{WINDOW_SUFFIX}"  # of the commands `convert` and `select`


@dataclass(frozen=True)
class ConvertOptions:
    """The options of one conversion.

    `softmax_layers` checks what depends on the teacher (layer indices).

    Raises:
        UserError: a value cannot be used, or two options contradict each other; the message names the option.
    """

    revision: str | None = None  # of a teacher on the hub; None for its main branch
    layers: str = "all"  # all | every:N | keep:3,7,11 | auto:25% | a file that lists the layers that stay softmax
    mixer: str = "gated_deltanet"  # a name in `MIXER_NAMES`
    profile: str = "faithful"  # one of `PROFILES`
    training: bool = True  # whether the model will be distilled; False takes the settings that are best without
    changes: tuple[str, ...] = ()  # "key=value": settings of the mixer that differ from the recommended ones
    fit_memory: bool = True  # False starts decay and write strength as in a model trained from scratch
    text: Path | None = None  # calibration text; None for the text shipped with deltanet-hf
    calibration_tokens: int = 8192
    cache_bits: int = 16  # of keys and values in the converted model's cache; one of `CACHE_BITS`
    dtype: str | None = None  # dtype of the converted weights; None for the teacher's
    shard_size: int = 5 * 10**9  # bytes
    dry_run: bool = False
    resume: bool = False
    overwrite: bool = False
    seed: int = 0
    device: str | None = None  # on which the layers are fitted; None for a GPU if there is one
    json: bool = False

    def __post_init__(self) -> None:
        if self.mixer == MixedHeads.name:
            raise UserError(
                f"--mixer {self.mixer}: comes of a selection of key/value heads; give it as --layers FILE "
                "(deltanet-hf select --unit kv_head), and the mixer of the other heads here"
            )
        if self.mixer not in MIXER_NAMES and self.mixer not in MIXERS:
            raise UserError(f"--mixer: got '{self.mixer}', expected one of {', '.join(MIXER_NAMES)}")
        if self.profile not in PROFILES:
            raise UserError(f"--profile: got '{self.profile}', expected one of {', '.join(PROFILES)}")
        if self.cache_bits not in CACHE_BITS:
            raise UserError(f"--cache-bits: got {self.cache_bits}, expected 16, 8 or 4")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise UserError(f"--dtype: got '{self.dtype}', expected one of {', '.join(DTYPES)}")
        if not FEWEST_TOKENS <= self.calibration_tokens <= MOST_TOKENS:
            raise UserError(
                f"--calibration-tokens: got {self.calibration_tokens}, expected a number from {FEWEST_TOKENS} to "
                f"{MOST_TOKENS:,}"
            )
        if self.shard_size < 1:
            raise UserError(f"--shard-size: got {self.shard_size} bytes, expected at least 1")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"--seed: got {self.seed}, expected a number from 0 to 2**32 - 1")
        self._check_contradictions()
        self.table(1, ())

    def _check_contradictions(self) -> None:
        """Raises UserError for options that would change nothing, or that the profile fixes."""
        if self.profile == "qwen3_5" and self.changes:
            raise UserError(f"--set {self.changes[0]}: --profile qwen3_5 fixes the settings; leave out one of the two")
        if not self.training and self.profile == "qwen3_5":
            raise UserError(
                "--no-training: --profile qwen3_5 fixes the settings, with or without training; leave out one of the "
                "two"
            )
        kind = self._recommended()[0]
        if not self.fit_memory and not kind.fits_memory():
            raise UserError(f"--no-fit-memory: no decay is fitted in layers of --mixer {self.mixer}; leave it out")

    def table(self, num_layers: int, softmax: Iterable[int], teacher: PreTrainedConfig | None = None) -> LayerTable:
        """The layer table of the converted model.

        Args:
            num_layers: the teacher's number of decoder layers.
            softmax: indices of the layers that keep the teacher's attention.
            teacher: see `recommended`.
        """
        return LayerTable.uniform(*self._kind(teacher), num_layers, set(softmax))

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
        return LayerTable.by_heads(*self._kind(teacher), num_layers, num_heads, softmax)

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
        """The options that affect the result, as JSON values.

        `revision`, `layers` and `text` are not among them, because conversion_record.py records their contents.
        """
        return {
            "mixer": self.mixer,
            "profile": self.profile,
            "training": self.training,
            "set": changed_settings(self.changes, self._recommended()[1]),
            "fit_memory": self.fit_memory,
            "calibration_tokens": self.calibration_tokens,
            "cache_bits": self.cache_bits,
            "dtype": self.dtype,
            "shard_size": self.shard_size,
            "seed": self.seed,
        }


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


def parse_size(value: str, option: str = "--shard-size") -> int:
    """Parses '5GB', '500 MiB' or '4096' into a number of bytes; `option` begins the error."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)\s*", value)
    if not match or match[2].upper() not in UNITS:
        raise UserError(f"{option}: got '{value}', expected a size such as 5GB or 500MB")
    size = int(float(match[1]) * UNITS[match[2].upper()])
    if size < 1:
        raise UserError(f"{option}: got '{value}', expected at least 1 byte")
    return size


def softmax_layers(spec: str, num_layers: int, teacher_config: Any = None) -> tuple[int, ...]:
    """Indices of the layers that keep softmax attention, ascending.

    Args:
        spec: `all` (none is kept), `every:N` (layers N-1, 2N-1, ... are kept), `keep:3,7,11`, or a file that lists the
            kept layers: what `deltanet-hf select` wrote, a JSON list, or numbers separated by commas or white space
            ('#' begins a comment). `auto:` is resolved in `select/for_convert.py`.
        num_layers: the teacher's number of decoder layers.
        teacher_config: the teacher's config, which a selection has to fit; None to leave that unchecked.

    Raises:
        UserError: the specification or the file cannot be read, or names layers that do not exist.
    """
    if spec == "all":
        return ()
    if spec.startswith("every:"):
        return _every(spec, num_layers)
    if spec.startswith("keep:"):
        return _check_indices(f"--layers {spec}", _numbers(spec.removeprefix("keep:"), "--layers"), num_layers)
    path = Path(os.path.expanduser(spec))
    if not os.path.exists(path):  # False also for what no file can be called
        raise UserError(f"--layers: got '{spec}', expected all, every:N, keep:3,7,11, auto:25% or an existing file")
    return _check_indices(f"--layers {path}", _from_file(path, teacher_config), num_layers)


def _every(spec: str, num_layers: int) -> tuple[int, ...]:
    value = spec.removeprefix("every:")
    if not re.fullmatch(r"\d{1,9}", value, re.ASCII) or int(value) < 2:
        raise UserError(f"--layers {spec}: N has to be a whole number of at least 2 (every:1 would convert nothing)")
    step = int(value)
    if step > num_layers:
        raise UserError(f"--layers {spec}: keeps none of the {num_layers} layers; say all, or a smaller N")
    return tuple(range(step - 1, num_layers, step))


def _numbers(text: str, where: str) -> list[int]:
    words = [word for word in re.split(r"[\s,]+", text) if word]
    for word in words:
        if not re.fullmatch(r"-?\d{1,9}", word, re.ASCII):
            raise UserError(f"{where}: '{word}' is not a layer index; list whole numbers such as 3,7,11")
    return [int(word) for word in words]


def _from_file(path: Path, teacher_config: Any) -> list[int]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_LIST_BYTES + 1)  # a device has no size
        if len(data) > MAX_LIST_BYTES:
            raise UserError(f"--layers {path}: too large for a list of layers; give a JSON list such as [3, 7, 11]")
        text = data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--layers {path}: cannot be read ({error}); give a text file of layer indices") from error
    if not text.lstrip().startswith(("[", "{")):
        return _numbers("\n".join(line.split("#")[0] for line in text.splitlines()), f"--layers {path}")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"--layers {path}: not valid JSON ({error}); write a list such as [3, 7, 11]") from error
    if isinstance(value, dict) and "format" in value:
        return _from_selection(f"--layers {path}", value, teacher_config)
    if not isinstance(value, list) or any(type(item) is not int for item in value):
        raise UserError(
            f"--layers {path}: expected a JSON list of layer indices such as [3, 7, 11], or the file that deltanet-hf "
            "select wrote"
        )
    return value


def _from_selection(where: str, value: dict[str, Any], teacher_config: Any) -> list[int]:
    selection = parse_selection(value, where)
    if teacher_config is not None:
        selection.check_teacher(where, teacher_config)
    if selection.unit != "layer":
        raise UserError(
            f"{where}: key 'unit' is '{selection.unit}', which names heads; for whole layers, run deltanet-hf select "
            "with --unit layer"
        )
    return list(selection.layers)


def _check_indices(where: str, indices: list[int], num_layers: int) -> tuple[int, ...]:
    if not indices:
        raise UserError(f"{where}: lists no layer; say --layers all to convert every one")
    for index in indices:
        if not 0 <= index < num_layers:
            raise UserError(f"{where}: layer {index} does not exist; the teacher has layers 0 to {num_layers - 1}")
        if indices.count(index) > 1:
            raise UserError(f"{where}: layer {index} is listed twice; list each kept layer once")
    if len(indices) == num_layers:
        raise UserError(f"{where}: keeps all {num_layers} layers; leave at least one to convert")
    return tuple(sorted(indices))

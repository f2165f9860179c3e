"""The conversion in Python: `convert`, `plan` and `select` do what the commands do, and print nothing."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .options import ConvertOptions

if TYPE_CHECKING:
    from .conversion_plan import Plan
    from .select.selection_file import Selection


def convert(
    teacher: str | Path,
    out: str | Path,
    *,
    keep: str | None = None,
    mixer: str | None = None,
    set: Mapping[str, bool | int | str] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Convert a pretrained softmax model and write the result, which `AutoModelForCausalLM` loads, to a folder.

    Examples:
        >>> from deltanet_convert import convert
        >>> report = convert("SmolLM2-135M", "student", keep="every:4", mixer="gated_deltanet")  # doctest: +SKIP

    Args:
        teacher: a folder, a Hub id or a .gguf file.
        out: the folder to write.
        keep: what keeps softmax attention, such as "every:4", "25%" or "5%@16k"; by default as in the command.
        mixer: the layer in its place, such as "gated_deltanet" or "gated_deltanet+window".
        set: settings of the mixer, such as {"allow_neg_eigval": True}.
        options: further options of `deltanet-hf convert`, among them text, calibration_tokens, cache_bits, dtype,
            device, seed, profile, pure, overwrite and resume; training=False is `--no-training`.

    Returns:
        The contents of conversion.json: the plan, the errors of the layers, and the comparison with the teacher.

    Raises:
        UserError: an option, the teacher or the folder cannot be used.
        QualityError: a check of the result failed.
    """
    from deltanet_hf.publish import output_path

    from .conversion import convert as run
    from .job import prepare, sole_conversion

    folder, chosen = output_path(Path(out)), _options(keep, mixer, set, options)
    with sole_conversion(folder):
        return run(prepare(str(teacher), folder, chosen), folder, lambda *step: None)


def plan(
    teacher: str | Path,
    *,
    keep: str | None = None,
    mixer: str | None = None,
    set: Mapping[str, bool | int | str] | None = None,
    **options: Any,
) -> Plan:
    """Plan a conversion, as `deltanet-hf convert --dry-run` does: layers, parameters, memory, and bytes of the cache.

    Examples:
        >>> from deltanet_convert import plan
        >>> plan("SmolLM2-135M-Instruct", keep="every:4", mixer="gated_deltanet").cache_bytes  # doctest: +SKIP

    Args:
        teacher, keep, mixer, set, options: as for `convert`. Nothing is measured.

    Returns:
        The plan; `cache_bytes` has the bytes of the teacher's and the converted model's cache by context length.

    Raises:
        UserError: as `convert`.
    """
    from .job import prepare, sole_conversion

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        with sole_conversion(out):
            return prepare(str(teacher), out, _options(keep, mixer, set, {**options, "dry_run": True})).plan


def select(
    teacher: str | Path, out: str | Path = "selection.json", *, keep: str | None = None, **options: Any
) -> Selection:
    """Choose what keeps softmax attention, by what it is worth for recall, and write the choice to a file.

    Examples:
        >>> from deltanet_convert import convert, select
        >>> select("SmolLM2-135M-Instruct", "heads.json", keep="10%", unit="kv_head")  # doctest: +SKIP
        >>> convert("SmolLM2-135M-Instruct", "student", keep="heads.json")  # doctest: +SKIP

    Args:
        teacher: as for `convert`.
        out: the file to write, for `keep` of `convert`; a plot is written beside it.
        keep: how much to keep, such as "25%", "7" or "5%@16k"; by default as in the command.
        options: further options of `deltanet-hf select`, among them unit, method, mixer, probes, length, seed, device.

    Returns:
        The contents of the file; `kept` are the layers, or pairs (layer, head).

    Raises:
        UserError: an option, the teacher or the file cannot be used.
    """
    from .select.command import selected
    from .select.run import unseen
    from .select.select_options import SelectOptions

    chosen = SelectOptions(**{"out": Path(out), **({} if keep is None else {"keep": keep}), **options})
    return selected(str(teacher), chosen, unseen)[0]


def _options(
    keep: str | None, mixer: str | None, settings: Mapping[str, bool | int | str] | None, options: dict[str, Any]
) -> ConvertOptions:
    """The options of a conversion, with the defaults of the command."""
    named = {"keep": keep, "mixer": mixer}
    given = {name: value for name, value in named.items() if value is not None}
    changes = tuple(f"{key}={str(value).lower()}" for key, value in (settings or {}).items())
    return ConvertOptions(**given, **({"changes": changes} if changes else {}), **options)

"""Decides from a config whether a model can be exported to the Qwen3.5 architecture, and lists the obstacles.

No weight is read. `export --check` prints the list, `export` refuses by it, and `convert --profile qwen3_5` applies it
to a teacher before the conversion.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from deltanet_hf.errors import UserError
from deltanet_hf.mixers.layer.masks import sliding_window
from deltanet_hf.model_types import family_type
from deltanet_hf.models.layers import Kind, LayerTable

from ..start.norm_config import WITHOUT_NORMS, needs_norms
from ..views.plan_view import index_ranges, shown_windows
from .rotary import WRITTEN, unlike_transformers
from .slots import uneven_note

FORMATS = ("transformers", "mlx", "gguf")
QWEN3_5_FAMILY = "qwen3_5_text"
# Families whose decoder layer equals Qwen3.5's except for the attention: an RMSNorm before attention and before MLP, a
# gated MLP, no extra scalings.
SAME_SKELETON = ("llama", "mistral", "qwen2", "qwen3", "smollm3", QWEN3_5_FAMILY)
CONVERT_AGAIN = "convert again with --profile qwen3_5"
WIRING = {
    "rope": (False, "Qwen3.5's linear layers have no rotary embedding"),
    "qk_activation": ("silu", "Qwen3.5 applies SiLU to q and k"),
    "v_activation": ("silu", "Qwen3.5 applies SiLU to v"),
    "output_norm": ("shared", "Qwen3.5 has one output norm weight for all heads"),
    "output_gate": (True, "Qwen3.5 gates the output"),
    "output_gate_rank": (0, "Qwen3.5's output gate is a full matrix"),
    "gate_bias": (False, "Qwen3.5's gates have no bias"),
    "shared_kv": (False, "Qwen3.5's linear layers have a value projection per state"),
    "conv_on": ("qkv", "Qwen3.5 convolves q, k and v"),
    "k_offset": (False, "Qwen3.5 subtracts nothing from the keys"),
    "allow_neg_eigval": (False, "Qwen3.5's write strengths are at most 1"),
    "state_dtype": ("float32", "Qwen3.5's runtimes keep the state in float32"),
}


@dataclass(frozen=True)
class Obstacle:
    """One reason why a model cannot be exported in some of the formats, with the remedy."""

    name: str
    problem: str
    remedy: str
    formats: tuple[str, ...] = FORMATS

    def __str__(self) -> str:
        return f"{self.name}: {self.problem}; {self.remedy}"


def export_obstacles(config: PreTrainedConfig) -> list[Obstacle]:
    """Lists the obstacles to exporting a converted model; empty if every format is possible."""
    table = LayerTable.of(config)
    return [*_skeleton(config), *_converted(config, table.converted), *_softmax(config, table.softmax, False)]


def teacher_obstacles(teacher_config: PreTrainedConfig, softmax: list[int]) -> list[Obstacle]:
    """Those of `teacher_limits` that leave no format."""
    return [found for found in teacher_limits(teacher_config, softmax) if found.formats == FORMATS]


def teacher_limits(teacher_config: PreTrainedConfig, softmax: list[int]) -> list[Obstacle]:
    """The obstacles to exporting a teacher after a conversion with `--profile qwen3_5`, also those of single formats.

    Args:
        softmax: the layers that keep softmax attention; the profile inserts missing q/k norms into them.
    """
    return [*_skeleton(teacher_config), *_softmax(teacher_config, softmax, needs_norms(teacher_config, softmax))]


def check_exportable(name: str, teacher_config: PreTrainedConfig, softmax: list[int]) -> list[str]:
    """Checks whether a teacher can be exported after a conversion with `--profile qwen3_5`.

    Args:
        name: of the teacher, for messages.
        softmax: the layers that keep softmax attention.

    Returns:
        Notes about formats in which it could not be written, or in which it would cost more.

    Raises:
        UserError: no format is possible; the message lists every obstacle and its remedy.
    """
    found = teacher_limits(teacher_config, softmax)
    refused = [obstacle for obstacle in found if obstacle.formats == FORMATS]
    if refused:
        listed = "".join(f"\n  {obstacle} ({', '.join(obstacle.formats)})" for obstacle in refused)
        raise UserError(f"{name}: --profile qwen3_5: the result could not be exported:{listed}")
    notes = [f"Not for {' and '.join(obstacle.formats)}: {obstacle}" for obstacle in found]
    uneven = uneven_note(softmax, int(teacher_config.num_hidden_layers))  # type: ignore[attr-defined]
    return notes if uneven is None else [*notes, uneven]


def _skeleton(config: Any) -> list[Obstacle]:
    family = family_type(config)
    if family not in SAME_SKELETON:
        others = ", ".join(SAME_SKELETON)
        return [
            Obstacle(
                "family",
                f"a {family} decoder layer has norms, scalings, projections or experts that Qwen3.5 does not have",
                f"serve it with deltanet_hf, or convert a teacher of one of the families {others}",
            )
        ]
    found = []
    if config.hidden_act != "silu":
        problem = f"the MLP's activation is {config.hidden_act}, Qwen3.5's is silu for MLP and convolution"
        found.append(Obstacle("hidden_act", problem, "serve it with deltanet_hf"))
    if getattr(config, "mlp_bias", False):
        found.append(Obstacle("mlp_bias", "Qwen3.5's MLP has no biases", "serve it with deltanet_hf"))
    if getattr(config, "attention_bias", False) and family != QWEN3_5_FAMILY:
        problem = "the teacher's output projection has a bias, Qwen3.5's has none"
        found.append(Obstacle("attention_bias", problem, "serve it with deltanet_hf"))
    return found


def _converted(config: Any, kinds: Mapping[int, Kind]) -> list[Obstacle]:
    """Obstacles in the converted layers, by index: one for all layers with the same reason."""
    found: dict[tuple[str, str], dict[int, Any]] = {}
    for layer, kind in kinds.items():
        for key, why, value in _settings(config, kind):
            found.setdefault((key, why), {})[layer] = value
    obstacles = []
    for (key, why), values in found.items():
        has = [*dict.fromkeys(values.values())]
        shown = shown_windows(has) if key == "window" else ", ".join(map(str, has))
        name = f"{key} of layers {index_ranges([*values])}"
        obstacles.append(Obstacle(name, f"{why}, the model has {shown}", CONVERT_AGAIN))
    return obstacles


def _settings(config: Any, kind: Kind) -> Iterator[tuple[str, str, Any]]:
    """The settings of a kind of layer that are obstacles: the key, what Qwen3.5 has, and the value."""
    family, settings = family_type(config), kind.settings
    if kind.mixer.name != "gated_deltanet":
        yield "mixer", "Qwen3.5's linear layers are Gated DeltaNet", kind.mixer.title
        return
    if settings.window:  # whose other settings are those of a layer with a window
        yield "window", "Qwen3.5's linear layers have no window beside the state", settings.window
        return
    for key, (wanted, why) in WIRING.items():
        if getattr(settings, key) != wanted:
            yield key, why, getattr(settings, key)
    if settings.conv_size == 0:
        yield "conv_size", "Qwen3.5 has a short convolution on q, k and v", "none"
    if settings.qk_norm and family == "qwen3":
        yield "qk_norm", "Qwen3.5's linear layers have no learned q/k norms", "them"
    if settings.qkv_bias and (family == "qwen2" or getattr(config, "attention_bias", False)):
        yield "qkv_bias", "Qwen3.5's q, k and v have no biases", "them"


def _softmax(config: Any, kept: list[int], normed: bool) -> list[Obstacle]:
    """Obstacles in the layers that keep softmax attention; `normed`: q/k norms will be inserted into them."""
    family = family_type(config)
    if not kept or family not in SAME_SKELETON:
        return []
    if family not in ("qwen3", QWEN3_5_FAMILY) and not normed:
        remedy = "convert every layer (--keep none), or use a Qwen3 teacher"
        if family in WITHOUT_NORMS:
            remedy = f"{CONVERT_AGAIN}, which inserts them"
        problem = f"layers {kept} keep {family}'s softmax attention, and Qwen3.5's always has q/k norms"
        return [Obstacle("kept layers", problem, remedy)]
    found = []
    longest = int(config.max_position_embeddings)
    sliding = [i for i in kept if (sliding_window(config, i) or longest) < longest]
    if sliding:
        problem = f"kept layers {sliding} attend within a sliding window, Qwen3.5's attend to all tokens"
        remedy = "convert those layers too, or set sliding_window to null if no text is longer than the window"
        found.append(Obstacle("sliding window", problem, remedy))
    rope = config.rope_parameters or {}
    if without := unlike_transformers(rope):
        problem = f"the kept layers' rotary embedding is {_rotary(rope)}, which these runtimes are not known to compute"
        others = " or ".join(style for style in FORMATS if style not in without)
        remedy = f"use --format {others}, or set rope_parameters back to default for short contexts"
        found.append(Obstacle("rope_parameters", problem, remedy, without))
    return found


def _rotary(rope: dict[str, Any]) -> str:
    """Describes rope_parameters, such as 'yarn with factor 4.0, truncate False'."""
    values = [f"{key} {value}" for key, value in rope.items() if key not in WRITTEN and value is not None]
    return f"{rope.get('rope_type', 'default')} with {', '.join(values)}"

"""Who can be exported to the Qwen3.5 architecture, and what stands in the way of the others.

Everything is decided from the config, before a weight is read: `export --check` prints the list, `export` refuses by
it, and `convert --for native` asks it about a teacher that is still to be converted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from deltanet_hf.mixers.masks import sliding_window
from deltanet_hf.models.families import PREFIX
from deltanet_hf.models.layers import Kind, LayerTable

from ..start.norm_target import WITHOUT_NORMS, needs_norms
from .rotary import WRITTEN, unlike_transformers

FORMATS = ("transformers", "mlx", "gguf")
NATIVE_FAMILY = "qwen3_5_text"
# Families whose decoder layer, attention aside, is Qwen3.5's: two RMSNorms before, a gated MLP, no extra scalings.
SAME_SKELETON = ("llama", "mistral", "qwen2", "qwen3", "smollm3", NATIVE_FAMILY)
CONVERT_AGAIN = "convert again with --for native"
WIRING = {
    "rope": (False, "the target's linear layers have no rotary embedding"),
    "qk_activation": ("silu", "the target applies SiLU to q and k"),
    "v_activation": ("silu", "the target applies SiLU to v"),
    "output_norm": ("shared", "the target has one output norm weight for all heads"),
    "output_gate": (True, "the target gates its output"),
    "gate_bias": (False, "the target's gates have no bias"),
}


@dataclass(frozen=True)
class Obstacle:
    """One reason why a model cannot be written in some of the formats, and what to do about it."""

    name: str
    problem: str
    remedy: str
    formats: tuple[str, ...] = FORMATS

    def __str__(self) -> str:
        return f"{self.name}: {self.problem}; {self.remedy}"


def family_name(config: PreTrainedConfig) -> str:
    """The teacher's model_type of a converted model's config (or of a teacher's)."""
    return str(config.model_type).removeprefix(PREFIX)


def export_obstacles(config: PreTrainedConfig) -> list[Obstacle]:
    """Everything that stands between a converted model and the export formats; empty when it can be exported."""
    table = LayerTable.of(config)
    settings = [obstacle for name, kind in table.kinds.items() for obstacle in _settings(config, name, kind)]
    return [*_skeleton(config), *settings, *_kept(config, table.softmax, False)]


def planned_obstacles(teacher_config: PreTrainedConfig, softmax: list[int]) -> list[Obstacle]:
    """The same for a teacher that is still to be converted by `--profile qwen3_5`, which inserts missing q/k norms.

    Args:
        softmax: the layers that are to keep softmax attention.
    """
    return [*_skeleton(teacher_config), *_kept(teacher_config, softmax, needs_norms(teacher_config, softmax))]


def _skeleton(config: Any) -> list[Obstacle]:
    family = family_name(config)
    if family not in SAME_SKELETON:
        others = ", ".join(SAME_SKELETON)
        return [
            Obstacle(
                "family",
                f"a {family} decoder layer has norms, scalings or projections that the target has no place for",
                f"serve it with deltanet_hf, or convert a teacher of one of the families {others}",
            )
        ]
    found = []
    if config.hidden_act != "silu":
        problem = f"the MLP's activation is {config.hidden_act}, the target's is silu for MLP and convolution alike"
        found.append(Obstacle("hidden_act", problem, "serve it with deltanet_hf"))
    if getattr(config, "mlp_bias", False):
        found.append(Obstacle("mlp_bias", "the target's MLP has no biases", "serve it with deltanet_hf"))
    if getattr(config, "attention_bias", False) and family != NATIVE_FAMILY:
        problem = "the teacher's output projection has a bias, the target's has none"
        found.append(Obstacle("attention_bias", problem, "serve it with deltanet_hf"))
    return found


def _settings(config: Any, name: str, kind: Kind) -> list[Obstacle]:
    """Obstacles in a kind of layer, called `name` in the layer table."""
    family, where = family_name(config), f"deltanet.kinds.{name}"
    if kind.mixer.name != "gated_deltanet":
        problem = f"the target's linear layers are Gated DeltaNet, the model's {kind.mixer.title}"
        return [Obstacle(f"{where}.mixer", problem, CONVERT_AGAIN)]
    settings = kind.settings
    found = [
        Obstacle(f"{where}.{key}", f"{why}, the model has {getattr(settings, key)!r}", CONVERT_AGAIN)
        for key, (wanted, why) in WIRING.items()
        if getattr(settings, key) != wanted
    ]
    if settings.conv_size == 0:
        problem = "the target has a short convolution on q, k and v, the model none"
        found.append(Obstacle(f"{where}.conv_size", problem, CONVERT_AGAIN))
    if settings.qk_norm and family == "qwen3":
        problem = "the target's linear layers have no learned q/k norms"
        found.append(Obstacle(f"{where}.qk_norm", problem, CONVERT_AGAIN))
    if settings.qkv_bias and (family == "qwen2" or getattr(config, "attention_bias", False)):
        problem = "q, k and v have biases, the target's have none"
        found.append(Obstacle(f"{where}.qkv_bias", problem, CONVERT_AGAIN))
    return found


def _kept(config: Any, kept: list[int], normed: bool) -> list[Obstacle]:
    """`normed`: q/k norms are going to be inserted into the kept layers."""
    family = family_name(config)
    if not kept or family not in SAME_SKELETON:
        return []
    if family not in ("qwen3", NATIVE_FAMILY) and not normed:
        remedy = "convert every layer (--layers all), or take a Qwen3 teacher"
        if family in WITHOUT_NORMS:
            remedy = f"{CONVERT_AGAIN}, which inserts them"
        problem = f"layers {kept} keep {family}'s softmax attention, and the target's always has q/k norms"
        return [Obstacle("kept layers", problem, remedy)]
    found = []
    longest = int(config.max_position_embeddings)
    sliding = [i for i in kept if (sliding_window(config, i) or longest) < longest]
    if sliding:
        problem = f"kept layers {sliding} attend within a sliding window, the target's attend to everything"
        remedy = "convert those layers too, or set sliding_window to null where no text is longer than it"
        found.append(Obstacle("sliding window", problem, remedy))
    rope = config.rope_parameters or {}
    if without := unlike_transformers(rope):
        problem = f"the kept layers' rotary embedding is {_rotary(rope)}, which these runtimes are not known to compute"
        others = " or ".join(style for style in FORMATS if style not in without)
        remedy = f"take --format {others}, or set rope_parameters back to default for short contexts"
        found.append(Obstacle("rope_parameters", problem, remedy, without))
    return found


def _rotary(rope: dict[str, Any]) -> str:
    """'yarn with factor 4.0, truncate False'."""
    values = [f"{key} {value}" for key, value in rope.items() if key not in WRITTEN and value is not None]
    return f"{rope.get('rope_type', 'default')} with {', '.join(values)}"

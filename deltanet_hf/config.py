"""What a Gated DeltaNet layer looks like: the `deltanet` entry of a model's config.json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

Profile = Literal["native", "teacher"]
Activation = Literal["silu", "none"]
OutputNorm = Literal["none", "shared", "per_head"]
INSERTED_QK_NORMS = "inserted_qk_norms"  # key of config.json: kept layers whose q/k norms are not the teacher's


@dataclass(frozen=True)
class DeltaNetOptions:
    """Shape and wiring of the converted layers.

    Two presets cover the common cases: `native` is the layer of Qwen3.5 (exportable to runtimes that know it),
    `teacher` keeps everything that the teacher's attention had.
    """

    profile: Profile
    layers: tuple[int, ...]  # indices of the converted decoder layers; the others keep softmax attention
    expand_kv: bool  # key/value heads repeated to the number of query heads: one state per query head
    rope: bool  # the teacher's rotary embedding on q and k
    qk_norm: bool  # the teacher's learned q/k norms, where it has them
    conv_size: int  # taps of the causal depthwise convolution on q|k|v; 0 for none
    qk_activation: Activation
    v_activation: Activation
    output_norm: OutputNorm  # RMSNorm over each head's output, its weight shared by the heads or not
    output_gate: bool  # the output is multiplied by silu(g_proj(x))
    gate_bias: bool  # biases on b_proj (write strength) and g_proj (output gate)
    householder_steps: int = 1  # writes (key, value, strength) per token: n_h of DeltaProduct; above 1 `teacher` only

    @classmethod
    def native(cls, layers: Iterable[int]) -> DeltaNetOptions:
        """The layer of Qwen3.5's GatedDeltaNet: no RoPE, short convolution and SiLU on q, k and v, no biases."""
        return cls(
            profile="native",
            layers=tuple(layers),
            expand_kv=True,
            rope=False,
            qk_norm=False,
            conv_size=4,
            qk_activation="silu",
            v_activation="silu",
            output_norm="shared",
            output_gate=True,
            gate_bias=False,
        )

    @classmethod
    def teacher(cls, layers: Iterable[int]) -> DeltaNetOptions:
        """RoPE, learned q/k norms and biases stay; gates get biases; the output norm has a weight per head.

        The convolution begins as an identity. SiLU on q and k gives the better start; without it (`qk_activation`
        "none") a model distilled on 10M tokens or more comes closer to its teacher (recipes/README.md, "Ablations").
        """
        return cls(
            profile="teacher",
            layers=tuple(layers),
            expand_kv=True,
            rope=True,
            qk_norm=True,
            conv_size=4,
            qk_activation="silu",
            v_activation="none",
            output_norm="per_head",
            output_gate=True,
            gate_bias=True,
        )

    @classmethod
    def preset(cls, profile: str, layers: Iterable[int], **changes: Any) -> DeltaNetOptions:
        """The preset named `profile`, with single options changed (ablations)."""
        if profile not in get_args(Profile):
            raise ValueError(f"deltanet.profile: got {profile!r}, expected one of {', '.join(get_args(Profile))}")
        base = cls.native(layers) if profile == "native" else cls.teacher(layers)
        return cls.from_dict({**base.to_dict(), **changes})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DeltaNetOptions:
        """Read a config's `deltanet` entry. Raises ValueError naming the key that is missing, unknown or wrong."""
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"deltanet.{unknown[0]}: unknown key; known keys are {', '.join(sorted(known))}")
        required = {f.name for f in fields(cls) if f.default is MISSING}
        if missing := sorted(required - set(values)):
            raise ValueError(f"deltanet.{missing[0]}: missing key; add it to the config's `deltanet` entry")
        options = cls(**{**values, "layers": tuple(values["layers"])})
        options._validate()
        return options

    def _validate(self) -> None:
        choices = {
            "profile": get_args(Profile),
            "qk_activation": get_args(Activation),
            "v_activation": get_args(Activation),
            "output_norm": get_args(OutputNorm),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"deltanet.{name}: got {getattr(self, name)!r}, expected one of {', '.join(allowed)}")
        for name in ("expand_kv", "rope", "qk_norm", "output_gate", "gate_bias"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"deltanet.{name}: got {getattr(self, name)!r}, expected true or false")
        if type(self.conv_size) is not int or self.conv_size not in (0, 2, 3, 4):
            raise ValueError(f"deltanet.conv_size: got {self.conv_size!r}, expected 0 (none), 2, 3 or 4")
        if type(self.householder_steps) is not int or self.householder_steps < 1:
            raise ValueError(f"deltanet.householder_steps: got {self.householder_steps!r}, expected 1, 2 or more")
        if self.householder_steps > 1 and self.profile == "native":
            raise ValueError(
                f"deltanet.householder_steps: got {self.householder_steps} in the native profile, whose runtimes write "
                "once per token; take the teacher profile, or 1"
            )
        if any(type(i) is not int or i < 0 for i in self.layers) or len(set(self.layers)) != len(self.layers):
            raise ValueError(f"deltanet.layers: got {list(self.layers)}, expected distinct non-negative layer indices")

    def with_layers(self, layers: Iterable[int]) -> DeltaNetOptions:
        """The same layer, at other places."""
        return replace(self, layers=tuple(layers))

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, as it stands in config.json."""
        return {**asdict(self), "layers": list(self.layers)}

"""The setting of a model that reads further than its teacher, `positions` in the `deltanet` entry of config.json.

    {"kind": "yarn", "teacher": 8192, "context": 32768}

Windows, and states of what has left them, keep the teacher's positions, and sinks are seen as from a bounded one; whole
heads get positions that reach as far as the context. `mixers/layer/layer_call.py` says what layers are given.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from deltanet_hf.errors import UserError
from deltanet_hf.mixers.attention.cut_distances import CutSoftmax
from deltanet_hf.mixers.attention.family_attention import kind_of
from deltanet_hf.mixers.attention.far_positions import FarSoftmax, ScaledSoftmax
from deltanet_hf.mixers.attention.paired_class import paired_class
from deltanet_hf.mixers.layer.layer_call import Angles
from deltanet_hf.mixers.layer.layer_kind import branches_of
from deltanet_hf.mixers.layer.masks import sliding_window
from deltanet_hf.mixers.layer.settings import check_at_least, check_choice
from deltanet_hf.model_types import HALF_ANGLES, family_type
from deltanet_hf.models.families import caps_scores

PositionKind = Literal["yarn", "nope", "cut"]
FURTHEST_SINK = 4096  # positions from which sinks are seen, at most
DEFAULT_KEYS = ("rope_theta", "partial_rotary_factor")  # of the rotary positions `default`


@dataclass(frozen=True)
class FarPositions:
    """How far a model reads, and the positions of its whole heads.

    `yarn`: YaRN (arXiv 2309.00071) with the factor context / teacher. `nope`: none, and queries at position p, from 0,
    are multiplied by log(p + a) / log a with a = the teacher's positions (HALO, SWAN): a head without positions spreads
    over longer texts unless its scores grow. `cut`: the teacher's, with longer distances than it was trained on cut
    (`mixers/attention/cut_distances.py`).
    """

    kind: PositionKind
    teacher: int  # positions that the teacher was trained on
    context: int  # those that the model reads

    @classmethod
    def from_dict(cls, values: Any) -> FarPositions:
        """Read the setting.

        Raises:
            ValueError: naming the key that is wrong.
        """
        where = "deltanet.positions"
        if not isinstance(values, Mapping) or set(values) != {"kind", "teacher", "context"}:
            raise ValueError(f"{where}: got {values!r}, expected the keys kind, teacher and context")
        check_choice(where, "kind", values["kind"], get_args(PositionKind))
        check_at_least(where, "teacher", values["teacher"], 2)
        check_at_least(where, "context", values["context"], values["teacher"] + 1)
        return cls(**values)

    def sink_bound(self, reach: int) -> int:
        """The furthest position from which sinks are seen, where windows hold them up to the position `reach`."""
        return max(reach, min(FURTHEST_SINK, self.teacher // 2))

    @property
    def title(self) -> str:
        """The positions of whole heads, for people."""
        titles = {"yarn": f"YaRN x {self.context / self.teacher:g}", "nope": "no positions", "cut": "cut distances"}
        return titles[self.kind]


class FarRotary(nn.Module):
    """Stands for the family's rotary embedding `own`; the results are as in `mixers/layer/layer_call.py`."""

    def __init__(self, own: nn.Module, positions: FarPositions, sink_bound: int, config: PreTrainedConfig) -> None:
        super().__init__()
        self.own, self.positions, self.sink_bound = own, positions, sink_bound
        self.whole: Any = None
        if positions.kind == "yarn":
            self.whole = type(own)(config=yarn_config(config, positions.teacher, positions.context))  # type: ignore[call-arg]
            if self.whole.inv_freq.shape != own.inv_freq.shape:
                raise UserError(
                    "context: the family ignores the config's partial_rotary_factor, and YaRN does not; set it to 1.0"
                )

    @property
    def rope_type(self) -> str:
        """By the names of transformers: `dynamic` depends on the length of a text, so that no step is captured."""
        return "dynamic" if self.positions.kind == "cut" else "default"

    def forward(self, x: Tensor, position_ids: Tensor) -> Angles:
        """x gives dtype and device; position_ids [B or 1, T]."""
        cos, sin = self.own(x, position_ids)
        turn = self.own(x, position_ids.clamp_max(self.sink_bound) - position_ids)
        if self.whole is not None:
            return cos, sin, *self.whole(x, position_ids), *turn
        rotated_by_nothing = torch.ones_like(cos), torch.zeros_like(sin)
        if self.positions.kind == "cut":
            return cos, sin, *rotated_by_nothing, *turn, position_ids
        a = self.positions.teacher
        scale = (position_ids + a).float().log() / math.log(a)
        return cos, sin, *rotated_by_nothing, *turn, scale


def yarn_config(config: PreTrainedConfig, teacher: int, context: int) -> PreTrainedConfig:
    """A copy of a family's configuration with YaRN from the teacher's positions to those of the context."""
    changed: Any = copy.deepcopy(config)
    changed.max_position_embeddings = context
    if getattr(config, "head_dim", 0) is None:  # Mixtral's, which transformers takes for a number
        changed.head_dim = changed.hidden_size // changed.num_attention_heads
    changed.rope_parameters = {  # without keys that mean nothing to default positions, and something to YaRN
        **{key: value for key, value in changed.rope_parameters.items() if key in DEFAULT_KEYS},
        "rope_type": "yarn",
        "factor": context / teacher,
        "original_max_position_embeddings": teacher,
    }
    return changed  # type: ignore[no-any-return]


FRONTS: dict[PositionKind, type[FarSoftmax]] = {"yarn": FarSoftmax, "nope": ScaledSoftmax, "cut": CutSoftmax}
"""The class that is put before a family's attention, by the kind of positions."""


def make_far(attention: Any, rotary: FarRotary) -> None:
    """Let a family's attention read by the positions of whole heads; again, by those of another rotary embedding."""
    positions = rotary.positions
    if not isinstance(attention, FarSoftmax):
        front, family = FRONTS[positions.kind], type(attention)
        attention.__class__ = paired_class(front, family, f"{front.__name__}{family.__name__}")
        attention.route()
    attention.take(rotary.own, positions.teacher)


def place_positions(model: PreTrainedModel, positions: FarPositions) -> None:
    """Let a model, whose layers are in their places, read by these positions.

    Raises:
        UserError: the family's positions cannot be extended, or there are layers other than softmax, windows, and
            windows with a state of what has left them.
    """
    decoder, config = model.model, model.config
    rope: Any = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "default":
        raise UserError(
            f"context: got a teacher whose rotary positions are {rope.get('rope_type', 'set by layer')}, and only "
            "default ones can be extended; convert without --context"
        )
    if family_type(config) in HALF_ANGLES:
        raise UserError(
            f"context: the rotary positions of {family_type(config)} cannot be extended; convert without --context"
        )
    if positions.kind == "cut" and caps_scores(config):
        raise UserError(
            "context: the teacher caps its scores, which cut distances do not; take --positions yarn, or convert "
            "without --context"
        )
    windows: list[Any] = []
    whole: list[Any] = []
    for index, layer in enumerate(decoder.layers):
        if sliding_window(config, index) is not None or not getattr(layer.self_attn, "use_rope", True):
            raise UserError(
                f"context: layer {index} of the teacher slides or has no rotary positions, which cannot be extended; "
                "convert without --context"
            )
        for branch in branches_of(layer.self_attn).values():
            kind = kind_of(branch)
            if not kind.reads_further:
                raise UserError(
                    f"context: layer {index} is {kind.name}, which reads no further than the teacher; take the default "
                    "--mixer and --set, or leave out --context"
                )
            (windows if kind.window_tokens else whole).append(branch)
    bound = positions.sink_bound(max((one.sink_reach for one in windows), default=0))
    rotary = FarRotary(decoder.rotary_emb, positions, bound, config)
    for window in windows:
        window.sink_bound = bound
    for attention in whole:
        make_far(attention, rotary)
    decoder.rotary_emb = rotary

"""States with late writes: some tokens' writes wait beside the state, and a decoding step folds them into it at once.

`gated_delta_step_` says what waits (`deltanet_kernels.arguments.StepCall`). A prompt leaves a state without writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltanet_hf.mixers.cache.state import State, TensorShape
from deltanet_hf.mixers.layer.attention_shape import MixerProjections
from deltanet_hf.mixers.layer.mix_call import MixCall
from deltanet_hf.mixers.layer.settings import check_at_least
from deltanet_kernels import gated_delta_step_
from deltanet_kernels.arguments import LATE, Erase
from deltanet_kernels.gated_delta_rule.cpu_late_writes import LateState, rounded_to_8_bits

NAMES = ("state", *LATE)
"""Of the tensors in a cache, in the order of `LateState`."""
FEWEST_FOR_8_BITS = 2
"""With 2, thousands of tokens leave a state in 8 bits with about the error of one in bfloat16, which is rounded after
every token and drifts; with more the error is smaller (docs/research/journal-training.md)."""


@dataclass(frozen=True)
class LateSettings(MixerProjections):
    """Settings of the rules whose decoding step may write late."""

    state_dtypes = (*MixerProjections.state_dtypes, "int8")
    late_writes: int = 0  # tokens whose writes wait beside the state in the cache; 0 to write each into it

    def validate(self, where: str) -> None:
        super().validate(where)
        check_at_least(where, "late_writes", self.late_writes, 0)
        if self.delayed and self.late_writes:
            raise ValueError(f"{where}.late_writes: got {self.late_writes}, expected 0 with a delayed state")
        if not self.delayed and self.state_dtype == "int8" and self.late_writes < FEWEST_FOR_8_BITS:
            raise ValueError(
                f"{where}.late_writes: got {self.late_writes}, expected at least {FEWEST_FOR_8_BITS}, because a "
                "state_dtype of int8 is rounded when they are folded into the state"
            )


def late_shapes(state: TensorShape, places: int) -> dict[str, TensorShape]:
    """The tensors beside a state [HV, K, V] with `places` for writes, without the writes."""
    heads, keys, _ = state.shape
    shapes = {
        "late_decay": TensorShape((heads, places), torch.float32),
        "late_count": TensorShape((heads,), torch.int32),
    }
    if state.dtype == torch.int8:
        shapes["state_scale"] = TensorShape((heads, keys), torch.float32)
    return shapes


def writes_shape(state: TensorShape, places: int, dtype: torch.dtype) -> TensorShape:
    """The writes beside a state [HV, K, V] in a model of this dtype."""
    heads, keys, values = state.shape
    return TensorShape((heads, places, keys + values), writes_dtype(dtype))


def writes_dtype(dtype: torch.dtype) -> torch.dtype:
    """In bfloat16 where the inputs have 16 bits."""
    return dtype if dtype.itemsize > 2 else torch.bfloat16


def without_writes(state: Tensor, places: int, state_dtype: str, dtype: torch.dtype) -> State:
    """A state [B, HV, K, V] float32 as a cache keeps it, rounded once, in a model of this dtype."""
    B, HV, K, V = state.shape
    scale = {}
    if state_dtype == "int8":
        state, scale["state_scale"] = rounded_to_8_bits(state)
    return scale | {
        "state": state.bfloat16() if state_dtype == "bfloat16" else state,
        "late_writes": state.new_zeros(B, HV, places, K + V, dtype=writes_dtype(dtype)),
        "late_decay": state.new_zeros(B, HV, places, dtype=torch.promote_types(dtype, torch.float32)),
        "late_count": state.new_zeros(B, HV, dtype=torch.int32),
    }


def late_step(call: MixCall, state: State, erase: Erase) -> tuple[Tensor, State]:
    """The gated delta rule of a few tokens without gradients, with the gates (g, beta): o, and the new state."""
    g, beta = call.gates
    new: dict[str, Any] = {name: state[name].clone() for name in NAMES if name in state}
    output = gated_delta_step_(
        call.q, call.k, call.v, g, beta, A_log=None, dt_bias=None, padding=call.padding,
        use_beta_sigmoid_in_kernel=False, erase=erase, **new,
    )  # fmt: skip
    return output, new


def current(state: State, dtype: torch.dtype) -> Tensor:
    """The state after all writes [B, HV, K, V]."""
    return LateState(*(state[name] for name in NAMES if name in state)).current(dtype)

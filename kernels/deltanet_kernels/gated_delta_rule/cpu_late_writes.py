"""The gated delta rule with late writes in plain PyTorch, and states in 8 bits; `StepCall` says what waits where."""

from __future__ import annotations

from typing import NamedTuple

import torch

from deltanet_kernels.arguments import Erase, StepCall
from deltanet_kernels.common.device import no_autocast
from deltanet_kernels.gated_delta_rule.cpu_recurrent import by_state
from deltanet_kernels.gated_delta_rule.reference import log_decay_and_strength


class LateState(NamedTuple):
    """S_0 and the writes since then."""

    state: torch.Tensor  # [B, HV, K, V]
    writes: torch.Tensor  # [B, HV, R, K + V]
    decay: torch.Tensor  # [B, HV, R]
    waiting: torch.Tensor  # [B, HV], the number of writes
    scale: torch.Tensor | None = None  # [B, HV, K]

    @classmethod
    def of(cls, call: StepCall) -> LateState:
        assert call.late_writes is not None
        assert call.late_decay is not None
        assert call.late_count is not None
        return cls(call.state, call.late_writes, call.late_decay, call.late_count, call.state_scale)

    def current(self, dtype: torch.dtype) -> torch.Tensor:
        """The state after all writes [B, HV, K, V]."""
        R, K = self.writes.shape[2], self.state.shape[2]
        place = torch.arange(R, device=self.waiting.device)
        waits = place < self.waiting.unsqueeze(-1)  # [B, HV, R]
        decay = self.decay.to(dtype).where(waits, 1.0)
        after = decay.flip(-1).cumprod(-1).flip(-1)
        later = torch.cat([after[..., 1:], torch.ones_like(after[..., :1])], dim=-1)
        keys, values = self.writes.to(dtype).where(waits.unsqueeze(-1), 0.0).split([K, self.state.shape[3]], dim=-1)
        old = restored(self.state, self.scale, dtype) * after[..., :1, None]
        return old + (keys * later.unsqueeze(-1)).transpose(-1, -2) @ values


def restored(state: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """A state [B, HV, K, V] as it was rounded."""
    return state.to(dtype) if scale is None else state.to(dtype) * scale.to(dtype).unsqueeze(-1)


def rounded_to_8_bits(state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers of -127 to 127 [B, HV, K, V] int8 and the scale of each row [B, HV, K], in the dtype of the state."""
    largest = state.abs().amax(-1, keepdim=True)
    steps = torch.where(largest > 0, 127.0 / largest, 0.0)
    return (state * steps + 0.5).floor().to(torch.int8), (largest / 127.0).squeeze(-1)


def torch_late_step_(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    scale: float,
    use_qk_l2norm_in_kernel: bool,
    *,
    late: LateState,
    padding: torch.Tensor | None,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    use_beta_sigmoid_in_kernel: bool,
    erase: Erase,
) -> torch.Tensor:
    """`torch_recurrent_step_` with late writes: q, k, v [B, T, heads, size] -> o [B, T, max(HQ, HV), V]."""
    (B, T, HQ, K), (HV, V), R = q.shape, v.shape[2:], late.writes.shape[2]
    dtype = torch.promote_types(q.dtype, torch.float32)
    with no_autocast(q.device):
        g, beta = log_decay_and_strength(g, beta, A_log, dt_bias, use_beta_sigmoid_in_kernel, dtype)
        q_, k_ = by_state(q.to(dtype), k.to(dtype), HV, scale, use_qk_l2norm_in_kernel)
        v_, decay, S = v.to(dtype), g.exp(), _folded_(late, late.waiting + T > R, dtype)
        outputs = []
        for t in range(T):
            key, value, fade = k_[:, t].unsqueeze(2), v_[:, t].unsqueeze(2), decay[:, t, :, None, None]
            if erase != "off":
                read = key @ S
                value = value - (read if erase == "undecayed" else fade * read)
            value = value * beta[:, t, :, None, None]
            faded = fade * S
            outputs.append(q_[:, t] @ faded + (q_[:, t] @ key.transpose(-1, -2)) * value)
            new = torch.cat([key, value], dim=-1).to(late.writes.dtype)  # [B, HV, 1, K + V]
            place = late.waiting.long().unsqueeze(-1)
            late.writes.scatter_(2, place.unsqueeze(-1).expand(-1, -1, -1, K + V), new)
            late.decay.scatter_(2, place, decay[:, t].to(late.decay.dtype).unsqueeze(-1))
            late.waiting.add_(1 if padding is None else (~padding[:, t, None]).to(late.waiting.dtype))
            key, value = new.to(dtype).split([K, V], dim=-1)
            S = faded + key.transpose(-1, -2) * value
        return torch.stack(outputs, dim=1).view(B, T, max(HQ, HV), V).to(v.dtype)


def _folded_(late: LateState, full: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Fold the writes of the heads that are `full` [B, HV] into their S_0; returns the current states [B, HV, K, V]."""
    S, chosen = late.current(dtype), full[..., None, None]
    if late.scale is None:
        new, scale = S.to(late.state.dtype), None
    else:
        new, scale = rounded_to_8_bits(S)
        scale = scale.to(late.scale.dtype)
        late.scale.copy_(scale.where(full.unsqueeze(-1), late.scale))
    late.state.copy_(new.where(chosen, late.state))
    late.waiting.masked_fill_(full, 0)
    return restored(new, scale, dtype).where(chosen, S)

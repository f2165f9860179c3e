"""Calls of the delta rule with a decay per channel on which every form of it is tested."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deltanet_kernels import naive_channel_gated_delta_rule
from tests.kernels.cases import Sizes, as_double, as_inputs, closed, results


@dataclass(frozen=True)
class ChannelCase(Sizes):
    """One call."""

    g: str = "random"  # random | zero | medium | strong | closed | channels | tokens | last | reset | mixed
    rule: str = "kda"  # kda | gdn2 | gla
    l2norm: bool = True
    initial_state: bool = True
    scale: float | None = None


CHANNEL_CASES = [
    *(ChannelCase(f"T={T}", T=T, B=2, H=2) for T in (1, 2, 17, 64, 65, 130)),
    *(ChannelCase(f"{rule}", T=70, H=2, rule=rule) for rule in ("gdn2", "gla")),
    *(ChannelCase(f"K={K}", T=20, K=K) for K in (40, 100, 128)),
    ChannelCase("K=1", T=20, H=2, K=1, l2norm=False),
    ChannelCase("K<V", T=70, K=16, V=40, rule="gdn2"),
    ChannelCase("K>V", T=70, K=40, V=16, rule="gla"),
    ChannelCase("value heads share a key head", T=40, B=2, H=2, HQ=2, HV=6),
    ChannelCase("query heads share a state", T=70, B=2, H=2, HQ=6, HV=2, rule="gdn2"),
    ChannelCase("one key head, 2 queries, 4 values", T=40, H=1, HQ=2, HV=4, V=24, rule="gla"),
    ChannelCase("packed, empty and single", T=150, H=2, cu_seqlens=(0, 0, 1, 2, 2, 66, 130, 148, 148), rule="gdn2"),
    ChannelCase("packed, nothing but empty", T=5, cu_seqlens=(0, 0, 0)),
    ChannelCase("packed, no state", T=90, H=1, HV=2, HQ=2, cu_seqlens=(0, 20, 85), initial_state=False, rule="gla"),
    ChannelCase("g=0", T=70, g="zero"),
    ChannelCase("g=-200", T=70, H=2, g="closed"),
    ChannelCase("two products per chunk", T=70, H=2, HQ=2, HV=4, g="medium"),
    ChannelCase("strong gates", T=70, H=2, g="strong"),
    ChannelCase("strong gates, gdn2", T=70, g="strong", rule="gdn2"),
    ChannelCase("open channel beside closed ones", T=70, g="channels"),
    ChannelCase("open tokens between closed ones", T=70, H=2, g="tokens"),
    ChannelCase("closed at a chunk's last token", T=70, H=2, g="last", rule="gla"),
    ChannelCase("g=-inf", T=70, H=2, g="reset"),
    ChannelCase("gates of every size", T=70, H=2, g="mixed", rule="gdn2"),
    ChannelCase("keys as they are", T=70, l2norm=False, scale=-0.7),
]


def make_channel_inputs(
    case: ChannelCase, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
) -> dict[str, Any]:
    """Keyword arguments of the operator. The numbers are those of `dtype`; g, beta and states never below float32."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    (B, T, H, K), (HQ, HV, V, N) = (case.B, case.T, case.H, case.K), case.others
    k = randn(B, T, H, K)
    if not case.l2norm:
        k = k / k.norm(dim=-1, keepdim=True)
    tensors = {"q": randn(B, T, HQ, K), "k": k, "v": randn(B, T, HV, V)}
    if case.rule == "gdn2":
        unit = k / k.norm(dim=-1, keepdim=True)
        tensors["erase_key"] = rand(B, T, HV, K) * unit.repeat_interleave(HV // H, dim=2)
    tensors = {name: x.to(dtype) for name, x in tensors.items()}
    gates = {"g": channel_decay(case.g, rand(B, T, HV, K)), "beta": 2 * rand(B, T, HV)}
    if case.rule == "gdn2":
        gates["beta"] /= 2
    gates["beta"][:, ::5] = 0
    if case.initial_state:
        gates["initial_state"] = randn(N, HV, K, V)
    return as_inputs(case, tensors, gates, dtype, device) | {
        "erase": case.rule != "gla",
        "scale": case.scale,
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": case.l2norm,
    }


def channel_decay(kind: str, uniform: torch.Tensor) -> torch.Tensor:
    """Log decays of the given kind from uniform numbers [B, T, HV, K]."""
    g = closed(kind, {"strong": -5, "medium": -1.5}.get(kind, -0.3) * uniform)
    if kind == "channels":
        g[..., 1:] = -200.0
    elif kind == "reset":
        g[:, ::7, :, ::2] = -torch.inf
    elif kind == "mixed":  # from 1e-6 to 1e3, by channel and token
        g = -torch.exp(uniform * 20 - 14)
    return g


def channel_truth(inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The correct value of `results`: the recurrence in float64."""
    return results(naive_channel_gated_delta_rule, as_double(inputs))

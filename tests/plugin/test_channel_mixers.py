"""Kimi Delta Attention, gated linear attention and Gated DeltaNet-2: the layers are their recurrences."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deltanet_hf.mixers.layer import MixCall
from deltanet_kernels import naive_channel_gated_delta_rule
from deltanet_kernels.common.heads import l2_normalize
from support.tiny_models import tiny_student

BARE: dict[str, Any] = {"conv_size": 0, "rope": False, "output_gate": False, "output_norm": "none", "k_offset": False}


def layer_of(mixer: str, **changes: Any) -> Any:
    return tiny_student("llama", mixer=mixer, **BARE, **changes).double().model.layers[0].self_attn


def inputs() -> torch.Tensor:
    return torch.randn(2, 9, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("grouped", [False, True], ids=["plain", "grouped"])
@pytest.mark.parametrize("mixer", ["kda", "gla", "gdn2"])
@torch.no_grad()
def test_the_layer_is_the_recurrence(mixer: str, grouped: bool) -> None:
    strength = 2 if grouped and mixer != "gla" else 1
    layer, x = layer_of(mixer, expand_kv=not grouped, allow_neg_eigval=strength == 2), inputs()
    q, k, v = layer.project_qkv(x, None)
    f = layer.f_up(layer.f_down(x)).unflatten(-1, (layer.num_states, 8))
    g = -layer.decay.A_log.exp().unsqueeze(-1) * torch.nn.functional.softplus(f + layer.decay.dt_bias)
    ones, erase_key = torch.ones_like(g[..., 0]), None
    if mixer == "gdn2":
        q, k = l2_normalize(q), l2_normalize(k)
        b, w = (strength * gate(x).sigmoid().view_as(v) for gate in (layer.erase_proj, layer.write_proj))
        beta, erase_key, v = ones, b * k, w * v
    else:
        beta = strength * layer.b_proj(x).sigmoid()
    wanted, _ = naive_channel_gated_delta_rule(
        q, k, v, g, beta, erase_key, mixer != "gla", use_qk_l2norm_in_kernel=mixer != "gdn2"
    )
    found, _ = layer(x)
    torch.testing.assert_close(found, layer.o_proj(wanted.flatten(-2)), rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_equal_gates_make_gdn2_kda() -> None:
    kda, gdn2 = layer_of("kda"), layer_of("gdn2")
    gdn2.load_state_dict(kda.state_dict(), strict=False)
    gdn2.start_strengths(kda)
    torch.testing.assert_close(gdn2(inputs())[0], kda(inputs())[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mixer", ["kda", "gdn2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_reflections_at_one_key_keep_the_size_of_the_state(mixer: str, dtype: torch.dtype) -> None:
    """Gates of 2 turn what is under a key, token by token, whether its rounding makes it longer or shorter."""
    layer = layer_of(mixer, allow_neg_eigval=True).to(dtype)
    generator = torch.Generator().manual_seed(2)
    k = torch.randn(16, 1, 4, 8, generator=generator).to(dtype).expand(-1, 1024, -1, -1)
    gates: tuple[torch.Tensor, ...] = tuple(torch.full((16, 1024, 4, 8), gate) for gate in (0.0, 2.0, 0.0))
    before = torch.randn(16, 4, 8, 8, generator=generator)
    if mixer == "kda":
        gates = gates[0], gates[1][..., 0]
    _, after = layer.mix(MixCall(k, k, torch.zeros_like(k), gates, None, {"state": before}, True))
    torch.testing.assert_close(after["state"].norm(dim=(-2, -1)), before.norm(dim=(-2, -1)), rtol=1e-2, atol=0)


@torch.no_grad()
def test_gdn2_takes_keys_of_any_length() -> None:
    layer = layer_of("gdn2").float()
    sizes = torch.tensor([0.0, 1e-30, 1e-6, 1e-3, 1.0, 1e10, 1e30]).view(1, 7, 1, 1)
    k = l2_normalize(torch.randn(1, 7, 4, 8, generator=torch.Generator().manual_seed(1))) * sizes
    gates = torch.zeros(1, 7, 4, 8), torch.ones(1, 7, 4, 8), torch.ones(1, 7, 4, 8)
    for dtype in (torch.float32, torch.bfloat16):
        o, new = layer.mix(MixCall(k.to(dtype), k.to(dtype), torch.full_like(k, 100).to(dtype), gates, keep_state=True))
        assert o.isfinite().all()
        assert new["state"].isfinite().all()

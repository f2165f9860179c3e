"""Rules that the gated delta rule computes after a change of its inputs: each against its recurrence, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deltanet_hf import LayerTable
from deltanet_hf.fast.decoder import fast_mixer
from deltanet_hf.mixers import MIXERS
from deltanet_hf.mixers.cache.state import MixerCacheLayer
from deltanet_hf.mixers.gated_deltanet import GatedDeltaNet
from deltanet_hf.mixers.layer import MixCall, Projected, State, TensorShape
from deltanet_hf.mixers.layer.delta_rule import DeltaRule, delta_rule
from deltanet_kernels import naive_gated_delta_rule
from deltanet_kernels.common.heads import l2_normalize
from support.mapped_rules import B, H, K, T, V, close, draw, gradients, inputs, layer_of
from support.recurrences import naive_additive
from support.tiny_models import tiny_student


def additive_rule(call: MixCall, unit_length: bool = False, recurrent: bool = False) -> tuple[Tensor, State]:
    """The delta rule without erasing, of tokens one by one or in chunks."""
    return delta_rule(call, "float32", unit_length=unit_length, erase="off", recurrent=recurrent)


@pytest.mark.parametrize("recurrent", [False, True])
def test_the_additive_rule_is_its_recurrence(recurrent: bool) -> None:
    q, k, v, g, beta, S0 = inputs()

    def mapped(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S0: Tensor) -> tuple[Tensor, Tensor]:
        o, new = additive_rule(MixCall(q, k, v, (g, beta), None, {"state": S0}, True), recurrent=recurrent)
        return o, new["state"]

    with torch.no_grad():
        close(mapped(q, k, v, g, beta, S0), naive_additive(q, k, v, g, beta, S0))
    if not recurrent:
        close(*(gradients(function, q, k, v, g, beta, S0) for function in (mapped, naive_additive)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@torch.no_grad()
def test_the_additive_rule_in_short_dtypes(dtype: torch.dtype) -> None:
    """As exact as the rounding of inputs and outputs allows; values of 1e4 are no problem in float16."""
    q, k, v = (x.to(dtype) for x in (draw(B, T, H, K), draw(B, T, H, K, seed=1), 1e4 * draw(B, T, H, V, seed=2)))
    _, _, _, g, beta, _ = inputs()
    found, new = additive_rule(MixCall(q, k, v, (g.float(), beta.float()), keep_state=True), unit_length=True)
    units = (l2_normalize(x.double()) for x in (q, k))
    wanted, S = naive_additive(*units, v.double(), g, beta)
    assert found.dtype == dtype
    rounding = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    close((found.double(), new["state"].double()), (wanted, S), rounding)


@pytest.mark.parametrize("name", ["gated_linear", "retention"])
@torch.no_grad()
def test_additive_layers_are_the_recurrence(name: str) -> None:
    layer = layer_of(name)
    x = draw(1, 9, 32)
    q, k, v = layer.project_qkv(x, None)
    g, beta = layer.gates(layer.project(x), None)
    assert g.max() < 0
    assert beta.min() > 0
    wanted, _ = naive_additive(l2_normalize(q), l2_normalize(k), v, g.double(), beta.double())
    close((layer(x)[0],), (layer.o_proj(wanted.flatten(-2)),), 1e-6)


@torch.no_grad()
def test_deltanet_is_the_delta_rule_without_decay() -> None:
    layer = layer_of("deltanet")
    x = draw(1, 9, 32)
    q, k, v = layer.project_qkv(x, None)
    beta = layer.b_proj(x).sigmoid()
    wanted, _ = naive_gated_delta_rule(q, k, v, torch.zeros_like(beta), beta, use_qk_l2norm_in_kernel=True)
    close((layer(x)[0],), (layer.o_proj(wanted.flatten(-2)),), 1e-6)


@torch.no_grad()
def test_a_convolution_of_the_keys_keeps_a_third_of_the_tail() -> None:
    whole, keys = (tiny_student("llama", conv_on=parts).model.layers[0].self_attn for parts in ("qkv", "k"))
    assert 3 * keys.conv_channels == whole.conv_channels
    assert keys.state_shapes(torch.float32)["conv_tail"].shape == (32, 3)
    whole.load_state_dict({k: v for k, v in keys.state_dict().items() if not k.startswith("conv1d")}, strict=False)
    whole.conv1d.reset_parameters()
    whole.conv1d.weight[32:64] = keys.conv1d.weight  # q | k | v
    x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(3))
    angles = torch.arange(9.0)[None, :, None].expand(1, 9, 8)
    embeddings = (angles.cos(), angles.sin())
    torch.testing.assert_close(keys(x, embeddings)[0], whole(x, embeddings)[0])


class Negated(GatedDeltaNet):
    def mix(self, call: MixCall) -> tuple[Tensor, State]:
        output, state = super().mix(call)
        return -output, state


class Weak(GatedDeltaNet):
    def strength(self, b: Tensor) -> Tensor:
        return super().strength(b) / 2


class Slow(GatedDeltaNet):
    def gates(self, projected: Projected, padding: Tensor | None) -> tuple[Tensor, ...]:
        g, beta = super().gates(projected, padding)
        return g / 2, beta


@torch.no_grad()
@pytest.mark.parametrize(("kind", "served"), [(GatedDeltaNet, True), (Negated, False), (Weak, False), (Slow, False)])
def test_a_rule_that_changes_what_it_inherits_is_not_decoded_as_gated_deltanet(
    kind: type[DeltaRule], served: bool
) -> None:
    layer = layer_of("gated_deltanet")
    layer.__class__ = kind
    caches, form = (MixerCacheLayer(), MixerCacheLayer()), fast_mixer(layer, False)
    for x in (draw(1, 3, 32), draw(1, 1, 32)):
        torch.testing.assert_close(form(x, None, None, caches[0]), layer(x, None, None, caches[1]))
    assert layer.has_operators == form.has_operators == served


@torch.no_grad()
def test_a_further_tensor_in_the_state_survives_a_step_of_the_fast_form() -> None:
    class Counting(GatedDeltaNet):
        name = "counting"

        def mix(self, call: MixCall) -> tuple[Tensor, State]:
            output, state = super().mix(call)
            before = 0 if call.state is None else call.state["tokens"]
            return output, {**state, "tokens": before + output.new_full((len(output), 1), output.shape[1])}

        def recurrent_shapes(self) -> dict[str, TensorShape]:
            return {**super().recurrent_shapes(), "tokens": TensorShape((1,), torch.float32)}

    layer = layer_of("gated_deltanet")
    layer.__class__ = Counting
    cache, form = MixerCacheLayer(), fast_mixer(layer, False)
    for x in (draw(2, 3, 32), draw(2, 1, 32)):
        form(x, None, None, cache)
    assert cache.state["tokens"].tolist() == [[4.0], [4.0]]


@pytest.mark.parametrize("name", ["gated_linear", "retention", "gla"])
def test_rules_that_erase_nothing_have_no_negative_eigenvalues(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}.allow_neg_eigval: got true, but this rule erases nothing"):
        LayerTable.preset(4, name, allow_neg_eigval=True)


def test_only_gated_deltanet_has_qwens_profile() -> None:
    for name in MIXERS.keys() - {"gated_deltanet"}:
        with pytest.raises(ValueError, match=f"profile: got 'qwen3_5', but {name} has only faithful.* gated_deltanet"):
            LayerTable.preset(4, name, "qwen3_5")

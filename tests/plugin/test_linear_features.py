"""Linear attention with a normaliser: the feature maps, and the layer against the sums that define it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deltanet_hf.mixers.layer.feature_maps import TaylorFeatures, elu_features, taylor_features, taylor_size
from support.mapped_rules import close, draw, layer_of


@pytest.mark.parametrize("d", [1, 2, 5])
def test_taylor_features_are_the_second_order_of_exp(d: int) -> None:
    q, k = draw(3, 7, d), draw(3, 7, d, seed=1)
    s = (q * k).sum(-1)
    found = taylor_features(q)
    assert found.shape[-1] == taylor_size(d)
    close(((found * taylor_features(k)).sum(-1),), (1 + s + s**2 / 2,))


@torch.no_grad()
@pytest.mark.parametrize("feature_map", ["elu", "taylor"])
@pytest.mark.parametrize("expand_kv", [True, False])
def test_the_layer_is_a_weighted_mean_of_the_values(feature_map: str, expand_kv: bool) -> None:
    layer = layer_of("linear", feature_map=feature_map, feature_dim=3, expand_kv=expand_kv)
    x = draw(2, 9, 32)
    q, k, v = layer.project_qkv(x, None)
    q, k = (elu_features(q), elu_features(k)) if feature_map == "elu" else layer.features(q, k)
    k, v = (part.repeat_interleave(q.shape[2] // part.shape[2], dim=2) for part in (k, v))
    weights = torch.einsum("bthf,bshf->bhts", q, k).tril()
    assert weights.min() >= 0
    wanted = torch.einsum("bhts,bshd->bthd", weights / weights.sum(-1, keepdim=True), v)
    close((layer(x)[0],), (layer.o_proj(wanted.flatten(-2)),), 1e-6)


@torch.no_grad()
def test_the_maps_begin_with_the_channels_that_make_the_scores() -> None:
    """Queries and keys in a subspace of as many channels: the scores keep their order and have a mean square of 1."""
    spread = torch.linalg.qr(draw(2, 8, 3, dtype=torch.float32))[0]
    heads = torch.tensor([0, 0, 1, 1])
    q, k = draw(2, 30, 4, 3, dtype=torch.float32), 15 * draw(2, 30, 2, 3, seed=1, dtype=torch.float32)
    q, k = torch.einsum("nthd,hed->nthe", q, spread[heads]), torch.einsum("nthd,hed->nthe", k, spread)
    part = TaylorFeatures(4, 2, 8, 3)
    part.adapt(q, k)

    def scores(q: Tensor, k: Tensor) -> Tensor:
        return torch.einsum("nthd,mshd->hntms", q, k[:, :, heads])

    mapped = (torch.einsum("nthd,hde->nthe", x, weight) for x, weight in ((q, part.q_map), (k, part.k_map)))
    found, whole = scores(*mapped), scores(q, k)
    for head in range(4):
        scale = whole[head].square().mean().sqrt()
        # The map takes queries and keys for independent, which a few random ones are not quite.
        torch.testing.assert_close(found[head].square().mean().sqrt(), torch.tensor(1.0), rtol=0.05, atol=0)
        torch.testing.assert_close(found[head] / found[head].std(), whole[head] / whole[head].std(), rtol=0, atol=1e-3)
        assert scale > 5
    part.adapt(torch.zeros_like(q), torch.zeros_like(k))
    assert all(parameter.isfinite().all() for parameter in part.parameters())

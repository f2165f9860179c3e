"""DeltaFormer: softmax attention over values that are corrected by the delta rule, through softmax (arXiv 2505.19488).

Per key/value head, with a strength beta_t in [0, 1],

    u_t = v_t - beta_t sum over s < t of softmax_s(scale k_t . k_s) u_s
    o_t = sum over s <= t of softmax_s(scale q_t . k_s) u_s

The first line is the delta rule with exp as the feature map: what the tokens before hold under k_t is taken out of v_t.
It is a triangular system (`deltanet_kernels.deltaformer_solve`). Without the normalisation of its softmax, u grows
without bound for keys longer than about 1, so the layer has the normalised form only.

beta_t = opening * sigmoid(b_proj(x_t)) with one opening in [0, 1] per head. At opening 0 the layer is the teacher's
attention. The cache holds u_t in the place of v_t. Keys are those of the teacher, rotated; where its scores are
capped, those of q with k are, and those of k with k are not.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache

from deltanet_hf.mixers.layer.parts import Opening
from deltanet_hf.mixers.quadratic.attention_kind import AttentionKind, Call, Softmax
from deltanet_kernels import deltaformer_solve


class WriteStrength(nn.Module):
    """beta [B, T, H] from 0 to 1, float32 or float64, from the layer's input x [B, T, hidden]."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.b_proj = nn.Linear(hidden, heads)
        self.opening = Opening(heads, limit=1.0)

    def forward(self, x: Tensor) -> Tensor:
        opening = self.opening()
        return opening * self.b_proj(x).to(opening.dtype).sigmoid()


class DeltaFormer(AttentionKind):
    """Softmax attention over corrected values; see the module's docstring."""

    name: ClassVar[str] = "deltaformer"
    title: ClassVar[str] = "DeltaFormer"
    fp32: ClassVar[tuple[str, ...]] = ("opening",)
    without_lora: ClassVar[tuple[str, ...]] = ("b_proj",)  # one output per head

    correction: WriteStrength

    def add_parts(self, hidden: int, query_heads: int, kv_heads: int) -> None:
        self.correction = WriteStrength(hidden, kv_heads)

    def new_parts(self) -> list[nn.Module]:
        return [self.correction]

    def start_neutral(self, spread: float) -> None:
        """The opening has a gradient; the projection of the strength has one as soon as the opening is above 0."""
        self.correction.opening.reset_parameters()
        nn.init.zeros_(self.correction.b_proj.weight)
        nn.init.zeros_(self.correction.b_proj.bias)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call, softmax: Softmax) -> Tensor:
        held, mask = self.held(call.cache), None if call.mask is None else call.mask[:, 0]
        places = getattr(held, "places", None)
        if places is not None and mask is not None:  # the token's own place still holds an older one, or nothing
            mask = F.pad(mask.index_fill(2, places.now, False), (0, 1))
        past: list[Tensor | None] = [None, None]
        if held is not None:  # a sliding layer that records its past holds more than is seen
            first = 0 if mask is None else k.shape[2] + held.keys.shape[2] - mask.shape[2]
            past = [states[:, :, first:].transpose(1, 2) for states in (held.keys, held.values)]
        v = deltaformer_solve(
            k.transpose(1, 2),
            v.transpose(1, 2),
            self.correction(call.x),
            softmax.scaling,
            past_k=past[0],
            past_u=past[1],
            mask=mask,
        ).transpose(1, 2)
        if call.cache is not None:
            k, v = call.cache.update(k, v, self.layer_idx)
        return softmax(q, k, v, call.mask)

    def held(self, cache: Cache | None) -> Any:
        """As in the base class.

        Raises:
            ValueError: a quantised or a static cache.
        """
        if cache is not None and any(layer.is_compileable for layer in cache.layers):
            raise ValueError(
                f"cache: {self.name} layers solve for the values of all tokens before, which a static cache "
                "does not tell from its empty places; use one that grows"
            )
        return super().held(cache)

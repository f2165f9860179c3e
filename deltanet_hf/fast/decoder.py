"""The decoder of a language model in its fast form: norms, residual sums, projections and mixers by few launches.

The family's own forward embeds the tokens, makes masks and rotary embeddings and calls the layers; the layers, the
final norm and what is in them are those of this package, with the family's parameters. A layer returns its last
residual sum as two tensors, and the norm after it computes the sum.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from deltanet_hf.fast.families import LAYER, family_of
from deltanet_hf.fast.mixer import FastDeltaRule, FastMixer
from deltanet_hf.fast.packed import FastDelayedRule, FastPacked, is_packed
from deltanet_hf.fast.parts import FastMLP, FastNorm, Sum, is_known_block, with_children
from deltanet_hf.fast.softmax import QKV, FastSoftmax
from deltanet_hf.mixers.layer.delta_rule import DeltaRule
from deltanet_hf.mixers.layer.layer_kind import branches_of
from deltanet_hf.mixers.layer.mixer import Mixer


class FastDecoder:
    """The fast form of a causal language model, for calls without gradients.

    Args:
        model: a model of a known family; it is not kept, but its parameters are.
        may_move: whether weights may be moved, so that the projections of an input are one product.
    """

    def __init__(self, model: Any, may_move: bool) -> None:
        decoder = model.model
        layers = [FastLayer(layer, may_move) for layer in decoder.layers]
        self._decoder = with_children(decoder, layers=layers, norm=FastNorm(decoder.norm))
        self.takes_prompt_length = all(layer.takes_prompt_length for layer in layers)
        self.weights = sum(weight.numel() for weight in decoder.layers.parameters())

    def __call__(self, model: Any, *args: Any, **kwargs: Any) -> CausalLMOutputWithPast:
        """As the forward of `model`, which this was made of.

        It takes one argument more where `takes_prompt_length` says so: `prompt_length` [1] int64 on the device, the
        number of tokens in the first call on an empty cache, of which the last ones may be padding. States and windows
        in the cache are then those after as many tokens; growing keys and values are those of all tokens.
        """
        forward = type(model).forward
        forward = getattr(forward, "plain_form", forward)
        return forward(with_children(model, model=self._decoder), *args, **kwargs)  # type: ignore[no-any-return]


class FastLayer:
    """A decoder layer: attention and feed-forward block, each between its norms and added to its input."""

    def __init__(self, layer: Any, may_move: bool) -> None:
        family = family_of(type(layer), LAYER)
        assert family is not None
        norms = (None if name is None else FastNorm(getattr(layer, name)) for name in family.norms)
        self._before_attention, self._after_attention, self._before_mlp, self._after_mlp = norms
        linear = layer._modules.get("linear_attn")
        self._attention = fast_attention(layer.self_attn if linear is None else linear, may_move)
        # See `FastDecoder`; prompts in the format of Qwen3.5 are not captured.
        self.takes_prompt_length = linear is None and bool(getattr(self._attention, "takes_prompt_length", True))
        mlp = layer.mlp if hasattr(layer, "mlp") else layer.block_sparse_moe
        self._mlp = FastMLP(mlp, may_move) if is_known_block(mlp) else mlp
        self._multiplier = getattr(layer, "residual_multiplier", None)

    def __call__(self, hidden_states: Tensor | Sum, **call: Any) -> Sum:
        """Hidden states [B, T, hidden], or a sum that gives them -> the sum that gives those of the next layer."""
        x, residual = self._normed(self._before_attention, hidden_states)
        x = _first(self._attention(hidden_states=x, **call))
        total = self._added(x, self._after_attention, residual)
        x, residual = self._normed(self._before_mlp, total)
        return self._added(_first(self._mlp(x)), self._after_mlp, residual)

    @staticmethod
    def _normed(norm: FastNorm | None, x: Tensor | Sum) -> tuple[Tensor, Tensor]:
        """The input of a block, and the tensor that its output is added to."""
        if norm is not None:
            return norm.with_sum(x)
        x = x.total() if isinstance(x, Sum) else x
        return x, x

    def _added(self, x: Tensor, norm: FastNorm | None, residual: Tensor) -> Sum:
        """The output of a block, added to its input."""
        x = x if norm is None else norm(x)
        return Sum(x if self._multiplier is None else x * self._multiplier, residual)


def _first(output: Any) -> Tensor:
    """The output of a block, with which some return weights or a router's scores."""
    return output[0] if isinstance(output, tuple) else output  # type: ignore[no-any-return]


def fast_attention(attention: nn.Module, may_move: bool) -> Any:
    """The stand-in of a layer's attention; its weights may be moved where `may_move`, see `MergedProjection`."""
    if is_packed(attention):
        return FastPacked(attention, may_move)
    branches = {name: _fast_branch(branch, may_move) for name, branch in branches_of(attention).items()}
    return branches[""] if "" in branches else with_children(attention, **branches)


def _fast_branch(branch: nn.Module, may_move: bool) -> Any:
    if isinstance(branch, Mixer):
        return fast_mixer(branch, may_move)
    return FastSoftmax.of(branch, may_move) if set(QKV) <= branch._modules.keys() else branch


def fast_mixer(mixer: Any, may_move: bool) -> Any:
    """A mixer for calls without gradients; arguments as in `FastMixer.of`."""
    if FastDelayedRule.serves(mixer):
        return FastDelayedRule.of(mixer, may_move)
    return (FastDeltaRule if isinstance(mixer, DeltaRule) else FastMixer).of(mixer, may_move)

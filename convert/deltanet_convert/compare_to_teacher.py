"""Compares a converted layer with the teacher's attention, and the converted model with the teacher."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deltanet_hf.evaluation.measures.text_scores import kl_from_log_probs
from deltanet_hf.mixers import LayerKind, Mixer
from deltanet_hf.mixers.attention.family_attention import kind_of

from .layer_stream import Head
from .start.copy_weights import expand_heads

LOGIT_TOKENS = 128  # tokens whose logits are in memory at a time


class _Fused(nn.Module):
    """The q, k and v projections as one module that concatenates their outputs, as phi3 has them."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)


@torch.no_grad()
def softmax_error(attention: Any, layer: LayerKind, inputs: Tensor, kwargs: dict[str, Any]) -> float:
    """Error of the teacher's softmax attention when it runs with the converted layer's q, k, v and o weights.

    Biases and learned norms that the converted layer leaves out are taken from the teacher; each head's share is
    repeated as in the converted layer. A wrong head mapping, a lost tensor or a wrong scale gives an error of about 1.
    Mixed heads are compared as the sum of their branches.

    Args:
        attention: the teacher's attention.
        layer: the converted layer.
        inputs: attention inputs [n, T, hidden].
        kwargs: the attention's other arguments.

    Returns:
        Norm of the difference of the outputs divided by the norm of the teacher's output.
    """
    forms = [_softmax_form(layer.part_of(attention, name), branch) for name, branch in layer.branches.items()]
    want, _ = attention(hidden_states=inputs, **kwargs)
    got = sum(form(hidden_states=inputs, **kwargs)[0] for form in forms)
    return float((got - want).norm() / want.norm().clamp_min(1e-30))


def _softmax_form(attention: Any, layer: Any) -> Any:
    """The attention with the weights of a layer; of a branch without a recurrent state, with all of its weights."""
    if not kind_of(layer).has_state:
        weights = layer.state_dict()
        attention.load_state_dict({name: weights[name] for name in attention.state_dict()})
        return attention
    kv_heads = layer.num_states // layer.kv_repeats
    groups = kv_heads // _kv_heads(attention)
    expanded = copy.copy(attention)
    expanded._modules = dict(attention._modules)
    projections = [_with_bias(layer, attention, name, groups) for name in ("q_proj", "k_proj", "v_proj")]
    if hasattr(attention, "qkv_proj"):
        expanded.qkv_proj = _Fused(*projections)
        expanded.num_key_value_heads = kv_heads
    else:
        expanded.q_proj, expanded.k_proj, expanded.v_proj = projections
    expanded.o_proj = layer.o_proj
    expanded.num_key_value_groups = layer.num_heads // kv_heads
    k_norm = getattr(attention, "k_norm", None)
    if k_norm is not None and k_norm.weight.numel() > layer.head_dim:
        expanded.k_norm = copy.copy(k_norm)
        expanded.k_norm._parameters = {
            "weight": nn.Parameter(expand_heads(k_norm.weight, layer.head_dim, groups), False)
        }
    return expanded


def _kv_heads(attention: Any) -> int:
    return int(attention.config.num_key_value_heads)


def _with_bias(layer: Mixer, attention: Any, name: str, groups: int) -> nn.Module:
    """The layer's projection `name`, with the teacher's bias if the layer leaves it out."""
    projection = getattr(layer, name)
    bias = getattr(getattr(attention, name, None), "bias", None)
    if projection.bias is not None or bias is None:
        return projection  # type: ignore[no-any-return]
    full = copy.copy(projection)
    full._parameters = dict(projection._parameters)
    full.bias = nn.Parameter(bias if name == "q_proj" else expand_heads(bias, layer.head_dim, groups), False)
    return full  # type: ignore[no-any-return]


@torch.no_grad()
def compare_outputs(layer: nn.Module, inputs: Tensor, wanted: Tensor, kwargs: dict[str, Any]) -> dict[str, float]:
    """How near a layer's output for `inputs` is to `wanted`, both [n, T, hidden].

    Returns:
        `cosine`, mean over tokens, and `relative_mse`, the squared error divided by the squared norm of `wanted`.
    """
    cosine = squared = norm = 0.0
    for x, y in zip(inputs.split(1), wanted.split(1), strict=True):
        out, _ = layer(hidden_states=x, **kwargs)
        cosine += float(F.cosine_similarity(out, y, dim=-1).double().mean())
        squared += float((out - y).double().square().sum())
        norm += float(y.double().square().sum())
    return {"cosine": cosine / len(inputs), "relative_mse": squared / max(norm, 1e-30)}


@torch.no_grad()
def compare_models(
    head: Head, ids: Tensor, teacher: Tensor, student: Tensor, rounding: torch.dtype
) -> dict[str, float]:
    """Compares two models by the outputs of their last layers.

    Args:
        head: final norm and output head of the teacher; both models have the same.
        ids: token ids [n, T].
        teacher, student: outputs of the last decoder layer [n, T, hidden].
        rounding: dtype to which the head's weights are rounded for the student.

    Returns:
        The number of predicted `tokens`, `teacher_perplexity` and `perplexity`, and `kl`, KL(teacher || student) in
        nats per token.
    """
    targets = ids[:, 1:].flatten().to(head.device)
    flat_teacher, flat_student = (hidden[:, :-1].flatten(0, 1).to(head.device) for hidden in (teacher, student))
    losses = torch.zeros(3, dtype=torch.float64, device=head.device)
    for start in range(0, len(targets), LOGIT_TOKENS):
        part = slice(start, start + LOGIT_TOKENS)
        want = head.logits(flat_teacher[None, part]).squeeze(0).log_softmax(-1)
        got = head.logits(flat_student[None, part], rounding).squeeze(0).log_softmax(-1)
        losses[0] += F.nll_loss(want, targets[part], reduction="sum").double()
        losses[1] += F.nll_loss(got, targets[part], reduction="sum").double()
        losses[2] += kl_from_log_probs(want, got).double().sum()
    teacher_loss, loss, kl = (losses / len(targets)).tolist()
    perplexities = {"teacher_perplexity": _exp(teacher_loss), "perplexity": _exp(loss)}
    return {"tokens": len(targets), **perplexities, "kl": kl}


def _exp(loss: float) -> float:
    return math.exp(min(loss, 700.0))

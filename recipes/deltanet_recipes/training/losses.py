"""Losses. The distillation loss never holds the logits of more than one chunk of tokens in memory.

Shapes: N tokens, n tokens of one chunk, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from deltanet_hf.evaluation.measures.text_scores import kl_from_log_probs


@dataclass(frozen=True)
class Head:
    """The way from the last hidden states to logits: the output matrix and the family's scaling and soft cap."""

    divisor: float = 1.0  # granite
    softcap: float | None = None  # gemma2

    @classmethod
    def of(cls, model: nn.Module) -> Head:
        config = model.config
        return cls(
            divisor=float(getattr(config, "logits_scaling", None) or 1.0),
            softcap=getattr(config, "final_logit_softcapping", None),
        )

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """hidden [N, D], weight [V, D] -> logits [N, V] float32."""
        return self.scaled(F.linear(hidden, weight))

    def scaled(self, product: torch.Tensor) -> torch.Tensor:
        """Hidden states times output matrix [N, V] -> logits [N, V] float32."""
        logits = product.float()
        if self.divisor != 1.0:
            logits = logits / self.divisor
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def product_gradient(self, gradient: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """The gradient with respect to the product, of that with respect to the logits; all [N, V]."""
        if self.softcap is not None:
            gradient = gradient * (1.0 - (logits / self.softcap) ** 2)
        return gradient / self.divisor if self.divisor != 1.0 else gradient


@dataclass(frozen=True)
class KlTerms:
    """Weights of the loss on the output distribution; `schema.DistilBase` describes each."""

    kl_weight: float = 1.0
    ce_weight: float = 0.0
    far_ce_weight: float = 0.0


# (student hidden, student weight, labels, teacher inputs...) -> (sums of loss, KL and cross-entropy [3], gradient of
# the loss with respect to hidden times weight [n, V])
ChunkLoss = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def live_chunk(head: Head, teacher_head: Head, terms: KlTerms) -> ChunkLoss:
    """The loss of a chunk, given the teacher's last hidden states [n, D'] and output matrix [V, D'].

    With a `far_ce_weight`, whether the teacher was trained on a token's position [n] bool stands between the two.
    """

    def chunk(
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        teacher_hidden: torch.Tensor,
        *given: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        product = F.linear(hidden, weight)
        student, teacher = head.scaled(product), teacher_head.logits(teacher_hidden, given[-1])
        taught = given[0] if terms.far_ce_weight > 0 else None
        sums, gradient = _from_logits(student, teacher, labels, terms, taught)
        return sums, head.product_gradient(gradient, student).to(product.dtype)

    return chunk


def _from_logits(
    student: torch.Tensor,
    teacher: torch.Tensor,
    labels: torch.Tensor,
    terms: KlTerms,
    taught: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums [3] of a ChunkLoss and the gradient of the loss with respect to the student's logits [n, V].

    Tokens that are not `taught` [n] have no KL, and a weight of cross-entropy of their own. One pass over the logits
    takes the normalisers and one values and gradient; autograd would take two more. With p = softmax(s) and
    u = softmax(t), the gradient of KL(u || p) is p - u.
    """
    log_p, log_u = F.log_softmax(student, dim=-1), F.log_softmax(teacher, dim=-1)
    p = log_p.exp()
    kl, gradient = kl_from_log_probs(log_u, log_p), p - log_u.exp()
    ce_weight = torch.full_like(kl, terms.ce_weight)
    if taught is not None:
        kl, gradient = kl * taught, gradient * taught[:, None]
        ce_weight = ce_weight.where(taught, terms.far_ce_weight)
    is_label = torch.arange(student.shape[-1], device=student.device) == labels[:, None]
    ce = -torch.where(is_label, log_p, 0.0).sum(-1)
    gradient = terms.kl_weight * gradient + ce_weight[:, None] * (p - is_label.float())
    scored = labels >= 0
    loss = terms.kl_weight * kl + ce_weight * ce
    sums = [x.masked_fill(~scored, 0.0).sum() for x in (loss, kl, ce)]
    return torch.stack(sums), gradient.masked_fill(~scored[:, None], 0.0)


class ChunkedLoss(torch.autograd.Function):
    """Runs a ChunkLoss over pieces of the tokens and takes the gradients of each piece at once.

    Only the logits of one piece exist at a time. The forward pass takes the gradient of the hidden states, and the
    backward pass scales it; the output matrix is not trained.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        chunk_loss: ChunkLoss,
        size: int,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        per_token: tuple[torch.Tensor, ...],
        teacher_weight: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns summed loss, KL and cross-entropy, each [] float32.

        Args:
            size: tokens per piece.
            hidden: [N, D]; weight: [V, D]; labels: [N].
            per_token: tensors [N, ...] of which each call of the chunk's loss gets its piece.
            teacher_weight: the output matrix of the teacher, which every call gets as it is.
        """
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[2] else None  # type: ignore[attr-defined]
        sums = hidden.new_zeros(3, dtype=torch.float32)
        for begin in range(0, hidden.shape[0], size):
            piece = slice(begin, begin + size)
            given = (*(t[piece] for t in per_token), teacher_weight)
            some, gradient = chunk_loss(hidden[piece], weight, labels[piece], *given)
            sums += some
            if d_hidden is not None:
                d_hidden[piece] = gradient @ weight
        ctx.save_for_backward(d_hidden)  # type: ignore[arg-type]
        return sums[0], sums[1], sums[2]

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (d_hidden,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return None, None, d_hidden * grads[0].to(d_hidden.dtype), None, None, None, None


def squared_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """|output - target|^2 per token in float32: [..., D] -> [...]."""
    return (output.float() - target.float()).square().sum(-1)


def relative_squared_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """|output - target|^2 / |target|^2 per token in float32: [..., D] -> [...]."""
    return squared_error(output, target) / target.float().square().sum(-1).clamp(min=1e-12)

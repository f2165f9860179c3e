"""Softmax attention under any mask in PyTorch, on any device: what no kernel of a window computes."""

import torch


def attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention and its sums, in one dtype.

    On CPUs by PyTorch's flash attention where it can: `scaled_dot_product_attention` keeps the sums to itself.

    Args:
        q: [B, T, HQ, D].
        keys, values: [B, HK, S, D].
        seen: whether a query sees a key, [B or 1, 1, T, S]; None for causal attention where flash attention serves.

    Returns:
        o [B, T, HQ, D] and lse [B, T, HQ].
    """
    if by_flash(q, keys, values, softcap):
        return cpu_flash(q, keys, values, None if seen is None else q.new_zeros(()).where(seen, -torch.inf), scale)
    assert seen is not None
    q = q.unflatten(2, (keys.shape[1], -1)).permute(0, 2, 3, 1, 4)  # [B, HK, G, T, D]
    scores = (q.flatten(2, 3) @ keys.transpose(-1, -2)).view(*q.shape[:-1], -1) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~seen.unsqueeze(2), -torch.inf)
    lse = scores.logsumexp(dim=-1)
    weights = (scores - lse.unsqueeze(-1)).exp()
    o = (weights.flatten(2, 3) @ values).view(q.shape).permute(0, 3, 1, 2, 4).flatten(2, 3)
    return o, lse.permute(0, 3, 1, 2).flatten(2, 3)


def cpu_flash(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attention` where flash attention serves, with a mask that is added to the scores."""
    o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.transpose(1, 2), keys, values, is_causal=mask is None, attn_mask=mask, scale=scale
    )
    return o.transpose(1, 2), lse.transpose(1, 2)


def by_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softcap: float | None) -> bool:
    """Whether PyTorch's flash attention serves a call: on a CPU, without capped scores and without gradients."""
    gradients = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    return q.device.type == "cpu" and softcap is None and not gradients and q.numel() > 0

"""One decoding step of the attention over window and sinks in PyTorch: the definition of the kernel's results.

On a CPU, a step whose rows have seen equally many tokens takes few operations (`_equal_rows`), as their number decides
how long it takes.
"""

import math

import torch

from deltanet_kernels.arguments import WindowStepCall
from deltanet_kernels.common.rotation import rotate
from deltanet_kernels.window.cpu import flash_attention, has_flash_attention


def torch_window_step_(call: WindowStepCall) -> torch.Tensor:
    """`deltanet_kernels.window_step_` in PyTorch, float32 inside (float64 for float64 inputs)."""
    compiling = torch.compiler.is_compiling()  # a graph cannot depend on the counts
    if call.padding is None and not compiling and has_flash_attention(call.softcap, call.q, call.far, call.share_logit):
        counts = set(call.count.tolist())
        if len(counts) == 1:
            return _equal_rows(call, counts.pop() + 1)
    return _any_rows(call)


def _equal_rows(call: WindowStepCall, number: int) -> torch.Tensor:
    """The step of token `number` of every row."""
    q, k, window, sinks, keys, values = call.q, call.k, call.window, call.sinks, call.keys, call.values
    if call.cos is not None and call.sin is not None:
        q, k = rotate(torch.cat([q, k], dim=2), call.cos, call.sin).split([q.shape[2], k.shape[2]], dim=2)
    place = number - 1 if number <= sinks else sinks + number % window
    call.count.fill_(number)
    call.numbers.select(1, place).fill_(number)
    keys.select(2, place).copy_(k[:, 0])
    values.select(2, place).copy_(call.v[:, 0])
    dtype = torch.promote_types(q.dtype, torch.float32)
    seen = (call.numbers > 0) & ((call.numbers > number - window) | (call.numbers <= sinks))
    o, lse = flash_attention(q.to(dtype), keys.to(dtype), values.to(dtype), call.factor, seen[:, None, None])
    unseen = (number if call.reach is None else min(number, call.reach)) - window - sinks
    if unseen > 0 and call.far is not None and call.share_logit is not None:
        assert call.far_slope is not None
        assert call.near_slope is not None
        logit = call.share_logit.to(dtype) + call.far_slope.to(dtype) * math.log(unseen) - call.near_slope * lse
        o = torch.lerp(o, call.far.to(dtype), logit.sigmoid_().unsqueeze(-1))
    return o.to(q.dtype)


def _any_rows(call: WindowStepCall) -> torch.Tensor:
    """Any step: rows may differ in length, or be padding."""
    q, k, v, window, sinks, keys, values, numbers, count, share_logit, far, far_slope, near_slope, reach, *_ = call
    padding, softcap = call.padding, call.softcap
    if call.cos is not None and call.sin is not None:
        q, k = rotate(q, call.cos, call.sin), rotate(k, call.cos, call.sin)
    (B, _, HQ, D), HK = q.shape, k.shape[2]
    live = torch.ones_like(count, dtype=torch.bool) if padding is None else ~padding[:, 0]
    number = count + live.to(count.dtype)
    place = torch.where(number <= sinks, number - 1, sinks + number % window).clamp(min=0).long()[:, None]
    count.copy_(number)
    numbers.scatter_(1, place, torch.where(live[:, None], number[:, None], numbers.gather(1, place)))
    spot = place[:, :, None, None].expand(B, HK, 1, D)
    for cache, new in ((keys, k), (values, v)):
        new = torch.where(live[:, None, None, None], new.transpose(1, 2), cache.gather(2, spot))
        cache.scatter_(2, spot, new)

    dtype = torch.promote_types(q.dtype, torch.float32)
    seen = (numbers > 0) & ((number[:, None] - numbers < window) | (numbers <= sinks))
    # A row of padding may see nothing; its result is dropped.
    seen = (seen | ~live[:, None])[:, None, None]
    scores = q.reshape(B, HK, HQ // HK, D).to(dtype) @ keys.to(dtype).transpose(-1, -2) * call.factor
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(dim=-1, keepdim=True)
    o = ((scores - lse).exp() @ values.to(dtype)).view(B, 1, HQ, D)
    if share_logit is not None and far is not None and far_slope is not None and near_slope is not None:
        counted = number if reach is None else number.clamp(max=reach)
        unseen = (counted - window - sinks).clamp(min=0)[:, None, None]
        logit = share_logit.to(dtype) + far_slope * unseen.clamp(min=1).to(dtype).log()
        share = (logit - near_slope * lse.view(B, 1, HQ)).sigmoid().masked_fill(unseen == 0, 0.0).unsqueeze(-1)
        o = share * far.to(dtype) + (1 - share) * o
    return o.masked_fill(~live[:, None, None, None], 0.0).to(q.dtype)

"""One decoding step of the attention over window and sinks in PyTorch: the definition of the kernel's results.

On a CPU, a step without padding takes few operations, as their number decides how long it takes.
"""

import torch

from deltanet_kernels.arguments import WindowStepCall
from deltanet_kernels.common.rotation import rotate
from deltanet_kernels.window.cpu import flash_attention, has_flash_attention


def torch_window_step_(call: WindowStepCall) -> torch.Tensor:
    """`deltanet_kernels.window_step_` in PyTorch, float32 inside (float64 for float64 inputs)."""
    if call.padding is None and has_flash_attention(call.softcap, call.q, call.far, call.share_logit):
        return _few_operations(call)
    return _definition(call)


def _few_operations(call: WindowStepCall) -> torch.Tensor:
    """A step of rows of which none is padding, with scores without a cap."""
    q, k, window, sinks, numbers, count = call.q, call.k, call.window, call.sinks, call.numbers, call.count
    if call.cos is not None and call.sin is not None:
        q, k = rotate(torch.cat([q, k], dim=2), call.cos, call.sin).split([q.shape[2], k.shape[2]], dim=2)
    number = count.add_(1).unsqueeze(1)  # [B, 1]
    place = torch.where(number <= sinks, number - 1, sinks + number % window).long()
    numbers.scatter_(1, place, number)
    spot = place[:, :, None, None].expand(k.shape[0], k.shape[2], 1, k.shape[3])
    call.keys.scatter_(2, spot, k.transpose(1, 2))
    call.values.scatter_(2, spot, call.v.transpose(1, 2))
    dtype = torch.promote_types(q.dtype, torch.float32)
    seen = (numbers > 0) & ((numbers > number - window) | (numbers <= sinks))
    keys, values = call.keys.to(dtype), call.values.to(dtype)
    o, lse = flash_attention(q.to(dtype), keys, values, call.factor, seen[:, None, None])
    if call.far is not None and call.share_logit is not None:
        assert call.far_slope is not None
        assert call.near_slope is not None
        counted = number if call.reach is None else number.clamp_max(call.reach)
        unseen = (counted - (window + sinks)).unsqueeze(2)
        logit = call.share_logit.to(dtype) + call.far_slope * unseen.clamp_min(1).to(dtype).log()
        share = (logit - call.near_slope * lse).sigmoid_() * (unseen > 0)
        o = torch.lerp(o, call.far.to(dtype), share.unsqueeze(-1))
    return o.to(q.dtype)


def _definition(call: WindowStepCall) -> torch.Tensor:
    """Any step."""
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

"""One decoding step of the attention over window and sinks in PyTorch: the definition of the kernel's results.

On a CPU the number of its operations decides how long a step takes.
"""

import torch

from deltanet_kernels.common.rotation import rotate
from deltanet_kernels.common.state_indices import on_copies
from deltanet_kernels.window.calls import WindowStepCall
from deltanet_kernels.window.masked import attention


def torch_window_step_(call: WindowStepCall) -> tuple[torch.Tensor, torch.Tensor]:
    """`deltanet_kernels.window_step_` in PyTorch, float32 inside (float64 for float64 inputs)."""
    if call.state_indices is not None:
        return on_copies(torch_window_step_, call, ("keys", "values", "numbers", "count"))
    q, k, v, window, sinks, keys, values, numbers, count, *_ = call
    if call.cos is not None and call.sin is not None:
        q, k = rotate(torch.cat([q, k], dim=2), call.cos, call.sin).split([q.shape[2], k.shape[2]], dim=2)
    live = None if call.padding is None else ~call.padding[:, 0]
    number = count.add_(1 if live is None else live).unsqueeze(1)  # [B, 1]
    place = torch.where(number <= sinks, number - 1, sinks + number % window).clamp(min=0).long()
    spot = place[:, :, None, None].expand(-1, k.shape[2], 1, k.shape[3])
    changes = ((numbers, 1, place, number), (keys, 2, spot, k.transpose(1, 2)), (values, 2, spot, v.transpose(1, 2)))
    for cache, dim, at, new in changes:
        if live is not None:
            new = torch.where(live.view(-1, *[1] * (new.dim() - 1)), new, cache.gather(dim, at))
        cache.scatter_(dim, at, new)

    dtype = torch.promote_types(q.dtype, torch.float32)
    seen = (numbers > 0) & ((numbers > number - window) | (numbers <= sinks))
    if live is not None:  # A row of padding may see nothing; its result is dropped.
        seen = seen | ~live.unsqueeze(1)
    o, lse = attention(
        q.to(dtype), keys.to(dtype), values.to(dtype), seen[:, None, None], call.factor, call.softcap
    )  # fmt: skip
    if live is not None:
        dead = ~live[:, None, None]
        o, lse = o.masked_fill(dead.unsqueeze(-1), 0.0), lse.masked_fill(dead, 0.0)
    return o.to(q.dtype), lse

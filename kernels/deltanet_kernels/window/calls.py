"""The calls of attention over a window: the arguments of each operator, documented, as one typed object; and checks."""

import math
from typing import NamedTuple

import torch

from deltanet_kernels.checks import (
    check_changed,
    check_cu_seqlens,
    check_length,
    check_rotation,
    check_tensors,
    refuse_gradients,
    require_least,
    require_multiple,
    require_tensor,
)

EDGES = (1, 32)  # tokens on whose multiples windows begin


class WindowCall(NamedTuple):
    """Causal softmax attention to the last `window` tokens and the first `sinks` of the sequence, differentiable.

    A window beside sinks is the attention of StreamingLLM (arXiv 2309.17453). Memory and time are proportional to
    T (window + sinks). HK divides HQ, and query head j reads key head j // (HQ/HK). Keys carry their rotation.

    Args:
        q: queries [B, T, HQ, D]; T >= 1.
        k, v: keys and values [B, T, HK, D], dtype of q.
        window: number of last tokens that a query sees, its own included; >= 1.
        sinks: number of first tokens of its sequence that a query sees, whatever their distance; >= 0.
        scale: factor of the scores, D**-0.5 by default.
        cu_seqlens: offsets [N+1] of packed sequences as for `chunk_gated_delta_rule`; tokens after the last offset
            get o = 0 and lse = 0, no gradient.
        softcap: a score s becomes softcap tanh(s / softcap), as in Gemma 2 (arXiv 2408.00118); > 0, None for no cap.
        edge: with 32, the window begins where it begins for the first token of the query's group of 32 tokens, so that
            all queries of a group see the same earlier groups; 1 for a window of one length.

    Returns:
        o [B, T, HQ, D] in the dtype of q, and the logarithm of each query's sum of exponentials of its scores,
        lse [B, T, HQ] float32 (float64 with float64 inputs). Both are differentiable.

    Raises:
        ValueError: shapes, head counts, devices, offsets, a window, sinks or a softcap that do not fit, T = 0.
        TypeError: dtypes that do not fit.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    window: int
    sinks: int
    scale: float | None = None
    cu_seqlens: torch.Tensor | None = None
    softcap: float | None = None
    edge: int = 1

    @property
    def factor(self) -> float:
        """The factor of the scores: `scale`, or D**-0.5 by default."""
        return float(self.q.shape[3] ** -0.5) if self.scale is None else float(self.scale)


class WindowStepCall(NamedTuple):
    """One decoding step of `window_attention` with a cache of S = window + sinks places, updated in place.

    The token gets the number n = count + 1. Token n <= sinks is kept at place n - 1, any other at place
    sinks + n % window, where it replaces token n - window. On CUDA this is one kernel. No gradients.

    Args:
        q: the token's queries [B, 1, HQ, D].
        k, v: its key and value [B, 1, HK, D], dtype of q.
        window, sinks: as for `window_attention`.
        keys, values: kept keys and values [B, HK, S, D], dtype of k, contiguous.
        numbers: number of the token at each place, 0 if empty [B, S] int32, contiguous.
        count: tokens that each row has seen [B] int32, contiguous; below 2**23.
        scale: factor of the scores, D**-0.5 by default.
        padding: [B, 1] bool, True in rows whose cache stays as it is; their results are 0.
        softcap: as for `window_attention`.
        cos, sin: of a rotary embedding, [B, 1, R] or [1, 1, R] with an even R <= D: it turns the first R channels of q
            and k before anything else: channel i < R/2 against channel i + R/2. Keys are kept turned.
        state_indices: [B] int32, the row of keys, values, numbers and count that holds each sequence; otherwise as for
            `gated_delta_step_`.

    Returns:
        o [B, 1, HQ, D] in the dtype of q, and lse [B, 1, HQ], both as of `window_attention`.

    Raises:
        ValueError: shapes, head counts, devices or a softcap that do not fit, a cache that is not contiguous.
        TypeError: dtypes that do not fit.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    window: int
    sinks: int
    keys: torch.Tensor
    values: torch.Tensor
    numbers: torch.Tensor
    count: torch.Tensor  # type: ignore[assignment]  # tuples have a method of this name
    scale: float | None = None
    padding: torch.Tensor | None = None
    softcap: float | None = None
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    state_indices: torch.Tensor | None = None

    @property
    def factor(self) -> float:
        """The factor of the scores: `scale`, or D**-0.5 by default."""
        return float(self.q.shape[3] ** -0.5) if self.scale is None else float(self.scale)


class WindowMixtureCall(NamedTuple):
    """The output of `window_attention` mixed with that of a state, behind the state's norm and gate.

        f = rmsnorm(state_output) * norm_weight * silu(z);  o = share f + (1 - share) window_output
        share = sigmoid(share_logit + far_slope log(unseen) - near_slope lse)

    where unseen = max(min(n, reach) - places - (n - 1) % edge, 0) for token number n, and share = 0 while unseen = 0.
    On CUDA this is one kernel. No gradients.

    Args:
        window_output, lse: the results of `window_attention` or `window_step_` [B, T, H, D] and [B, T, H].
        state_output: the state's output of the last tokens [B, T', H, D], T' <= T; 0 for those before.
        share_logit: [B, T, H].
        far_slope, near_slope: [H].
        places: number of tokens that the window sees with its sinks.
        reach: number of last tokens, a token's own included, that count towards `unseen`; >= 1, None for all.
        numbers: numbers of the tokens in their sequences, from 1, [B, T] or [1, T] integers, 0 for padding; 1 to T by
            default.
        z: gate logits [B, T, H, D], or None for no gate.
        norm_weight: [D] or [H, D], or None for no norm.
        eps: added to the mean square.
        edge: as for `window_attention`; `places` are those of a token that begins a group.

    Returns:
        o [B, T, H, D] in the dtype of window_output.

    Raises:
        ValueError: shapes, devices, places or a reach that do not fit, or gradients are required.
        TypeError: dtypes that do not fit.
    """

    window_output: torch.Tensor
    lse: torch.Tensor
    state_output: torch.Tensor
    share_logit: torch.Tensor
    far_slope: torch.Tensor
    near_slope: torch.Tensor
    places: int
    reach: int | None = None
    numbers: torch.Tensor | None = None
    z: torch.Tensor | None = None
    norm_weight: torch.Tensor | None = None
    eps: float = 1e-6
    edge: int = 1


class WindowKeepCall(NamedTuple):
    """The cache of `window_step_` after sequences of T tokens. On CUDA this is one kernel. No gradients.

    Args:
        k, v: keys and values [B, T, HK, D] in one dtype; T >= 1.
        window, sinks: as for `window_attention`.
        length: [1] int64: as if the first `length` tokens, at least 1, were all; what follows them is padding. It is
            read on the device. All T by default.

    Returns:
        keys, values, numbers and count as `window_step_` takes them; places without a token hold zeros.

    Raises:
        ValueError: shapes, devices, a window or sinks that do not fit, or gradients are required.
        TypeError: dtypes that do not fit.
    """

    k: torch.Tensor
    v: torch.Tensor
    window: int
    sinks: int
    length: torch.Tensor | None = None


def check_window_attention(call: WindowCall) -> None:
    """Check the arguments of an attention.

    Raises:
        ValueError: a shape, head count, device, offset, window, number of sinks, softcap or edge that does not fit.
        TypeError: a dtype that does not fit, or an argument that is not a tensor.
    """
    sizes = _check_tokens(call, {"q": "B T HQ D", "k": "B T HK D", "v": "B T HK D"})
    _check_reach(call.window, call.sinks)
    _check_softcap(call.softcap)
    if call.edge not in EDGES:
        raise ValueError(f"edge: got {call.edge}, expected one of {EDGES}")
    if call.cu_seqlens is not None:
        check_cu_seqlens(call.cu_seqlens, sizes["B"], sizes["T"], call.q.device)


def check_window_step(call: WindowStepCall) -> None:
    """Check the arguments of a decoding step.

    Raises:
        ValueError: a shape, head count, device, window, number of sinks or softcap that does not fit, or a cache that
            is not contiguous.
        TypeError: a dtype that does not fit, or an argument that is not a tensor.
    """
    _check_reach(call.window, call.sinks)
    _check_softcap(call.softcap)
    rows = "B" if call.state_indices is None else "R"
    cache = {"keys": f"{rows} HK S D", "values": f"{rows} HK S D", "numbers": f"{rows} S", "count": rows}
    dims = {"q": "B 1 HQ D", "k": "B 1 HK D", "v": "B 1 HK D", **cache, "padding?": "B 1", "state_indices?": "B"}
    sizes = _check_tokens(call, dims, {"S": call.window + call.sinks})
    for name in cache:
        check_changed(name, getattr(call, name), call.state_indices)
    check_rotation(call.cos, call.sin, sizes["B"], 1, sizes["D"], call.q.device)


def check_window_mixture(call: WindowMixtureCall) -> None:
    """Check the arguments of a mixture.

    Raises:
        ValueError: a shape, device, number of places or reach that does not fit.
        TypeError: a dtype that does not fit, or an argument that is not a tensor.
    """
    require_least("places", call.places, 1)
    if call.reach is not None:
        require_least("reach", call.reach, 1)
    tokens, recalled = (
        require_tensor(name, getattr(call, name)).shape[1:2].numel() for name in ("window_output", "state_output")
    )
    dims = {"window_output": "B T H D", "lse": "B T H", "state_output": "B T' H D", "share_logit": "B T H"}
    dims |= {"far_slope": "H", "near_slope": "H", "z?": "B T H D"}
    dims["norm_weight?"] = "D" if getattr(call.norm_weight, "ndim", 1) == 1 else "H D"
    dims["numbers?"] = "1 T" if getattr(call.numbers, "shape", ())[:1] == (1,) else "B T"
    check_tensors(call, dims, {"T'": min(tokens, recalled)}, dtypes={"numbers": (torch.int32, torch.int64)})
    tensors = (getattr(call, name.removesuffix("?")) for name in dims if name != "numbers?")
    refuse_gradients("window_mixture", "operations of PyTorch", *tensors)


def check_window_keep(call: WindowKeepCall) -> None:
    """Check the arguments of `window_keep`.

    Raises:
        ValueError: a shape, device, window or number of sinks that does not fit.
        TypeError: a dtype that does not fit, or an argument that is not a tensor.
    """
    check_tensors(call, {"k": "B T HK D", "v": "B T HK D"}, same=("v",))
    _check_reach(call.window, call.sinks)
    check_length(call.length, call.k)
    refuse_gradients("window_keep", "operations of PyTorch", call.k, call.v)


def _check_tokens(
    call: WindowCall | WindowStepCall, dims: dict[str, str], sizes: dict[str, int] | None = None
) -> dict[str, int]:
    integers = dict.fromkeys(("numbers", "count", "state_indices"), (torch.int32,))
    same = ("k", "v", "keys", "values")
    found = check_tensors(call, dims, sizes, same, {**integers, "padding": (torch.bool,)})
    require_multiple("q", found["HQ"], "k", found["HK"])
    return found


def _check_reach(window: int, sinks: int) -> None:
    require_least("window", window, 1)
    require_least("sinks", sinks, 0)


def _check_softcap(softcap: float | None) -> None:
    if softcap is None:
        return
    if isinstance(softcap, bool) or not isinstance(softcap, (int, float)):
        raise TypeError(f"softcap: got {type(softcap).__name__}, needs a float or None")
    if not 0 < softcap < math.inf:
        raise ValueError(f"softcap: got {softcap}, needs a finite number above 0, or None for no cap")

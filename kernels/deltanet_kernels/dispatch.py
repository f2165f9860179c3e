"""The public operators, and the only place that chooses between PyTorch (CPU) and Triton (CUDA).

Each function packs its arguments into one object and checks them once; both forms take that object. A CUDA call that
the Triton kernels do not support runs in PyTorch, and a warning says so once with the reason.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch

from deltanet_kernels import checks
from deltanet_kernels.arguments import Erase, RuleCall, StepCall, WindowCall, WindowStepCall
from deltanet_kernels.channel_gates import cpu as channel_gates_cpu
from deltanet_kernels.channel_gates.arguments import ChannelCall
from deltanet_kernels.channel_gates.checks import check_channel_rule
from deltanet_kernels.common.registration import cached
from deltanet_kernels.gated_delta_rule.cpu import chunked
from deltanet_kernels.gated_delta_rule.cpu_recurrent import torch_recurrent_gated_delta_rule
from deltanet_kernels.gated_delta_rule.cpu_step import torch_gated_delta_step_
from deltanet_kernels.reference import torch_causal_conv1d, torch_gated_rms_norm
from deltanet_kernels.window.checks import check_window_attention, check_window_step
from deltanet_kernels.window.cpu import torch_window_attention
from deltanet_kernels.window.cpu_step import torch_window_step_


@cached
def _triton_function(operator: str) -> Callable[..., Any] | None:
    """The Triton form of an operator, or None (with a warning) if it cannot be imported.

    Imported at the first call on CUDA, by import statements: torch.compile traces those and refuses importlib.
    """
    try:
        from deltanet_kernels.channel_gates.chunk import chunk_channel_gated_delta_rule_triton
        from deltanet_kernels.channel_gates.recurrent import fused_recurrent_channel_gated_delta_rule_triton
        from deltanet_kernels.conv import causal_conv1d_triton
        from deltanet_kernels.gated_delta_rule.chunk import chunk_gated_delta_rule_triton
        from deltanet_kernels.gated_delta_rule.recurrent import fused_recurrent_gated_delta_rule_triton
        from deltanet_kernels.gated_delta_rule.step import gated_delta_step_triton_
        from deltanet_kernels.norm import gated_rms_norm_triton
        from deltanet_kernels.window.attention import window_attention_triton
        from deltanet_kernels.window.step import window_step_triton_
    except (ImportError, AttributeError, RuntimeError) as error:
        _warn_fallback(operator, f"the Triton kernels cannot be imported: {error}")
        return None
    functions: dict[str, Callable[..., Any]] = {
        "chunk_gated_delta_rule": chunk_gated_delta_rule_triton,
        "fused_recurrent_gated_delta_rule": fused_recurrent_gated_delta_rule_triton,
        "chunk_channel_gated_delta_rule": chunk_channel_gated_delta_rule_triton,
        "fused_recurrent_channel_gated_delta_rule": fused_recurrent_channel_gated_delta_rule_triton,
        "causal_conv1d": causal_conv1d_triton,
        "gated_rms_norm": gated_rms_norm_triton,
        "gated_delta_step_": gated_delta_step_triton_,
        "window_attention": window_attention_triton,
        "window_step_": window_step_triton_,
    }
    return functions[operator]


@cached
def _warn_fallback(operator: str, reason: str) -> None:
    warnings.warn(
        f"{operator}: CUDA tensors fall back to the much slower PyTorch form ({reason}).",
        RuntimeWarning,
        stacklevel=4,
    )


def _call(operator: str, fallback: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run the form of an operator for the device of `tensor`; `fallback` is the PyTorch form.

    The Triton form raises NotImplementedError for calls that it does not support.
    """
    if tensor.is_cuda and (function := _triton_function(operator)) is not None:
        try:
            return function(*args, **kwargs)
        except NotImplementedError as error:
            _warn_fallback(operator, str(error))
    return fallback(*args, **kwargs)


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    erase: Erase = "decayed",
    erase_key: torch.Tensor | None = None,
    minibatch: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gated delta rule (Gated Delta Networks, arXiv 2412.06464, eq. 10), chunk by chunk, differentiable.

        S_t = e^{g_t} S_{t-1} + beta_t k_t (v_t - k_t^T e^{g_t} S_{t-1})^T        o_t = scale * q_t^T S_t

    `erase` and `erase_key` choose other predictions: S_t = e^{g_t} S_{t-1} + beta_t k_t (v_t - p_t^T R_t)^T.

    H divides HQ and HV, and HQ divides HV or HV divides HQ. With HO = max(HQ, HV), output head j reads state
    j // (HO/HV) with query head j // (HO/HQ), and state i is written with key head i // (HV/H): value heads
    may share a key head, and query heads may share a state.

    Args:
        q: queries [B, T, HQ, K]; T >= 1.
        k: keys [B, T, H, K], dtype of q.
        v: values [B, T, HV, V], dtype of q.
        g: log decay per token, <= 0 [B, T, HV]; float32 is recommended. With use_gate_in_kernel: the raw logit a.
        beta: write strength in [0, 2] [B, T, HV]; its logit with use_beta_sigmoid_in_kernel.
        scale: factor of the output, K**-0.5 by default.
        initial_state: [N, HV, K, V] float32 (float64 with float64 inputs), N = B or the number of packed
            sequences; zeros by default.
        output_final_state: also return the state after the last token of each sequence.
        use_qk_l2norm_in_kernel: replace q and k by x * rsqrt(sum x^2 + 1e-6).
        cu_seqlens: offsets [N+1] (int32 or int64, first 0, never decreasing, last <= T) of sequences packed
            into one row (B = 1). Sequences may be empty; tokens after the last offset get o = 0, no gradient.
        A_log, dt_bias: [HV] float32, required with use_gate_in_kernel.
        use_gate_in_kernel: the log decay is -exp(A_log) * softplus(g + dt_bias).
        use_beta_sigmoid_in_kernel: the write strength is sigmoid(beta).
        erase: the state R_t whose prediction p_t^T R_t a write subtracts from its value:
            "decayed": e^{g_t} S_{t-1}, the gated delta rule.
            "off": none, S_t = e^{g_t} S_{t-1} + beta_t k_t v_t^T (linear attention, retention, gated linear attention).
            "undecayed": S_{t-1}, as in Comba (arXiv 2506.02475). A closed gate then still erases.
            "chunk_start": the state before the token's mini-batch, decayed since then, as in the linear model with
            mini-batches of test-time training (arXiv 2407.04620).
        erase_key: the key p_t of that prediction [B, T, H, K], dtype of q; the key k_t by default. It is never
            normalised, so its length is the strength of the feedback, also with use_qk_l2norm_in_kernel.
        minibatch: tokens per mini-batch, counted from the first token of each sequence in this call; for
            erase="chunk_start" only. 1 is "decayed". On CUDA the kernels serve 16, 32 and, in 16-bit dtypes, 64; other
            lengths run in PyTorch, in one step per mini-batch.

    Returns:
        o [B, T, HO, V] in the dtype of v, and the final state [N, HV, K, V] float32 or None.

    Raises:
        ValueError: shapes, head counts, devices or offsets that do not fit, T = 0.
        TypeError: dtypes that do not fit.
    """
    call = RuleCall(
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, A_log, dt_bias,
        use_gate_in_kernel, use_beta_sigmoid_in_kernel, erase, erase_key, minibatch,
    )  # fmt: skip
    checks.check_delta_rule(call)
    return _call("chunk_gated_delta_rule", chunked, q, call.simplified())  # type: ignore[no-any-return]


def fused_recurrent_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    erase: Erase = "decayed",
    erase_key: torch.Tensor | None = None,
    minibatch: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gated delta rule by its recurrence, for decoding and short inputs.

    Arguments, results and errors are those of `chunk_gated_delta_rule`; calls that need gradients use its kernels.
    """
    call = RuleCall(
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, A_log, dt_bias,
        use_gate_in_kernel, use_beta_sigmoid_in_kernel, erase, erase_key, minibatch,
    )  # fmt: skip
    checks.check_delta_rule(call)
    return _call(  # type: ignore[no-any-return]
        "fused_recurrent_gated_delta_rule", torch_recurrent_gated_delta_rule, q, call.simplified()
    )


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Causal depthwise convolution with state: y_t = activation(sum_w weight[:, w] x_{t-W+1+w} + bias).

    Args:
        x: inputs [B, T, D]; T >= 1.
        weight: [D, W]; the last column multiplies the current token.
        bias: [D] or None.
        activation: None or "silu".
        initial_state: the W-1 inputs before the first, oldest first [N, D, W-1]; zeros by default.
        output_final_state: also return the last W-1 inputs of each sequence.
        cu_seqlens: offsets [N+1] of packed sequences as for `chunk_gated_delta_rule`; tokens after the last
            offset get y = 0.

    Returns:
        y [B, T, D] in the dtype of x, and the final state [N, D, W-1] in the dtype of x or None.

    Raises:
        ValueError: shapes, devices, offsets or an activation that do not fit.
        TypeError: dtypes that do not fit.
    """
    checks.check_causal_conv1d(x, weight, bias, activation, initial_state, cu_seqlens)
    return _call(  # type: ignore[no-any-return]
        "causal_conv1d", torch_causal_conv1d, x,
        x, weight, bias, activation, initial_state, output_final_state, cu_seqlens,
    )  # fmt: skip


def gated_rms_norm(x: torch.Tensor, z: torch.Tensor | None, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Gated RMSNorm over the last dimension: rmsnorm(x) * weight * silu(z), computed in float32.

    Args:
        x: [..., D].
        z: gate logits in the shape of x, or None for no gate.
        weight: [D], or [H, D] with x [..., H, D].
        eps: added to the mean square.

    Returns:
        The shape and dtype of x.

    Raises:
        ValueError: shapes or devices that do not fit.
        TypeError: dtypes that do not fit.
    """
    checks.check_gated_rms_norm(x, z, weight)
    return _call(  # type: ignore[no-any-return]
        "gated_rms_norm", torch_gated_rms_norm, x, x, z, weight, eps
    )


def gated_delta_step_(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    state: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    conv_weight: torch.Tensor | None = None,
    conv_tail: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    padding: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    eps: float = 1e-6,
    qk_silu: bool = False,
    v_silu: bool = False,
    k_offset: torch.Tensor | None = None,
    allow_neg_eigval: bool = False,
    use_beta_sigmoid_in_kernel: bool = True,
    erase: Erase = "decayed",
) -> torch.Tensor:
    """One or several decoding steps of a Gated DeltaNet layer between its projections; updates state and tail in place.

        q, k, v = act(rope(conv(q|k|v)) - offset);  q, k = x * rsqrt(sum x^2 + 1e-6);  beta = sigmoid(b)
        g = -exp(A_log) * softplus(a + dt_bias)
        o = rmsnorm(gated_delta_rule(q, k, v, g, beta)) * norm_weight * silu(z)

    On CUDA one kernel computes this for one token, and for several tokens or several query heads per state up to a
    state of 128 x 128; with a convolution it requires HQ = H = HV. Other calls run the separate kernels. No gradients.
    Head counts as for `chunk_gated_delta_rule`.

    Args:
        q, k, v: projections of T tokens [B, T, HQ*K], [B, T, H*K], [B, T, HV*V], or with the heads as a
            dimension of their own [B, T, heads, size]; one dtype.
        a, b: logits of the decay and of the write strength [B, T, HV], or both as they are (see A_log and
            use_beta_sigmoid_in_kernel).
        state: [B, HV, K, V] float32 or bfloat16 (float64 or bfloat16 with float64 inputs), contiguous; the arithmetic
            is float32, and a bfloat16 state is rounded once, to nearest, when it is stored.
        A_log, dt_bias: [HV], or both None if a is the log decay g <= 0 itself.
        conv_weight: [C, W] over the C channels of q|k|v, or None for no convolution.
        conv_tail: the W-1 inputs before the first token, oldest first [B, C, W-1], contiguous; with conv_weight.
        z: output gate logits [B, T, HO*V] or [B, T, HO, V], HO = max(HQ, HV), or None for no gate.
        norm_weight: [V] or [HO, V], or None for no norm.
        padding: [B, T] bool, True at tokens that do not change the state and enter the convolution as zeros; their
            outputs are finite and have no meaning.
        cos, sin: [B, T, R] or [1, T, R], R even and <= K: the first R channels of each head of q and k are rotated,
            channel i < R/2 against channel i + R/2, between convolution and activation; None for no rotation.
        scale: factor of the output before the norm, K**-0.5 by default.
        eps: added to the mean square in the norm.
        qk_silu, v_silu: apply SiLU to q and k, and to v.
        k_offset: [H, K], subtracted from the keys between rotation and activation; None for 0.
        allow_neg_eigval: the write strength is 2 sigmoid(b), so that the factors I - beta k k^T have eigenvalues down
            to -1 (arXiv 2411.12537).
        use_beta_sigmoid_in_kernel: False if b is the write strength itself, up to 2.
        erase: "decayed", "off" or "undecayed", as for `chunk_gated_delta_rule`.

    Returns:
        o [B, T, HO, V] in the dtype of v.

    Raises:
        ValueError: shapes, head counts or devices that do not fit, a state or tail that is not contiguous, T = 0.
        TypeError: dtypes that do not fit.
    """
    call = StepCall(
        q, k, v, a, b, state, A_log, dt_bias, conv_weight, conv_tail, z, norm_weight, padding, cos, sin, k_offset,
        scale, eps, qk_silu, v_silu, allow_neg_eigval, use_beta_sigmoid_in_kernel, erase,
    )  # fmt: skip
    checks.check_gated_delta_step(call)
    return _call("gated_delta_step_", torch_gated_delta_step_, q, call)  # type: ignore[no-any-return]


def window_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: int,
    sinks: int,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
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

    Returns:
        o [B, T, HQ, D] in the dtype of q, and the logarithm of each query's sum of exponentials of its scores,
        lse [B, T, HQ] float32 (float64 with float64 inputs). Both are differentiable.

    Raises:
        ValueError: shapes, head counts, devices, offsets, a window, sinks or a softcap that do not fit, T = 0.
        TypeError: dtypes that do not fit.
    """
    call = WindowCall(q, k, v, window, sinks, scale, cu_seqlens, softcap)
    check_window_attention(call)
    return _call("window_attention", torch_window_attention, q, call)  # type: ignore[no-any-return]


def window_step_(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: int,
    sinks: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    numbers: torch.Tensor,
    count: torch.Tensor,
    share_logit: torch.Tensor | None = None,
    far: torch.Tensor | None = None,
    far_slope: torch.Tensor | None = None,
    near_slope: torch.Tensor | None = None,
    reach: int | None = None,
    scale: float | None = None,
    padding: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """One decoding step of `window_attention` with a cache of S = window + sinks places, updated in place.

    The token gets the number n = count + 1. Token n <= sinks is kept at place n - 1, any other at place
    sinks + n % window, where it replaces token n - window. With `far`, the output of a layer that summarises what the
    window does not see, the result mixes both:

        o = share far + (1 - share) o       share = sigmoid(share_logit + far_slope log(unseen) - near_slope lse)

    where unseen = max(min(n, reach) - S, 0) and lse is the log-sum-exp of `window_attention`; share = 0 while
    unseen = 0. On CUDA this is one kernel. No gradients.

    Args:
        q: the token's queries [B, 1, HQ, D].
        k, v: its key and value [B, 1, HK, D], dtype of q.
        window, sinks: as for `window_attention`.
        keys, values: kept keys and values [B, HK, S, D], dtype of k, contiguous.
        numbers: number of the token at each place, 0 if empty [B, S] int32, contiguous.
        count: tokens that each row has seen [B] int32, contiguous; below 2**23.
        share_logit, far, far_slope, near_slope: [B, 1, HQ], [B, 1, HQ, D], [HQ] and [HQ] float32 (float64 is taken too
            where q is float64), given together or not at all.
        reach: number of last tokens, its own included, that count towards `unseen`; >= 1, None for all.
        scale: factor of the scores, D**-0.5 by default.
        padding: [B, 1] bool, True in rows whose cache stays as it is; their outputs are 0.
        softcap: as for `window_attention`.

    Returns:
        o [B, 1, HQ, D] in the dtype of q.

    Raises:
        ValueError: shapes, head counts, devices or a softcap that do not fit, a cache that is not contiguous.
        TypeError: dtypes that do not fit.
    """
    call = WindowStepCall(
        q, k, v, window, sinks, keys, values, numbers, count, share_logit, far, far_slope, near_slope, reach, scale,
        padding, softcap,
    )  # fmt: skip
    check_window_step(call)
    return _call("window_step_", torch_window_step_, q, call)  # type: ignore[no-any-return]


def chunk_channel_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    erase_key: torch.Tensor | None = None,
    erase: bool = True,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The delta rule with a decay per key channel, chunk by chunk, differentiable.

        S_t = Diag(e^{g_t}) S_{t-1} + beta_t k_t (v_t - p_t^T Diag(e^{g_t}) S_{t-1})^T        o_t = scale * q_t^T S_t

    With p = k it is Kimi Delta Attention (arXiv 2510.26692), with p = b * k the rule of Gated DeltaNet-2
    (arXiv 2605.22791), without erasing gated linear attention (arXiv 2312.06635). Any g <= 0 is safe, -inf included.
    Heads are grouped as in `chunk_gated_delta_rule`.

    Args:
        q: queries [B, T, HQ, K]; T >= 1.
        k: keys [B, T, H, K], dtype of q.
        v: values [B, T, HV, V], dtype of q.
        g: log decay per token and key channel, <= 0 [B, T, HV, K]; float32 is recommended.
        beta: write strength [B, T, HV].
        erase_key: p [B, T, HV, K], dtype of q; k by default. It is used as given, also where k is normalised.
        erase: False writes beta_t k_t v_t^T and never reads the state.
        initial_state: [N, HV, K, V] float32 (float64 with float64 inputs), N = B or the number of packed
            sequences; zeros by default.
        output_final_state: also return the state after the last token of each sequence.
        use_qk_l2norm_in_kernel: replace q and k by x * rsqrt(sum x^2 + 1e-6).
        cu_seqlens: offsets [N+1] of sequences packed into one row (B = 1), as in `chunk_gated_delta_rule`.
        scale: factor of the output, K**-0.5 by default.

    Returns:
        o [B, T, max(HQ, HV), V] in the dtype of v, and the final state [N, HV, K, V] float32 or None.

    Raises:
        ValueError: shapes, head counts, devices or offsets that do not fit, T = 0, an erase key without erasing.
        TypeError: dtypes that do not fit.
    """
    call = ChannelCall(
        q, k, v, g, beta, erase_key, erase, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens,
        scale,
    )  # fmt: skip
    check_channel_rule(call)
    return _call("chunk_channel_gated_delta_rule", channel_gates_cpu.chunked, q, call)  # type: ignore[no-any-return]


def fused_recurrent_channel_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    erase_key: torch.Tensor | None = None,
    erase: bool = True,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The delta rule with a decay per key channel by its recurrence, for decoding and short inputs.

    Arguments, results and errors are those of `chunk_channel_gated_delta_rule`; calls that need gradients use its
    kernels.
    """
    call = ChannelCall(
        q, k, v, g, beta, erase_key, erase, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens,
        scale,
    )  # fmt: skip
    check_channel_rule(call)
    return _call("fused_recurrent_channel_gated_delta_rule", channel_gates_cpu.recurrent, q, call)  # type: ignore[no-any-return]

"""Argument checks of the public operators. A message names the argument, what it got and what it needs."""

from typing import get_args

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from deltanet_kernels.arguments import ConvCall, Erase, GatedNormCall, RMSNormCall, RuleCall, SiluProductCall
from deltanet_kernels.common.registration import is_observed

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# cu_seqlens tensors already found valid, with their version, so that a model's layers read the values only once.
_checked_cu_seqlens: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def shape_text(x: torch.Tensor) -> str:
    return str(list(x.shape))


def require_tensor(name: str, x: object) -> torch.Tensor:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}, needs a tensor")
    return x


def require_float(name: str, x: torch.Tensor) -> None:
    if x.dtype not in _FLOATS:
        raise TypeError(f"{name}: got dtype {x.dtype}, needs a floating-point dtype")


def require_device(name: str, x: torch.Tensor, like: str, device: torch.device) -> None:
    if x.device != device:
        raise ValueError(f"{name}: got device {x.device}, needs {device} (the device of {like})")


def require_input(name: str, x: object, like: str, first: torch.Tensor) -> torch.Tensor:
    """Check that x is a tensor of floating-point numbers on the device of `first`, an argument named `like`."""
    tensor = require_tensor(name, x)
    if tensor.dtype not in _FLOATS or tensor.device != first.device:
        require_float(name, tensor)
        require_device(name, tensor, like, first.device)
    return tensor


def require_least(name: str, value: object, least: int) -> None:
    """Check that `value` is an int of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: got {type(value).__name__}, needs int")
    if value < least:
        raise ValueError(f"{name}: got {value}, needs at least {least}")


def require_shape(name: str, x: torch.Tensor, shape: tuple[int, ...], meaning: str) -> None:
    if x.shape != shape:
        raise ValueError(f"{name}: got shape {shape_text(x)}, needs {meaning} = {list(shape)}")


def require_log_decay(name: str, x: torch.Tensor) -> None:
    """Check on a CPU that no log decay is above 0: a state that grows has no chunk form here. NaN passes.

    On a GPU, where reading values would wait for the device, they are the caller's word.
    """
    if x.device.type == "cpu" and not is_observed() and bool((x > 0).any()):
        raise ValueError(f"{name}: got a log decay of {float(x.max()):.3g}, needs at most 0")


def check_cu_seqlens(cu_seqlens: torch.Tensor, batch: int, tokens: int, device: torch.device) -> int:
    """Check packed-sequence offsets against a [1, tokens, ...] batch; return the number of sequences."""
    require_tensor("cu_seqlens", cu_seqlens)
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens: got dtype {cu_seqlens.dtype}, needs int32 or int64")
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        raise ValueError(f"cu_seqlens: got shape {shape_text(cu_seqlens)}, needs [N+1] with N >= 1 sequences")
    if batch != 1:
        raise ValueError(f"cu_seqlens: got a batch of {batch} rows, needs one row (B = 1)")
    require_device("cu_seqlens", cu_seqlens, "the tokens", device)
    if not torch.compiler.is_compiling():
        _check_cu_seqlens_values(cu_seqlens, tokens)
    return cu_seqlens.numel() - 1


def _check_cu_seqlens_values(cu_seqlens: torch.Tensor, tokens: int) -> None:
    # Inference tensors have no version counter, so their values are read at every call.
    version = None if cu_seqlens.is_inference() else (cu_seqlens._version, tokens)
    if version is not None and _checked_cu_seqlens.get(cu_seqlens) == version:
        return
    if cu_seqlens.is_cuda:
        _check_on_device(cu_seqlens, tokens)
    else:
        _check_offsets(cu_seqlens.tolist(), tokens)
    if version is not None:
        _checked_cu_seqlens[cu_seqlens] = version


def _check_on_device(cu_seqlens: torch.Tensor, tokens: int) -> None:
    """Check the values on the device without waiting for it; wrong offsets stop the program by a device assertion."""
    grows = (cu_seqlens[1:] >= cu_seqlens[:-1]).all()
    fits = (cu_seqlens[0] == 0) & (cu_seqlens[-1] <= tokens)
    torch._assert_async(grows & fits, f"cu_seqlens: needs offsets from 0 that never decrease, at most T = {tokens}")


def _check_offsets(offsets: list[int], tokens: int) -> None:
    if offsets[0] != 0:
        raise ValueError(f"cu_seqlens: got a first offset of {offsets[0]}, needs 0")
    for i in range(1, len(offsets)):
        if offsets[i] < offsets[i - 1]:
            raise ValueError(
                f"cu_seqlens: got {offsets[i - 1]} followed by {offsets[i]} at position {i}, "
                "needs offsets that never decrease"
            )
    if offsets[-1] > tokens:
        raise ValueError(f"cu_seqlens: got a last offset of {offsets[-1]}, needs at most T = {tokens}")


def check_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[int, int, int, int, int]:
    """Check the shapes of q [B, T, HQ, K], k [B, T, H, K] and v [B, T, HV, V]; B, T, K, HV and V, or ValueError."""
    for name, x, meaning in (("q", q, "[B, T, HQ, K]"), ("k", k, "[B, T, H, K]"), ("v", v, "[B, T, HV, V]")):
        if x.dim() != 4:
            raise ValueError(f"{name}: got shape {shape_text(x)}, needs 4 dimensions {meaning}")
    (B, T, HQ, K), H, (HV, V) = q.shape, k.shape[2], v.shape[2:]
    if T == 0:
        raise ValueError(f"q: got shape {shape_text(q)} with T = 0, needs at least one token")
    if 0 in (B, HQ, H, HV, K, V):
        name, x = next((name, x) for name, x in (("q", q), ("k", k), ("v", v)) if 0 in x.shape)
        raise ValueError(f"{name}: got shape {shape_text(x)}, needs no empty dimension")
    require_shape("k", k, (B, T, H, K), "[B, T, H, K] with B, T and K of q")
    require_shape("v", v, (B, T, HV, V), "[B, T, HV, V] with B and T of q")
    if HV % H:
        raise ValueError(f"v: got {HV} heads, needs a multiple of the {H} heads of k")
    if HQ % H:
        raise ValueError(f"q: got {HQ} heads, needs a multiple of the {H} heads of k")
    if HQ % HV and HV % HQ:
        raise ValueError(f"q: got {HQ} heads, needs a multiple or a divisor of the {HV} heads of v")
    return B, T, K, HV, V


def check_delta_rule(call: RuleCall, drop_in: bool = False) -> bool:
    """Check the arguments of a gated delta rule.

    Args:
        call: the arguments.
        drop_in: take also what `gated_delta_rule.drop_in.plain` turns into a call for the kernels: mixed dtypes, an
            initial state in any floating-point dtype or with its dimensions swapped, doubled write strengths, and
            gates without a bias.

    Returns:
        Whether the kernels take the call as it is; always True without `drop_in`.

    Raises:
        ValueError: a shape, head count, device or offset that does not fit, or a log decay above 0.
        TypeError: a dtype that does not fit, or an argument that is not a tensor.
    """
    q, k, v, g, beta, initial_state, cu_seqlens = (*call[:5], call.initial_state, call.cu_seqlens)
    doubled, v_first = call.allow_neg_eigval, call.state_v_first
    plain = not (doubled or v_first)
    device, dtype = require_tensor("q", q).device, q.dtype
    for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta)):
        require_input(name, x, "q", q)
    B, T, K, HV, V = check_heads(q, k, v)
    for name, x in (("k", k), ("v", v)):
        if x.dtype != dtype:
            plain = False
            if not drop_in:
                raise TypeError(f"{name}: got dtype {x.dtype}, needs {dtype} (the dtype of q)")
    require_shape("g", g, (B, T, HV), "[B, T, HV] with HV of v")
    if not call.use_gate_in_kernel:
        require_log_decay("g", g)
    require_shape("beta", beta, (B, T, HV), "[B, T, HV] with HV of v")
    N = B if cu_seqlens is None else check_cu_seqlens(cu_seqlens, B, T, device)
    if initial_state is not None:
        require_tensor("initial_state", initial_state)
        wanted = torch.float64 if dtype == torch.float64 else torch.float32
        if initial_state.dtype != wanted:
            plain = False
            if not drop_in:
                raise TypeError(f"initial_state: got dtype {initial_state.dtype}, needs {wanted}")
            require_float("initial_state", initial_state)
        require_device("initial_state", initial_state, "q", device)
        if v_first:
            require_shape("initial_state", initial_state, (N, HV, V, K), "[N, HV, V, K] with state_v_first")
        else:
            require_shape("initial_state", initial_state, (N, HV, K, V), "[N, HV, K, V]")
    if doubled and not call.use_beta_sigmoid_in_kernel:
        raise ValueError("allow_neg_eigval: doubles a sigmoid, needs use_beta_sigmoid_in_kernel")
    for name, gate in (("A_log", call.A_log), ("dt_bias", call.dt_bias)):
        if call.use_gate_in_kernel:
            if gate is None and name == "dt_bias" and drop_in:
                plain = False
                continue
            if gate is None:
                raise ValueError(f"{name}: got None, needs [HV] = [{HV}] when use_gate_in_kernel is set")
            require_input(name, gate, "q", q)
            require_shape(name, gate, (HV,), "[HV]")
        elif gate is not None:
            raise ValueError(f"{name}: got a tensor, needs None unless use_gate_in_kernel is set")
    if call.erase not in get_args(Erase):
        raise ValueError(f"erase: got {call.erase!r}, needs one of {', '.join(map(repr, get_args(Erase)))}")
    return plain


def check_rotation(
    cos: torch.Tensor | None, sin: torch.Tensor | None, B: int, T: int, channels: int, device: torch.device
) -> None:
    """Check a rotary embedding of heads [B, T, H, channels]; raises ValueError or TypeError."""
    if cos is None or sin is None:
        if cos is not sin:
            raise ValueError("sin: needs a tensor with cos, and None without")
        return
    for name, x in (("cos", cos), ("sin", sin)):
        require_float(name, require_tensor(name, x))
        require_device(name, x, "q", device)
    R = cos.shape[-1]
    if tuple(cos.shape) not in ((B, T, R), (1, T, R)) or R % 2 or not 0 < R <= channels:
        raise ValueError(f"cos: got shape {shape_text(cos)}, needs [{B} or 1, {T}, R] with an even R up to {channels}")
    require_shape("sin", sin, tuple(cos.shape), "the shape of cos")


def check_state_indices(
    state_indices: torch.Tensor | None, B: int, device: torch.device, changed: torch.Tensor, name: str = "state_indices"
) -> int:
    """The rows that the changed tensors of a step need; raises ValueError or TypeError for indices that do not fit."""
    if state_indices is None:
        return B
    require_shape(name, require_tensor(name, state_indices), (B,), "[B] with B of q")
    require_device(name, state_indices, "q", device)
    if state_indices.dtype != torch.int32:
        raise TypeError(f"{name}: got dtype {state_indices.dtype}, needs torch.int32")
    return len(changed)


def check_changed(name: str, x: torch.Tensor, state_indices: torch.Tensor | None) -> None:
    """Raises ValueError for a tensor that is changed in place but not contiguous; with indices each row has to be."""
    if not (x if state_indices is None else x[:1]).is_contiguous():
        raise ValueError(f"{name}: got strides {x.stride()}, needs a contiguous tensor: it is changed")


def check_length(length: torch.Tensor | None, k: torch.Tensor) -> None:
    """Check the device's number of tokens of a prompt with keys k; raises ValueError or TypeError."""
    if length is not None:
        require_shape("length", require_tensor("length", length), (1,), "[1]")
        require_device("length", length, "k", k.device)
        if length.dtype != torch.int64:
            raise TypeError(f"length: got dtype {length.dtype}, needs int64")


def refuse_gradients(operator: str, instead: str, *tensors: torch.Tensor | None) -> None:
    """Raise ValueError where autograd would record a call of an operator that has no gradients."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise ValueError(f"{operator} has no gradients: call it under torch.no_grad(), or take {instead}")


def check_causal_conv1d(call: ConvCall) -> None:
    """Check the arguments of the short convolution; raises ValueError or TypeError."""
    x, weight, bias, activation, initial_state, _, cu_seqlens = call
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias), ("initial_state", initial_state)):
        if tensor is None and name in ("bias", "initial_state"):
            continue
        require_input(name, tensor, "x", x)
    if x.dim() != 3 or 0 in x.shape:
        raise ValueError(f"x: got shape {shape_text(x)}, needs [B, T, D] with at least one token")
    B, T, D = x.shape
    if weight.dim() != 2 or weight.shape[0] != D or weight.shape[1] < 1:
        raise ValueError(f"weight: got shape {shape_text(weight)}, needs [D, W] with D = {D} and W >= 1")
    if bias is not None:
        require_shape("bias", bias, (D,), "[D]")
    if activation not in (None, "silu"):
        raise ValueError(f"activation: got {activation!r}, needs None or 'silu'")
    N = B if cu_seqlens is None else check_cu_seqlens(cu_seqlens, B, T, x.device)
    if initial_state is not None:
        require_shape("initial_state", initial_state, (N, D, weight.shape[1] - 1), "[N, D, W-1]")


def check_gated_rms_norm(call: GatedNormCall) -> None:
    """Check the arguments of the gated norm; raises ValueError or TypeError."""
    x, z, weight, _ = call
    require_input("x", x, "x", x)
    require_input("weight", weight, "x", x)
    if z is not None:
        require_input("z", z, "x", x)
    if x.dim() < 1 or x.shape[-1] == 0:
        raise ValueError(f"x: got shape {shape_text(x)}, needs [..., D] with D >= 1")
    if z is not None:
        require_shape("z", z, x.shape, "the shape of x")
    if weight.dim() not in (1, 2) or weight.shape != x.shape[-weight.dim() :]:
        raise ValueError(
            f"weight: got shape {shape_text(weight)}, needs [D] or [H, D] matching the last dimensions of x, "
            f"which is {shape_text(x)}"
        )


def check_silu_product(call: SiluProductCall) -> None:
    """Check the arguments of the product of a feed-forward block; raises ValueError or TypeError."""
    gate, up = call
    for name, x in (("gate", gate), ("up", up)):
        require_input(name, x, "gate", gate)
    if gate.dim() != 3 or 0 in gate.shape:
        raise ValueError(f"gate: got shape {shape_text(gate)}, needs [B, T, D] without empty dimensions")
    require_shape("up", up, tuple(gate.shape), "the shape of gate")
    if up.dtype != gate.dtype:
        raise TypeError(f"up: got dtype {up.dtype}, needs {gate.dtype} (the dtype of gate)")
    refuse_gradients("silu_product", "F.silu(gate) * up", gate, up)


def check_rms_norm(call: RMSNormCall) -> None:
    """Check the arguments of the norm of a residual sum; raises ValueError or TypeError."""
    x, weight, eps, offset, round_first, residual, total = call
    check_gated_rms_norm(GatedNormCall(x, None, weight, eps))
    require_shape("weight", weight, (x.shape[-1],), "[D]")
    if round_first and weight.dtype != x.dtype:
        raise TypeError(f"weight: got dtype {weight.dtype}, needs that of x ({x.dtype}) with round_first")
    if round_first and offset != 0:
        raise ValueError(f"offset: got {offset}, needs 0 with round_first")
    if (residual is None) != (total is None):
        raise ValueError("residual, total: got one of them, needs both or neither")
    for name, tensor in (("residual", residual), ("total", total)):
        if tensor is None:
            continue
        tensor = require_tensor(name, tensor)
        require_device(name, tensor, "x", x.device)
        require_shape(name, tensor, tuple(x.shape), "the shape of x")
        if tensor.dtype != x.dtype:
            raise TypeError(f"{name}: got dtype {tensor.dtype}, needs that of x ({x.dtype})")
    if total is not None and not total.is_contiguous():
        raise ValueError("total: got a tensor that is not contiguous")
    refuse_gradients("rms_norm", "gated_rms_norm", x, weight, residual)

"""Argument checks of the public operators. A message names the argument, what it got and what it needs."""

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from deltanet_kernels.arguments import ConvCall, Erase, GatedNormCall, RMSNormCall, RuleCall, SiluProductCall
from deltanet_kernels.common.registration import is_observed

FLOATS: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# cu_seqlens tensors already found valid, with their version, so that a model's layers read the values only once.
_checked_cu_seqlens: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def shape_text(x: torch.Tensor) -> str:
    return str(list(x.shape))


def require_tensor(name: str, x: object) -> torch.Tensor:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}, needs a tensor")
    return x


def require_float(name: str, x: torch.Tensor) -> None:
    if x.dtype not in FLOATS:
        raise TypeError(f"{name}: got dtype {x.dtype}, needs a floating-point dtype")


def require_device(name: str, x: torch.Tensor, like: str, device: torch.device) -> None:
    if x.device != device:
        raise ValueError(f"{name}: got device {x.device}, needs {device} (the device of {like})")


def require_input(name: str, x: object, like: str, first: torch.Tensor) -> torch.Tensor:
    """Check that x is a tensor of floating-point numbers on the device of `first`, an argument named `like`."""
    tensor = require_tensor(name, x)
    if tensor.dtype not in FLOATS or tensor.device != first.device:
        require_float(name, tensor)
        require_device(name, tensor, like, first.device)
    return tensor


def require_least(name: str, value: object, least: int) -> None:
    """Check that `value` is an int of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: got {type(value).__name__}, needs int")
    if value < least:
        raise ValueError(f"{name}: got {value}, needs at least {least}")


def check_tensors(
    call: Any,
    dims: Mapping[str, str],
    sizes: Mapping[str, int] | None = None,
    same: Sequence[str] = (),
    dtypes: Mapping[str, tuple[torch.dtype, ...]] | None = None,
) -> dict[str, int]:
    """Check tensors of a call by their dimensions; the first is that on whose device the others have to be.

    Args:
        dims: argument -> names of its dimensions, such as "B 1 HQ D". "mask?" may be None.
        sizes: of names that are known.
        same: arguments that need the dtype of the first.
        dtypes: argument -> dtypes that it may have; others are floating-point numbers.

    Returns:
        The sizes of all names; those that were not known are at least 1.

    Raises:
        ValueError: a shape or device that does not fit.
        TypeError: a dtype that does not fit, or an argument that is not a tensor.
    """
    found, first, origin = {"1": 1, **(sizes or {})}, "", None
    for name, names in dims.items():
        given, name = name, name.rstrip("?")
        x = getattr(call, name)
        if x is None and given != name:
            continue
        if origin is None:
            first, origin = name, require_tensor(name, x)
        allowed = (origin.dtype,) if name in same else dtypes[name] if dtypes and name in dtypes else FLOATS
        if not isinstance(x, torch.Tensor) or x.dtype not in allowed or x.device != origin.device:
            needed = "a floating-point dtype" if allowed is FLOATS else " or ".join(map(str, allowed))
            if require_tensor(name, x).dtype not in allowed:
                like = f" (the dtype of {first})" if name in same else ""
                raise TypeError(f"{name}: got dtype {x.dtype}, needs {needed}{like}")
            require_device(name, x, first, origin.device)
        wanted, known = names.split(), len(found)
        fits = x.dim() == len(wanted)
        for size, one in zip(x.shape, wanted, strict=False):
            if one not in found:
                found[one] = size
                fits = fits and size > 0
            elif size != found[one]:
                fits = False
        if not fits:
            before = dict(list(found.items())[:known])
            shown = [", ".join(wanted), ", ".join(str(before.get(one, one)) for one in wanted)]
            needed = " = ".join(f"[{one}]" for one in dict.fromkeys(shown))
            raise ValueError(f"{name}: got shape {shape_text(x)}, needs {needed}, none of them 0")
    return found


def require_multiple(name: str, heads: int, other: str, of: int) -> None:
    if heads % of:
        raise ValueError(f"{name}: got {heads} heads, needs a multiple of the {of} heads of {other}")


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


def check_heads(sizes: Mapping[str, int]) -> None:
    """Check the numbers of heads of q (HQ), k (H) and v (HV); raises ValueError."""
    HQ, HV = sizes["HQ"], sizes["HV"]
    require_multiple("v", HV, "k", sizes["H"])
    require_multiple("q", HQ, "k", sizes["H"])
    if HQ % HV and HV % HQ:
        raise ValueError(f"q: got {HQ} heads, needs a multiple or a divisor of the {HV} heads of v")


QKV = {"q": "B T HQ K", "k": "B T H K", "v": "B T HV V"}


def state_rows(cu_seqlens: torch.Tensor | None) -> tuple[str, dict[str, int]]:
    """The name of the number of states, and its size if it is not that of the rows (B) but of packed sequences."""
    return ("B", {}) if cu_seqlens is None else ("N", {"N": require_tensor("cu_seqlens", cu_seqlens).numel() - 1})


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
    q, state, cu_seqlens = require_tensor("q", call.q), call.initial_state, call.cu_seqlens
    wanted = torch.float64 if q.dtype == torch.float64 else torch.float32
    rows, sizes = state_rows(cu_seqlens)
    dims = {**QKV, "g": "B T HV", "beta": "B T HV"}
    dims["initial_state?"] = f"{rows} HV V K" if call.state_v_first else f"{rows} HV K V"
    if call.use_gate_in_kernel:
        dims |= {"A_log": "HV", "dt_bias?" if drop_in else "dt_bias": "HV"}
    elif call.A_log is not None or call.dt_bias is not None:
        name = "dt_bias" if call.A_log is None else "A_log"
        raise ValueError(f"{name}: got a tensor, needs None unless use_gate_in_kernel is set")
    if drop_in:
        sizes = check_tensors(call, dims, sizes)
    else:
        sizes = check_tensors(call, dims, sizes, ("k", "v"), {"initial_state": (wanted,)})
    check_heads(sizes)
    if not call.use_gate_in_kernel:
        require_log_decay("g", call.g)
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, sizes["B"], sizes["T"], q.device)
    if call.allow_neg_eigval and not call.use_beta_sigmoid_in_kernel:
        raise ValueError("allow_neg_eigval: doubles a sigmoid, needs use_beta_sigmoid_in_kernel")
    if call.erase not in get_args(Erase):
        raise ValueError(f"erase: got {call.erase!r}, needs one of {', '.join(map(repr, get_args(Erase)))}")
    return (
        q.dtype == call.k.dtype == call.v.dtype
        and not (call.allow_neg_eigval or call.state_v_first)
        and (state is None or state.dtype == wanted)
        and not (call.use_gate_in_kernel and call.dt_bias is None)
    )


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
    x, cu_seqlens = call.x, call.cu_seqlens
    sizes = check_tensors(call, {"x": "B T D", "weight": "D W", "bias?": "D"})
    if call.activation not in (None, "silu"):
        raise ValueError(f"activation: got {call.activation!r}, needs None or 'silu'")
    N = sizes["B"] if cu_seqlens is None else check_cu_seqlens(cu_seqlens, sizes["B"], sizes["T"], x.device)
    if call.initial_state is not None:
        check_tensors(call, {"x": "B T D", "initial_state": "N D W-1"}, {**sizes, "N": N, "W-1": sizes["W"] - 1})


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
    check_tensors(call, {"gate": "B T D", "up": "B T D"}, same=("up",))
    refuse_gradients("silu_product", "F.silu(gate) * up", *call)


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

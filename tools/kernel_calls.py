"""The calls of all operators in their pinned configurations: for kernel_machine_code.py, or run on a GPU.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH=.:kernels compute-sanitizer --tool memcheck python tools/kernel_calls.py

Without the caching allocator every tensor has its own allocation, so that a step past its end is seen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from deltanet_kernels.arguments import ConvCall, GatedNormCall, RMSNormCall, RuleCall, StepCall
from deltanet_kernels.channel_gates.calls import ChannelCall
from deltanet_kernels.channel_gates.chunk import chunk_channel_gated_delta_rule_triton
from deltanet_kernels.conv import causal_conv1d_triton
from deltanet_kernels.flash_decoding.attention import decode_attention_triton
from deltanet_kernels.flash_decoding.calls import DecodeAttentionCall
from deltanet_kernels.gated_delta_rule.chunk import chunk_gated_delta_rule_triton
from deltanet_kernels.gated_delta_rule.recurrent import fused_recurrent_gated_delta_rule_triton
from deltanet_kernels.gated_delta_rule.step import gated_delta_step_triton_
from deltanet_kernels.group_rule.calls import GroupGatesCall, GroupRuleCall, GroupStepCall, RoundStateCall
from deltanet_kernels.group_rule.chunk import chunk_group_triton
from deltanet_kernels.group_rule.gates import group_gates_triton
from deltanet_kernels.group_rule.round_state import round_state_triton
from deltanet_kernels.group_rule.step import group_step_triton_
from deltanet_kernels.mesa.calls import MesaCall, MesaState
from deltanet_kernels.mesa.chunk import chunk_mesa_triton
from deltanet_kernels.norm import gated_rms_norm_triton
from deltanet_kernels.packed_cache.calls import (
    PackedPartCall,
    PackedStepCall,
    PackPromptCall,
    PromptAttentionCall,
    RoundTokensCall,
)
from deltanet_kernels.packed_cache.launches import (
    pack_prompt_triton,
    packed_part_triton,
    packed_step_triton_,
    prompt_attention_triton,
    round_tokens_triton,
)
from deltanet_kernels.prompt.calls import GateValuesCall, PromptInputsCall
from deltanet_kernels.prompt.gates import gate_values_triton
from deltanet_kernels.prompt.inputs import prompt_inputs_triton
from deltanet_kernels.residual_norm import rms_norm_triton
from deltanet_kernels.window.attention import window_attention_triton
from deltanet_kernels.window.calls import WindowCall, WindowKeepCall, WindowMixtureCall, WindowStepCall
from deltanet_kernels.window.keep import window_keep_triton
from deltanet_kernels.window.mixture import window_mixture_triton
from deltanet_kernels.window.step import window_step_triton_

CALLS: list[tuple[str, Callable[[], object]]] = []
"""Every call whose kernels are compared: a name without spaces, and the call."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
Heads = tuple[int, int, int]
"""Of keys, queries and values."""


def each(name: Callable[..., str], *rows: tuple[Any, ...]) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Adds the decorated function to `CALLS`, once with the arguments of each row; `name` takes the same ones."""

    def add(function: Callable[..., object]) -> Callable[..., object]:
        CALLS.extend((name(*row), functools.partial(function, *row)) for row in rows)
        return function

    return add


def rule_inputs(T: int, heads: Heads, K: int, V: int, dtype: torch.dtype, raw: bool, packed: bool) -> dict[str, Any]:
    H, HQ, HV = heads
    B = 1 if packed else 2
    sizes = {"q": (B, T, HQ, K), "k": (B, T, H, K), "v": (B, T, HV, V)}
    inputs: dict[str, Any] = {name: torch.zeros(size, dtype=dtype) for name, size in sizes.items()}
    inputs |= {"g": torch.zeros(B, T, HV), "beta": torch.zeros(B, T, HV)}
    if raw:
        inputs |= {"A_log": torch.zeros(HV), "dt_bias": torch.zeros(HV)}
    inputs = {name: x.requires_grad_() for name, x in inputs.items()}
    if packed:
        inputs["cu_seqlens"] = torch.tensor([0, 70, T], dtype=torch.int32)
        inputs["initial_state"] = torch.zeros(2, HV, K, V)
    flags = {"use_gate_in_kernel": raw, "use_beta_sigmoid_in_kernel": raw, "use_qk_l2norm_in_kernel": True}
    return inputs | flags


def columns(rows: tuple[int, int], sizes: list[int], dtype: torch.dtype, joint: bool) -> list[torch.Tensor]:
    """Tensors [*rows, size], as slices of one if they are the outputs of joint projections."""
    if joint:
        return list(torch.zeros(*rows, sum(sizes), dtype=dtype).split(sizes, dim=-1))
    return [torch.zeros(*rows, size, dtype=dtype) for size in sizes]


def differentiated(function: Callable[..., Any], *arguments: Any) -> None:
    """Call the function, and its backward pass."""
    outputs = [x for x in function(*arguments) if x is not None]
    sum(x.float().sum() for x in outputs).backward()


@each(
    lambda label, heads, K, V, dtype, *_: f"chunk-{dtype}-{label}",
    ("128", (2, 2, 2), 128, 128, "bf16", False, False, 128),
    ("128-raw", (2, 2, 2), 128, 128, "bf16", True, False, 128),
    ("128-grouped", (2, 2, 4), 128, 128, "bf16", False, False, 128),
    ("128-packed-raw", (2, 2, 2), 128, 128, "bf16", True, True, 150),
    ("128-queries", (1, 4, 1), 128, 128, "bf16", False, False, 128),
    ("64", (2, 2, 2), 64, 64, "bf16", False, False, 128),
    ("64-packed", (2, 2, 2), 64, 64, "bf16", True, True, 150),
    ("64-segments", (2, 2, 2), 64, 64, "bf16", False, False, 256, 2),
    ("64-composed", (2, 2, 2), 64, 64, "bf16", False, False, 256, 4),
    ("64-grouped", (1, 1, 2), 64, 64, "bf16", True, False, 128),
    ("256", (1, 1, 1), 256, 256, "bf16", False, False, 128),
    ("16", (2, 2, 2), 16, 16, "bf16", False, False, 130),
    ("128", (2, 2, 2), 128, 128, "fp16", True, False, 128),
    ("64", (2, 2, 2), 64, 64, "fp32", False, False, 128),
    ("128-packed", (1, 1, 2), 128, 128, "fp32", True, True, 150),
)
@each(
    lambda label, heads, K, V, dtype, *_: f"erase-{dtype}-{label}",
    ("128-off", (2, 2, 2), 128, 128, "bf16", False, False, 128, None, "off"),
    ("64-off-grouped", (1, 4, 2), 64, 64, "bf16", False, False, 128, None, "off"),
    ("128-undecayed", (2, 2, 2), 128, 128, "bf16", False, False, 128, None, "undecayed"),
    ("256-undecayed", (1, 1, 1), 256, 256, "bf16", False, False, 128, None, "undecayed"),
    ("128-undecayed", (1, 1, 2), 128, 128, "fp32", False, False, 128, None, "undecayed"),
)
def chunk(
    label: str, heads: Heads, K: int, V: int, dtype: str, raw: bool, packed: bool, T: int,
    segments: int | None = None, erase: str = "decayed",
) -> None:  # fmt: skip
    inputs = rule_inputs(T, heads, K, V, DTYPES[dtype], raw, packed)
    differentiated(chunk_gated_delta_rule_triton, RuleCall(**inputs, erase=erase, output_final_state=True), segments)


@each(
    lambda dtype, K, T, heads, _: f"group-{dtype}-{K}-{T}-{'.'.join(map(str, heads))}",
    ("bf16", 128, 128, (2, 2, 2), 1), ("bf16", 128, 128, (2, 8, 2), 1), ("fp32", 64, 128, (1, 1, 2), 1),
    ("bf16", 64, 128, (1, 3, 1), 1), ("bf16", 64, 100, (2, 2, 2), 1), ("bf16", 256, 128, (1, 2, 1), 1),
    ("fp16", 64, 128, (1, 3, 1), 1), ("fp16", 16, 100, (1, 1, 1), 1), ("fp32", 64, 128, (1, 3, 1), 1),
    ("bf16", 64, 256, (1, 3, 1), 8), ("bf16", 64, 250, (1, 3, 1), 8), ("bf16", 128, 256, (1, 4, 1), 8),
    ("bf16", 128, 256, (2, 2, 2), 8), ("fp32", 64, 256, (1, 3, 1), 8),
)  # fmt: skip
def group(dtype: str, K: int, T: int, heads: Heads, segments: int) -> None:
    inputs = rule_inputs(T, heads, K, K, DTYPES[dtype], False, False)
    inputs = {name: x for name, x in inputs.items() if name in GroupRuleCall._fields}
    state = torch.zeros(2, heads[2], K, K, requires_grad=True)
    call = GroupRuleCall(**inputs, initial_state=state, output_final_state=True)
    differentiated(chunk_group_triton, call, segments)
    with torch.no_grad():
        chunk_group_triton(call, segments)


@each(
    lambda dtype, K, heads, _: f"group-row-{dtype}-{K}-{'.'.join(map(str, heads))}",
    ("bf16", 128, (2, 4, 2), 1), ("bf16", 64, (1, 3, 1), 8), ("fp32", 64, (1, 1, 2), 1),
)  # fmt: skip
@torch.no_grad()
def group_row(dtype: str, K: int, heads: Heads, segments: int) -> None:
    inputs = rule_inputs(400, heads, K, K, DTYPES[dtype], False, True)
    call = GroupRuleCall(**{name: x for name, x in inputs.items() if name in GroupRuleCall._fields})
    chunk_group_triton(call._replace(initial_state=None, output_final_state=True), segments)


@each(
    lambda dtype, K, _: f"recurrent-{dtype}-{K}",
    ("bf16", 128, (2, 2, 2)), ("fp32", 64, (1, 2, 4)), ("fp16", 16, (1, 4, 2)),
)  # fmt: skip
@torch.no_grad()
def recurrent(dtype: str, K: int, heads: Heads) -> None:
    fused_recurrent_gated_delta_rule_triton(RuleCall(**rule_inputs(2, heads, K, K, DTYPES[dtype], True, False)))


@each(
    lambda dtype, packed: f"conv-{dtype}{'-packed' * packed}",
    ("bf16", False), ("bf16", True), ("fp32", False), ("fp32", True),
)  # fmt: skip
def conv(dtype: str, packed: bool) -> None:
    x = torch.zeros(1, 80, 128, dtype=DTYPES[dtype]).requires_grad_()
    w = torch.zeros(128, 4, dtype=DTYPES[dtype]).requires_grad_()
    bounds = torch.tensor([0, 30, 80], dtype=torch.int32) if packed else None
    differentiated(causal_conv1d_triton, ConvCall(x, w, None, "silu", None, True, bounds))


@each(lambda dtype: f"norm-{dtype}", ("bf16",), ("fp32",))
def norm(dtype: str) -> None:
    x, z = (torch.zeros(2, 80, 4, 128, dtype=DTYPES[dtype]).requires_grad_() for _ in range(2))
    w = torch.zeros(128, dtype=DTYPES[dtype]).requires_grad_()
    gated_rms_norm_triton(GatedNormCall(x, z, w)).float().sum().backward()


@each(
    lambda dtype, D, *_: f"rms-{dtype}-{D}",
    ("bf16", 576, 0.0, True), ("fp32", 4096, 1.0, True), ("fp16", 128, 0.0, False),
)  # fmt: skip
def rms(dtype: str, D: int, offset: float, added: bool) -> None:
    x, total, w = (torch.zeros(*size, D, dtype=DTYPES[dtype]) for size in ((2, 1), (2, 1), ()))
    extra = (x, total) if added else ()
    rms_norm_triton(RMSNormCall(x, w, 1e-6, offset, offset == 0, *extra))


@each(
    lambda dtype, K, T, _, joint: f"step-{dtype}-{K}-{T}{'-joint' * joint}",
    ("bf16", 128, 1, 2, False), ("bf16", 64, 2, 2, False), ("fp32", 64, 1, 4, False), ("bf16", 256, 1, 2, False),
    ("bf16", 64, 1, 2, True), ("fp16", 128, 1, 4, True),
)  # fmt: skip
def decode(dtype: str, K: int, T: int, HQ: int, joint: bool) -> None:
    kind, conv = DTYPES[dtype], HQ == 2
    q, k, v, a, b, z = columns((2, T), [HQ * K, 2 * K, 2 * K, 2, 2, HQ * K], kind, joint)
    C = (HQ + 4) * K
    options = {
        "conv_weight": torch.zeros(C, 4, dtype=kind) if conv else None,
        "conv_tail": torch.zeros(2, C, 3, dtype=kind) if conv else None,
        "z": z, "norm_weight": torch.zeros(K, dtype=kind),
        "padding": torch.zeros(2, T, dtype=torch.bool), "qk_silu": True, "v_silu": conv,
    }  # fmt: skip
    if joint or not conv:
        options |= {name: torch.zeros(1, T, K // 2) for name in ("cos", "sin")}
    tensors = {"q": q, "k": k, "v": v, "a": a, "b": b, "state": torch.zeros(2, 2, K, K)}
    gates = {"A_log": torch.zeros(2), "dt_bias": torch.zeros(2)}
    gated_delta_step_triton_(StepCall(**options | tensors | gates))


@each(
    lambda dtype, K, V, heads, packed, erase, own_key: (
        f"channel-{dtype}-{K}-{V}{'-packed' * packed}{'' if erase else '-off'}"
    ),
    ("bf16", 64, 64, (2, 2, 2), False, True, False), ("bf16", 128, 128, (2, 2, 2), False, True, True),
    ("bf16", 64, 128, (1, 4, 2), True, False, False), ("fp16", 64, 64, (1, 1, 2), False, True, False),
    ("fp32", 40, 16, (1, 2, 4), True, True, True),
)  # fmt: skip
def channel(dtype: str, K: int, V: int, heads: Heads, packed: bool, erase: bool, own_key: bool) -> None:
    inputs = rule_inputs(150 if packed else 128, heads, K, V, DTYPES[dtype], False, packed)
    inputs = {name: x for name, x in inputs.items() if name in ChannelCall._fields}
    inputs["g"] = torch.zeros(*inputs["v"].shape[:3], K, requires_grad=True)
    inputs["erase_key"] = torch.zeros_like(inputs["k"], requires_grad=True) if own_key else None
    call = ChannelCall(**inputs, erase=erase, output_final_state=True)
    differentiated(chunk_channel_gated_delta_rule_triton, call)


@each(
    lambda dtype, K, V, heads, packed: f"mesa-{dtype}-{K}-{V}{'-packed' * packed}",
    ("bf16", 64, 64, (2, 2, 2), False), ("bf16", 128, 128, (2, 2, 2), False), ("bf16", 64, 64, (1, 4, 2), True),
    ("fp32", 40, 16, (1, 2, 4), False), ("fp16", 128, 64, (2, 2, 2), False),
)  # fmt: skip
def mesa(dtype: str, K: int, V: int, heads: Heads, packed: bool) -> None:
    inputs = rule_inputs(150 if packed else 128, heads, K, V, DTYPES[dtype], False, packed)
    inputs = {name: x for name, x in inputs.items() if name in MesaCall._fields}
    HV = heads[2]
    before = MesaState(torch.zeros(2, HV, K, V), torch.zeros(2, HV, K, K))
    ridge = torch.ones(HV, K, requires_grad=True)
    call = MesaCall(**inputs | {"ridge": ridge, "initial_state": before}, output_final_state=True, steps=16)
    o, final = chunk_mesa_triton(call)
    assert final is not None
    (o.float().sum() + final.values.sum() + final.keys.sum()).backward()


@each(
    lambda dtype, D, _, sinks, packed, cap=None: (
        f"window-{dtype}-{D}-{sinks}{'-packed' * packed}{'-capped' if cap else ''}"
    ),
    ("bf16", 64, 6, 4, False), ("bf16", 64, 6, 4, True), ("bf16", 128, 2, 40, False), ("bf16", 256, 2, 4, True),
    ("bf16", 256, 2, 4, True, 50.0), ("bf16", 16, 2, 0, False), ("bf16", 100, 2, 4, False), ("fp16", 16, 2, 4, False),
    ("fp16", 64, 2, 4, True), ("fp16", 128, 2, 4, False), ("fp16", 256, 2, 4, False), ("fp16", 256, 2, 4, False, 50.0),
    ("fp32", 64, 2, 4, False), ("fp32", 128, 2, 4, True), ("fp32", 256, 2, 4, False), ("fp32", 256, 2, 4, False, 50.0),
)  # fmt: skip
def window(dtype: str, D: int, HQ: int, sinks: int, packed: bool, cap: float | None = None) -> None:
    q, k, v = (torch.zeros(1, 200, heads, D, dtype=DTYPES[dtype]).requires_grad_() for heads in (HQ, 2, 2))
    offsets = torch.tensor([0, 70, 200], dtype=torch.int32) if packed else None
    o, lse = window_attention_triton(WindowCall(q, k, v, 64, sinks, None, offsets, cap))
    (o.float().sum() + lse.sum()).backward()


@each(
    lambda dtype, D, _, B, joint, cap=None: f"window-step-{dtype}-{D}-{B}{'-joint' * joint}{'-capped' if cap else ''}",
    ("bf16", 64, 6, 1, False), ("bf16", 128, 8, 64, False), ("fp32", 100, 2, 2, False), ("bf16", 256, 4, 200, False),
    ("bf16", 256, 4, 200, False, 50.0), ("bf16", 64, 6, 16, True), ("fp32", 100, 2, 2, True),
)  # fmt: skip
def window_step(dtype: str, D: int, HQ: int, B: int, joint: bool, cap: float | None = None) -> None:
    flat = columns((B, 1), [heads * D for heads in (HQ, 2, 2)], DTYPES[dtype], joint)
    q, k, v = (x.unflatten(-1, (-1, D)) for x in flat)
    keys, values = (torch.zeros(B, 2, 68, D, dtype=DTYPES[dtype]) for _ in range(2))
    numbers = torch.zeros(B, 68, dtype=torch.int32)
    padding = torch.zeros(B, 1, dtype=torch.bool)
    cache = (keys, values, numbers, numbers[:, 0].clone())
    turn = (torch.zeros(B, 1, D // 2),) * 2 if joint else ()
    window_step_triton_(WindowStepCall(q, k, v, 64, 4, *cache, None, padding, cap, *turn))


@each(
    lambda dtype, D, _, S: f"decode-attention-{dtype}-{D}-{S}",
    ("bf16", 64, 6, 4096), ("bf16", 128, 8, 4096), ("bf16", 128, 2, 200), ("bf16", 256, 4, 4096),
    ("bf16", 100, 64, 4001), ("fp16", 64, 6, 4096), ("fp16", 256, 4, 4096), ("fp32", 128, 8, 4096),
)  # fmt: skip
def decode_attention(dtype: str, D: int, HQ: int, S: int) -> None:
    q, k, v = (torch.zeros(2, *size, D, dtype=DTYPES[dtype]) for size in ((HQ, 1), (2, S), (2, S)))
    decode_attention_triton(DecodeAttentionCall(q, k, v, torch.ones(2, 1, 1, S, dtype=torch.bool)))


@each(
    lambda dtype, D, heads, joint, tail: f"prompt-{dtype}-{D}{'-joint' * joint}{'-tail' * tail}",
    ("bf16", 64, (6, 2, 2), False, False), ("bf16", 64, (6, 2, 2), True, True),
    ("bf16", 128, (4, 2, 2), False, True), ("fp16", 128, (2, 2, 2), True, False),
    ("fp32", 100, (2, 1, 1), False, True),
)  # fmt: skip
def prompt(dtype: str, D: int, heads: Heads, joint: bool, tail: bool) -> None:
    kind, (H, HK, _), C = DTYPES[dtype], heads, sum(heads) * D
    sizes = [D * n for n in heads]
    q, k, v, z, logit, a, b = columns((2, 80), [*sizes, H * D, H, H, H], kind, joint)
    weight, before = torch.zeros(C, 4, dtype=kind), torch.zeros(2, C, 3, dtype=kind) if tail else None
    turn = (torch.zeros(1, 80, D // 2 if joint else D, dtype=kind),) * 2
    offset = None if joint else torch.zeros(HK, D, dtype=kind)
    call = PromptInputsCall(q, k, v, D, weight, before, *turn, offset, joint, joint, HK, True)
    prompt_inputs_triton(call)
    slope = torch.zeros(H)
    gate_values_triton(GateValuesCall(a, b, slope, slope))
    k, v, z = (x.unflatten(-1, (-1, D)) for x in (k, v, z))
    window_keep_triton(WindowKeepCall(k, v, 64, 4))
    numbers = torch.zeros(1, 80, dtype=torch.int32) if tail else None
    norm = torch.zeros(H, D, dtype=kind)
    near, lse = torch.zeros(2, 80, H, D, dtype=kind), torch.zeros(2, 80, H)
    window_mixture_triton(WindowMixtureCall(near, lse, near, logit, slope, slope, 68, None, numbers, z, norm))


@each(
    lambda dtype, D, HQ, bits, sinks, cap: f"packed-prompt-{dtype}-{D}-{bits}-{sinks}",
    ("bf16", 64, 6, 4, 0, None), ("bf16", 64, 6, 4, 4, None), ("bf16", 128, 8, 4, 4, None),
    ("bf16", 256, 4, 8, 0, 50.0), ("fp16", 64, 6, 8, 4, None), ("fp16", 256, 2, 4, 4, None),
    ("fp32", 64, 6, 4, 4, None), ("fp32", 256, 2, 8, 4, None),
)  # fmt: skip
def packed_prompt(dtype: str, D: int, HQ: int, bits: int, sinks: int, cap: float | None) -> None:
    q, k, v = (torch.zeros(2, 200, heads, D, dtype=DTYPES[dtype]) for heads in (HQ, 2, 2))
    round_tokens_triton(RoundTokensCall(k, v))
    cache, keys, values = pack_prompt_triton(PackPromptCall(k, v, bits))
    window = 200 if sinks == 0 else 64
    leaves = (x.requires_grad_() for x in (q, k, v))
    call = PromptAttentionCall(*leaves, keys, values, window, sinks, D**-0.5, cap)
    prompt_attention_triton(call)[0].sum().backward()
    q, k, v = (x.detach() for x in (q, k, v))
    rest = (cache, 12, window, sinks, None, None, cap)
    packed_part_triton(PackedPartCall(q, k, v, *rest))
    bounds = torch.tensor([0, 150, 400], dtype=torch.int32)
    joint = (x.view(1, 400, *x.shape[2:]) for x in (q, k, v))
    packed_part_triton(PackedPartCall(*joint, *rest, bounds, 250))
    token = [x[:, :1] for x in (q, k, v)]
    packed_step_triton_(PackedStepCall(*token, cache, window, sinks, softcap=cap))
    state_indices = torch.tensor([1, 0], dtype=torch.int32)
    packed_step_triton_(PackedStepCall(*token, cache, window, sinks, softcap=cap, state_indices=state_indices))
    if sinks and D < 256:
        gate, waiting, slope = torch.zeros(2), torch.zeros(2, 32 * 7, 2, dtype=torch.bfloat16), torch.zeros(HQ)
        beside = PackedStepCall(*token, cache, 32 * 6 + 1, sinks, softcap=cap, edge=32)
        state = torch.zeros(2, 2, D, D, dtype=torch.int8), torch.zeros(2, 2, D)
        a, logit = (torch.zeros(2, 1, heads, dtype=DTYPES[dtype]) for heads in (2, HQ))
        logits = a.expand(2, 200, 2).contiguous()
        group_gates_triton(GroupGatesCall(logits, logits, gate, gate, 6, 4))
        round_state_triton(RoundStateCall(torch.zeros(2, 2, D, D)))
        rest = waiting, waiting, *state, logit, slope, slope, token[0], torch.zeros(HQ, D)
        for one in (beside, beside._replace(state_indices=state_indices)):
            group_step_triton_(GroupStepCall(a, a, gate, gate, one, *rest))


@each(
    lambda dtype, D, HQ, bits, sinks: f"packed-row-{dtype}-{D}-{bits}-{sinks}",
    ("bf16", 64, 6, 4, 4), ("bf16", 128, 8, 4, 4), ("bf16", 256, 4, 8, 0), ("fp32", 64, 6, 8, 0),
)  # fmt: skip
def packed_row(dtype: str, D: int, HQ: int, bits: int, sinks: int) -> None:
    q, k, v = (torch.zeros(1, 400, heads, D, dtype=DTYPES[dtype]) for heads in (HQ, 2, 2))
    row = torch.tensor([0, 150, 400], dtype=torch.int32), 250
    _, *seen = pack_prompt_triton(PackPromptCall(k, v, bits, 6, None, None, *row))
    prompt_attention_triton(PromptAttentionCall(q, k, v, *seen, 193, sinks, D**-0.5, None, 32, *row))
    logits, gate = torch.zeros(1, 400, 2, dtype=DTYPES[dtype]), torch.zeros(2)
    group_gates_triton(GroupGatesCall(logits, logits, gate, gate, 6, sinks, None, 1, *row))


if __name__ == "__main__":
    for name, call in CALLS:
        with torch.device("cuda"):
            call()
        torch.cuda.synchronize()
        print(name, flush=True)

"""The two kernels of step.py: one token with a slice of the state at a time, several tokens with the complete state.

A program computes one state of one row, with the query heads that read it. It can therefore normalise the outputs and,
because the channels of these heads are its own, update the convolution's tail.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"
# ruff: noqa: RUF005 (Triton does not know starred tuples)
from __future__ import annotations

import triton
import triton.language as tl

from deltanet_kernels.common.tiles import L2_EPS, silu
from deltanet_kernels.gated_delta_rule.step_inputs import (
    add_three,
    channels,
    delta_value,
    gates,
    head_at,
    is_real,
    move_tail,
    shift,
)


@triton.jit
def one_token_kernel(
    q, k, v, a, b, A_log, dt_bias, state, conv_weight, conv_tail, z, norm_weight, padding, cos, sin, k_offset, o,
    state_indices, scale, eps, FORM: tl.constexpr,
):  # fmt: skip
    """Process one token; one program per (row, state head)."""
    H: tl.constexpr = FORM.H
    HV: tl.constexpr = FORM.HV
    HQ: tl.constexpr = FORM.HQ
    K: tl.constexpr = FORM.K
    V: tl.constexpr = FORM.V
    Q_ROW: tl.constexpr = FORM.Q_ROW
    K_ROW: tl.constexpr = FORM.K_ROW
    V_ROW: tl.constexpr = FORM.V_ROW
    SLICE: tl.constexpr = FORM.SLICE
    FIRST_K: tl.constexpr = HQ * K
    FIRST_V: tl.constexpr = (HQ + H) * K
    SLICES: tl.constexpr = (V + SLICE - 1) // SLICE
    HO: tl.constexpr = HQ if HQ > HV else HV
    GROUP: tl.constexpr = HO // HV
    head = tl.program_id(0) % HV
    n = (tl.program_id(0) // HV).to(tl.int64)
    k += shift(head // (HV // H), FORM) * K
    v += shift(head, FORM) * V
    if state_indices is not None:  # row n of both is that of the index
        state_index = tl.load(state_indices + n).to(tl.int64)
        state += state_index * FORM.STATE_ROW - n * (HV * K * V)
        if FORM.W > 1:
            conv_tail += state_index * FORM.TAIL_ROW - n * (FORM.C * (FORM.W - 1))
    t = n * 0  # keeps t a tensor in the interpreter
    d = tl.arange(0, FORM.BK)
    e = tl.arange(0, SLICE)
    f = tl.arange(0, FORM.BV)
    md = d < K
    mf = f < V
    at = state + (n * HV + head) * K * V + d[:, None] * V + e[None, :]
    S = tl.load(at, mask=md[:, None] & (e < V)[None, :], other=0.0)
    tl.debug_barrier()  # otherwise the compiler loads the state last
    real = is_real(padding, n, n >= 0)
    qs = ()
    for m in tl.static_range(GROUP):
        q_d = head_at(
            q, conv_weight, conv_tail, padding, cos, sin, None, n, t, 1, (head * GROUP + m) // (HO // HQ), d, md, 0,
            Q_ROW, FORM,
        )  # fmt: skip
        qs = qs + (q_d,)
    k_d = head_at(
        k, conv_weight, conv_tail, padding, cos, sin, k_offset, n, t, 1, head // (HV // H), d, md, FIRST_K,
        K_ROW, FORM,
    )  # fmt: skip
    v_f = channels(v, conv_weight, conv_tail, padding, n, t, 1, head * V + f, mf, FIRST_V, V_ROW, FORM)
    if FORM.V_SILU:
        v_f = silu(v_f)
    gamma, beta = gates(a, b, A_log, dt_bias, n, head, real, FORM)
    z_s = ()
    w_s = ()
    for m in tl.static_range(GROUP):
        out = head * GROUP + m
        for s in tl.static_range(SLICES):
            j = s * SLICE + e
            if z is not None:
                m_z = (j < V) & is_real(padding, e * 0 + n, j < V)
                z_s = z_s + (tl.load(z + n * FORM.Z_ROW + out * V + j, mask=m_z, other=0.0),)
            if norm_weight is not None:
                w_s = w_s + (tl.load(norm_weight + (out % FORM.NORM_HEADS) * V + j, mask=j < V, other=0.0),)
    if FORM.W > 1:
        move_tail(q, k, v, conv_tail, padding, n, t + 1, head, d, md, f, mf, FORM)
    units = ()
    qks = ()
    squares = ()
    k_scale = 1.0
    for m in tl.static_range(GROUP):
        qq, kk, qk = tl.reduce((qs[m] * qs[m], k_d * k_d, qs[m] * k_d), 0, add_three)
        k_scale = tl.rsqrt(kk + L2_EPS)
        units = units + (qs[m] * tl.rsqrt(qq + L2_EPS),)
        qks = qks + (qk * tl.rsqrt(qq + L2_EPS) * k_scale,)
        squares = squares + (0.0,)
    k_d = k_d * k_scale
    v_s = ()
    for s in tl.static_range(SLICES):
        v_s = v_s + (tl.gather(v_f, s * SLICE + e, axis=0),)
    o_s = ()
    for s in tl.static_range(SLICES):
        m_next = md[:, None] & ((s + 1) * SLICE + e < V)[None, :]
        if FORM.AHEAD and s + 1 < SLICES:
            S_next = tl.load(at + (s + 1) * SLICE, mask=m_next, other=0.0)
        S = S.to(tl.float32)
        kS = tl.sum(k_d[:, None] * S, axis=0)
        delta = delta_value(v_s[s], beta, gamma, kS, FORM)
        sums = ()
        for m in tl.static_range(GROUP):
            qS = tl.sum(units[m][:, None] * S, axis=0)
            o_e = scale * (gamma * qS + qks[m] * delta)
            sums = sums + (squares[m] + tl.sum(o_e * o_e, axis=0),)
            o_s = o_s + (o_e,)
        squares = sums
        S = S * gamma + k_d[:, None] * delta[None, :]
        tl.store(at + s * SLICE, S.to(state.dtype.element_ty), mask=md[:, None] & (s * SLICE + e < V)[None, :])
        if s + 1 < SLICES:
            S = S_next if FORM.AHEAD else tl.load(at + (s + 1) * SLICE, mask=m_next, other=0.0)
    for m in tl.static_range(GROUP):
        for s in tl.static_range(SLICES):
            o_e = o_s[s * GROUP + m]
            if norm_weight is not None:
                o_e = o_e * tl.rsqrt(squares[m] / V + eps) * w_s[m * SLICES + s].to(tl.float32)
            if z is not None:
                o_e = o_e * silu(z_s[m * SLICES + s].to(tl.float32))
            at_o = (n * HO + head * GROUP + m) * V + s * SLICE + e
            tl.store(o + at_o, o_e.to(o.dtype.element_ty), mask=s * SLICE + e < V)


@triton.jit(do_not_specialize=["T"])
def step_kernel(
    q, k, v, a, b, A_log, dt_bias, state, conv_weight, conv_tail, z, norm_weight, padding, cos, sin, k_offset, o,
    scale, eps, T, FORM: tl.constexpr,
):  # fmt: skip
    """Process T tokens; one program per (row, state head)."""
    H: tl.constexpr = FORM.H
    HV: tl.constexpr = FORM.HV
    HQ: tl.constexpr = FORM.HQ
    K: tl.constexpr = FORM.K
    V: tl.constexpr = FORM.V
    Q_ROW: tl.constexpr = FORM.Q_ROW
    K_ROW: tl.constexpr = FORM.K_ROW
    V_ROW: tl.constexpr = FORM.V_ROW
    FIRST_K: tl.constexpr = HQ * K
    FIRST_V: tl.constexpr = (HQ + H) * K
    HO: tl.constexpr = HQ if HQ > HV else HV
    GROUP: tl.constexpr = HO // HV
    head = tl.program_id(0) % HV
    n = (tl.program_id(0) // HV).to(tl.int64)
    k += shift(head // (HV // H), FORM) * K
    v += shift(head, FORM) * V
    d = tl.arange(0, FORM.BK)
    e = tl.arange(0, FORM.BV)
    md = d < K
    me = e < V
    mS = md[:, None] & me[None, :]
    at = state + (n * HV + head) * K * V + d[:, None] * V + e[None, :]
    S = tl.load(at, mask=mS, other=0.0).to(tl.float32)
    for token in range(0, T):
        t = n * 0 + token  # keeps t a tensor in the interpreter
        row = n * T + t
        real = is_real(padding, row, t >= 0)
        k_d = head_at(
            k, conv_weight, conv_tail, padding, cos, sin, k_offset, n, t, T, head // (HV // H), d, md, FIRST_K,
            K_ROW, FORM,
        )  # fmt: skip
        k_d = k_d * tl.rsqrt(tl.sum(k_d * k_d, axis=0) + L2_EPS)
        v_e = channels(v, conv_weight, conv_tail, padding, n, t, T, head * V + e, me, FIRST_V, V_ROW, FORM)
        if FORM.V_SILU:
            v_e = silu(v_e)
        gamma, beta = gates(a, b, A_log, dt_bias, row, head, real, FORM)
        kS = tl.sum(k_d[:, None] * S, axis=0)
        delta = delta_value(v_e, beta, gamma, kS, FORM)
        for m in tl.static_range(GROUP):
            out = head * GROUP + m
            q_d = head_at(
                q, conv_weight, conv_tail, padding, cos, sin, None, n, t, T, out // (HO // HQ), d, md, 0, Q_ROW, FORM,
            )  # fmt: skip
            q_d = q_d * tl.rsqrt(tl.sum(q_d * q_d, axis=0) + L2_EPS)
            qS = tl.sum(q_d[:, None] * S, axis=0)
            o_e = scale * (gamma * qS + tl.sum(q_d * k_d, axis=0) * delta)
            if norm_weight is not None:
                w_e = tl.load(norm_weight + (out % FORM.NORM_HEADS) * V + e, mask=me, other=0.0).to(tl.float32)
                o_e = o_e * tl.rsqrt(tl.sum(o_e * o_e, axis=0) / V + eps) * w_e
            if z is not None:
                m_z = me & is_real(padding, e * 0 + row, me)
                o_e = o_e * silu(tl.load(z + row * FORM.Z_ROW + out * V + e, mask=m_z, other=0.0).to(tl.float32))
            tl.store(o + (row * HO + out) * V + e, o_e.to(o.dtype.element_ty), mask=me)
        S = S * gamma + k_d[:, None] * delta[None, :]
    tl.store(at, S.to(state.dtype.element_ty), mask=mS)
    if FORM.W > 1:
        move_tail(q, k, v, conv_tail, padding, n, T, head, d, md, e, me, FORM)

"""The fused decoding step against the recurrence in float64, in PyTorch and in Triton, with in-place updates."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from deltanet_kernels import causal_conv1d, gated_delta_step_, gated_rms_norm, naive_gated_delta_rule
from deltanet_kernels.arguments import StepCall
from deltanet_kernels.gated_delta_rule.step import delta_step_, gated_delta_step_triton_
from support.refusals import assert_refused
from tests.kernels.cases import assert_close, relative_error
from tests.kernels.triton_mode import DEVICE, by_pytorch


@dataclass(frozen=True)
class Step:
    """One call: heads, head sizes, and what is fused."""

    name: str
    T: int = 1
    B: int = 2
    H: int = 2
    HQ: int = 2
    HV: int = 2
    K: int = 16
    V: int = 16
    conv: int = 0
    qk_silu: bool = True
    v_silu: bool = False
    gate: bool = True
    norm: str = "shared"  # none | shared | per_head
    padding: bool = False
    rope: int = 0  # channels that turn
    positions: int = 1  # rows of cos and sin
    offset: bool = False  # of the keys
    negative: bool = False  # write strengths up to 2
    given: bool = False  # log decay and write strength as they are, not as logits
    erase: str = "decayed"
    repeats: int = 1  # of the heads of k and v

    def __str__(self) -> str:
        return self.name


NATIVE = {"conv": 4, "v_silu": True}
CASES = [
    Step("teacher", norm="per_head"),
    Step("native", **NATIVE),
    Step("bare", qk_silu=False, gate=False, norm="none"),
    Step("gate without norm", v_silu=True, norm="none"),
    Step("norm without gate", gate=False, padding=True),
    Step("odd sizes", K=24, V=20, **NATIVE),
    Step("K > V", K=40, V=8, norm="per_head", conv=2),
    Step("several tokens", T=3, **NATIVE),
    Step("more tokens than taps", T=6, conv=3),
    Step("one tap", conv=1),
    Step("query heads share a state", HQ=6, HV=2, norm="per_head"),
    Step("one key head, 4 queries, 2 values", H=1, HQ=4, HV=2, norm="per_head"),
    Step("grouped heads with a convolution", H=1, HQ=1, HV=2, **NATIVE),
    Step("rotated after a convolution, no activation", T=3, rope=16, positions=2, conv=4, qk_silu=False),
    Step("partly rotated, odd sizes, padding", T=2, K=24, V=20, rope=18, positions=2, padding=True, conv=3),
    Step("rotated, grouped heads with a convolution", H=1, HQ=4, HV=2, rope=8, conv=4),
    Step("centred behind convolution and rotation", offset=True, conv=4, rope=16, norm="per_head"),
    Step("centred, several tokens, odd sizes", T=3, offset=True, K=24, V=20, rope=6, conv=3),
    Step("centred, query heads share a state", offset=True, HQ=6, rope=16, norm="per_head", negative=True),
    Step("centred, value heads share a key head", offset=True, H=1, HQ=2, HV=4, T=2, negative=True),
    Step("centred, grouped heads with a convolution", offset=True, HQ=4, conv=4, qk_silu=False, negative=True),
    Step("centred, activated without rotation", offset=True, padding=True, **NATIVE),
    Step("strength up to 2, several tokens, padding", T=4, negative=True, padding=True, **NATIVE),
    Step("padding", padding=True, norm="per_head"),
    Step("padding and a convolution", T=5, padding=True, **NATIVE),
    Step("several tokens, state over 128 x 128", T=2, B=1, H=1, HQ=1, HV=1, K=130, V=129, **NATIVE),
    Step("query heads share a state over 128 x 128", B=1, H=1, HQ=2, HV=1, K=130, V=129),
    Step("as given, query heads share a state", HQ=4, given=True),
    Step("as given, grouped heads with a convolution, padding", T=2, H=1, HQ=1, given=True, padding=True, conv=3),
    Step("no erasing", erase="off"),
    Step("no erasing, several tokens", T=3, erase="off", given=True, padding=True, **NATIVE),
    Step("undecayed", erase="undecayed", given=True),
    Step("undecayed, several tokens", T=3, erase="undecayed", negative=True),
    Step("undecayed, state over 128 x 128", T=2, B=1, H=1, HQ=1, HV=1, K=130, V=129, erase="undecayed", given=True),
    Step("query heads share a state and its convolution", HQ=6, rope=16, norm="per_head", qk_silu=False, conv=4),
    Step("the same, several tokens, odd sizes, padding", T=3, HQ=4, K=24, V=20, conv=3, padding=True, offset=True),
    Step("the same, one state", T=2, H=1, HQ=3, HV=1, positions=2, rope=8, **NATIVE),
    Step("repeated heads", H=4, HQ=4, HV=4, repeats=2, rope=16, offset=True, norm="per_head", conv=4),
    Step(
        "repeated heads, several tokens, padding", T=3, H=6, HQ=6, HV=6, K=24, V=20, repeats=3, padding=True, **NATIVE
    ),
    Step("repeated heads, several queries", H=2, HQ=4, HV=2, repeats=2, conv=2),
    Step("repeated heads over 128 x 128", B=1, T=2, K=130, V=129, repeats=2, **NATIVE),
]
# One token, in Triton in slices of 64 columns; the first four load the next slice early (step_slices).
SLICES = [
    Step("early: two", B=1, H=1, HQ=1, HV=1, V=128, **NATIVE),
    Step("early: a column over", B=1, K=24, V=65, norm="per_head", conv=1),
    Step("early: three and a bit", B=1, H=1, HQ=1, HV=1, K=40, V=200, rope=14, positions=1, conv=3),
    Step("early: padding", B=2, H=1, HQ=1, HV=1, V=100, padding=True, **NATIVE),
    Step("two", V=128, **NATIVE),
    Step("a column over", K=20, V=65, norm="per_head", conv=2, rope=20, positions=2),
    Step("three", K=100, V=192, norm="none", v_silu=True),
    Step("four, wide keys", B=1, H=3, HQ=3, HV=3, K=256, V=256, **NATIVE),
    Step("wide keys, narrow values", K=200, V=8, conv=1, rope=64),
    Step("narrow keys, wide values", K=8, V=256, gate=False, conv=4),
    Step("centred, strength up to 2", K=20, V=90, offset=True, negative=True, rope=8, conv=4, padding=True),
    Step("without norm and gate", V=90, gate=False, norm="none", padding=True, conv=4),
    Step("value heads share keys", H=1, HQ=1, HV=3, V=96, norm="per_head", rope=16),
    Step("value heads share queries", H=1, HQ=2, HV=4, K=24, V=70, padding=True),
    Step("repeated heads", H=3, HQ=3, HV=3, K=20, V=90, repeats=3, norm="none"),
]


def make(case: Step, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> dict[str, Any]:
    """Keyword arguments of `gated_delta_step_`, the projections in `dtype`."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    B, T, HO, C = case.B, case.T, max(case.HQ, case.HV), (case.HQ + case.H) * case.K + case.HV * case.V
    x: dict[str, Any] = {
        "q": randn(B, T, case.HQ * case.K), "k": randn(B, T, case.H // case.repeats * case.K),
        "v": randn(B, T, case.HV // case.repeats * case.V),
        "a": randn(B, T, case.HV), "b": randn(B, T, case.HV),
        "conv_weight": randn(C, case.conv) if case.conv else None,
        "conv_tail": randn(B, C, case.conv - 1) if case.conv else None,
        "z": randn(B, T, HO * case.V) if case.gate else None,
        "norm_weight": {"none": None, "shared": randn(case.V), "per_head": randn(HO, case.V)}[case.norm],
    }  # fmt: skip
    x = {name: None if t is None else t.to(device, dtype) for name, t in x.items()}
    angle = 3 * randn(case.positions, T, case.rope // 2).repeat(1, 1, 2)
    x |= {"cos": angle.cos().to(device) if case.rope else None, "sin": angle.sin().to(device) if case.rope else None}
    x |= {
        "state": randn(B, case.HV, case.K, case.V).to(device), "A_log": randn(case.HV).to(device),
        "dt_bias": randn(case.HV).to(device), "padding": None, "eps": 1e-5,
        "qk_silu": case.qk_silu, "v_silu": case.v_silu,
    }  # fmt: skip
    x["k_offset"] = 2 * randn(case.H, case.K).to(device, dtype) if case.offset else None
    x["allow_neg_eigval"] = case.negative
    if case.given:
        x |= {"a": -x["a"].square(), "b": 2 * x["b"].float().sigmoid().to(dtype), "A_log": None, "dt_bias": None}
    x |= {"use_beta_sigmoid_in_kernel": not case.given, "erase": case.erase, "kv_repeats": case.repeats}
    if case.padding:
        x["padding"] = (torch.arange(B * T).view(B, T) % 2 == 1).to(device)
    return x


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The rotation as a product of complex numbers, whose angles the halves of cos and sin share."""
    half = cos.shape[-1] // 2
    turn = torch.complex(cos[..., :half], sin[..., :half]).unsqueeze(2)
    turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * turn
    return torch.cat([turned.real, turned.imag, x[..., 2 * half :]], dim=-1)


def truth(x: dict[str, Any]) -> dict[str, torch.Tensor]:
    """o, state and tail in float64, by the recurrence; padded tokens are left out of it one by one."""
    w = {
        n: t.detach().cpu().double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t
        for n, t in x.items()
    }
    (B, T), (HV, K, V) = w["q"].shape[:2], w["state"].shape[1:]
    real = torch.ones(B, T, dtype=torch.bool) if w["padding"] is None else ~w["padding"].cpu()
    for name, size in (("k", K), ("v", V)):
        w[name] = w[name].unflatten(-1, (-1, size)).repeat_interleave(w["kv_repeats"], dim=2).flatten(2)
    qkv = torch.cat([w["q"], w["k"], w["v"]], dim=-1) * real.unsqueeze(-1)
    tail = w["conv_tail"]
    if w["conv_weight"] is not None:
        qkv, tail = by_pytorch(causal_conv1d)(qkv, w["conv_weight"], None, None, tail, True)
    q, k, v = qkv.split([w[name].shape[-1] for name in "qkv"], dim=-1)
    q, k, v = q.unflatten(-1, (-1, K)), k.unflatten(-1, (-1, K)), v.unflatten(-1, (HV, V))
    if w["cos"] is not None:
        q, k = (rotate(y, w["cos"], w["sin"]) for y in (q, k))
    k = k if w["k_offset"] is None else k - w["k_offset"]
    q, k = (F.silu(q), F.silu(k)) if w["qk_silu"] else (q, k)
    v = F.silu(v) if w["v_silu"] else v
    o = torch.zeros(B, T, max(q.shape[2], HV), V, dtype=torch.float64)
    state = w["state"].clone()
    strength = w["b"].sigmoid() * (2 if w["allow_neg_eigval"] else 1) if w["use_beta_sigmoid_in_kernel"] else w["b"]
    for n, t in real.nonzero().tolist():
        token = [y[n : n + 1, t : t + 1] for y in (q, k, v, w["a"], strength)]
        o_n, state_n = naive_gated_delta_rule(
            *token, None, state[n : n + 1], True, True, A_log=w["A_log"], dt_bias=w["dt_bias"],
            use_gate_in_kernel=w["A_log"] is not None, erase=w["erase"],
        )  # fmt: skip
        o[n, t], state[n] = o_n[0, 0], state_n[0]
    z = None if w["z"] is None else w["z"].view_as(o)
    if w["norm_weight"] is not None:
        o = by_pytorch(gated_rms_norm)(o, z, w["norm_weight"], w["eps"])
    elif z is not None:
        o = o * F.silu(z)
    found = {"o": o * real[:, :, None, None], "state": state}
    return found if tail is None else found | {"conv_tail": tail}


def run(step_: Callable[..., torch.Tensor], x: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The step's results, in the form of `truth`; the state and the tail of `x` are left as they are."""
    x = x | {name: None if x[name] is None else x[name].clone() for name in ("state", "conv_tail")}
    o = step_(**x)
    assert o.isfinite().all()
    if x["padding"] is not None:
        o = o.masked_fill(x["padding"][:, :, None, None], 0.0)
    found = {"o": o, "state": x["state"]}
    return found if x["conv_tail"] is None else found | {"conv_tail": x["conv_tail"]}


def triton_step_(**x: Any) -> torch.Tensor:
    return gated_delta_step_triton_(StepCall(**x))


SIDES = [pytest.param(gated_delta_step_, id="public"), pytest.param(triton_step_, id="triton")]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_step(case: Step) -> None:
    x = make(case, device=DEVICE)
    wanted = truth(x)
    for step_ in (gated_delta_step_, triton_step_):
        assert_close(run(step_, x), wanted, 2e-6)


INDICES = (4, 2)  # of the two sequences


def in_larger(x: torch.Tensor) -> torch.Tensor:
    """Rows of a larger tensor, apart from each other, with those of x [2, ...] in INDICES."""
    wide = torch.full((5, x[0].numel() + 16), 3.0, dtype=x.dtype, device=x.device)
    larger = wide[:, : x[0].numel()].unflatten(1, x.shape[1:])
    larger[list(INDICES)] = x
    return larger


@pytest.mark.parametrize("step_", SIDES)
@pytest.mark.parametrize("name", ["native", "query heads share a state", "several tokens"])
def test_states_may_be_rows_of_larger_tensors(step_: Callable[..., torch.Tensor], name: str) -> None:
    x = make(next(case for case in CASES if case.name == name), device=DEVICE)
    wanted = run(step_, x)
    larger = {name: in_larger(x[name]) for name in ("state", "conv_tail") if x[name] is not None}
    o = step_(**x | larger, state_indices=torch.tensor(INDICES, dtype=torch.int32, device=DEVICE))
    assert relative_error(o, wanted["o"]) < 2e-6
    for name, rows in larger.items():
        assert relative_error(rows[list(INDICES)], wanted[name]) < 2e-6
        assert (rows[[0, 1, 3]] == 3).all()


PARTS = ("q", "k", "v", "a", "b", "z")


def in_one_tensor(x: dict[str, Any]) -> dict[str, Any]:
    """The same arguments, with the projections as slices of one tensor between others that are NaN."""
    gap = torch.full_like(x["a"][..., :1], torch.nan)
    joint = torch.cat([gap, *(part for name in PARTS for part in (x[name], gap))], dim=-1)
    sizes = [size for name in PARTS for size in (1, x[name].shape[-1])]
    return x | dict(zip(PARTS, joint[..., :-1].split(sizes, dim=-1)[1::2], strict=True))


@pytest.mark.parametrize("step_", SIDES)
@pytest.mark.parametrize("name", ["native", "padding and a convolution"])
def test_projections_may_be_slices_of_one_tensor(
    name: str, step_: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = next(case for case in CASES if case.name == name)
    x = make(case, device=DEVICE)
    joint, wanted = in_one_tensor(x), run(step_, x)
    assert not any(joint[part].is_contiguous() for part in PARTS)
    if step_ is triton_step_:
        monkeypatch.setattr(
            torch.Tensor, "contiguous", lambda self: pytest.fail("copied") if len(self.shape) == 3 else self
        )
    assert_close(run(step_, joint), wanted, 2e-6)


@pytest.mark.parametrize("step_", SIDES)
def test_steps_one_by_one_equal_steps_together(step_: Callable[..., torch.Tensor]) -> None:
    """In place: the same state and tail serve four steps in a row, the last of them after padding in one row."""
    x = make(Step("steps", T=4, V=80, conv=4, v_silu=True), device=DEVICE)
    x["padding"] = torch.zeros(2, 4, dtype=torch.bool, device=DEVICE)
    x["padding"][1, 2] = True
    wanted = truth(x)
    state, tail = x["state"].clone(), x["conv_tail"].clone()
    parts = []
    for t in range(4):
        token = {name: x[name][:, t : t + 1] for name in ("q", "k", "v", "a", "b", "z", "padding")}
        parts.append(step_(**(x | token | {"state": state, "conv_tail": tail})))
    o = torch.cat(parts, dim=1).masked_fill(x["padding"][:, :, None, None], 0.0)
    assert_close({"o": o, "state": state, "conv_tail": tail}, wanted, 2e-6)


@pytest.mark.parametrize("step_", SIDES)
def test_nan_in_padding_stays_there(step_: Callable[..., torch.Tensor]) -> None:
    x = make(Step("nan", T=2, padding=True, **NATIVE), device=DEVICE)
    wanted = truth(x)
    for name in ("q", "k", "v", "a", "b", "z"):
        x[name][x["padding"]] = float("nan")
    assert_close(run(step_, x), wanted, 2e-6)


@pytest.mark.parametrize("case", SLICES, ids=str)
def test_slices_leave_no_gap_and_touch_no_neighbour(case: Step, poisoned_memory: None) -> None:
    """Fresh memory, and the rows before and after this call's states and tails, are NaN and stay what they were."""
    x = make(case, device=DEVICE)
    around = {}
    for name in ("state", "conv_tail"):
        if x[name] is not None:
            around[name] = torch.full((case.B + 2, *x[name].shape[1:]), torch.nan, device=DEVICE)
            around[name][1:-1] = x[name]
    wanted = truth(x)
    found = {"o": triton_step_(**(x | {name: y[1:-1] for name, y in around.items()}))}
    if x["padding"] is not None:
        found["o"] = found["o"].masked_fill(x["padding"][:, :, None, None], 0.0)
    found |= {name: y[1:-1] for name, y in around.items()}
    assert_close(found, wanted, 2e-6)
    for y in around.values():
        assert y[[0, -1]].isnan().all()


@pytest.mark.parametrize("step_", SIDES)
def test_a_bfloat16_state_is_rounded_once(step_: Callable[..., torch.Tensor]) -> None:
    x = make(Step("bf16 state", V=100), device=DEVICE)
    x["state"] = x["state"].bfloat16()
    found, wanted = run(step_, x), truth(x)
    assert found["state"].dtype == torch.bfloat16
    assert relative_error(found["o"], wanted["o"]) < 2e-6
    assert relative_error(found["state"], wanted["state"]) < torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("step_", SIDES)
@pytest.mark.parametrize("case", [Step("native", **NATIVE), Step("padded", padding=True)], ids=str)
def test_step_compiles_and_still_moves_in_place(case: Step, step_: Callable[..., torch.Tensor]) -> None:
    x = make(case, device=DEVICE)
    compiled = torch.compile(step_, fullgraph=True, backend="aot_eager")
    found, wanted = run(compiled, x), run(step_, x)
    for name, y in wanted.items():
        assert torch.equal(found[name], y), name
    assert not torch.equal(found["state"], x["state"])


def test_the_operator_is_registered_consistently() -> None:
    one = {"B": 1, "H": 1, "HQ": 1, "HV": 1}
    x = make(Step("registered", padding=True, rope=8, offset=True, **one, **NATIVE), device=DEVICE)
    torch.library.opcheck(delta_step_.op, StepCall(**x))
    x = make(Step("registered, as given", given=True, erase="undecayed", **one), device=DEVICE)
    torch.library.opcheck(delta_step_.op, StepCall(**x))


WRONG: list[tuple[str, Callable[[Any], Any], str]] = [
    ("q", lambda x: x[..., :-1], r"q: got shape .*heads \* 16"),
    ("k", lambda x: x[:, :, :16].repeat(1, 1, 3), "q: got 2 heads with 3 of k"),
    ("v", lambda x: x[..., :16], "v: got 1 heads of 16, needs the 2"),
    ("a", lambda x: x[..., :1], "a: got shape"),
    ("state", lambda x: x.transpose(2, 3), "state: got strides"),
    ("state", lambda x: x.half(), "state: got dtype torch.float16"),
    ("conv_tail", lambda x: x[..., 1:].contiguous(), "conv_tail: got shape"),
    ("conv_tail", lambda x: None, "conv_tail: needs a tensor"),
    ("z", lambda x: x[..., :16], "z: got shape"),
    ("norm_weight", lambda x: x[:-1], "norm_weight: got shape"),
    ("padding", lambda x: torch.zeros(2, 1, device=DEVICE), "padding: got dtype"),
    ("cos", lambda x: x[..., 1:], "cos: got shape"),
    ("sin", lambda x: None, "sin: needs a tensor"),
    ("k_offset", lambda x: x[:1], r"k_offset: got shape \[1, 16\], needs \[H, K\]"),
    ("dt_bias", lambda x: None, "dt_bias: needs a tensor with A_log"),
    ("A_log", lambda x: x[:1], r"A_log: got shape \[1\]"),
    ("state_indices", lambda x: torch.zeros(2, device=DEVICE), "state_indices: got dtype"),
    ("erase", lambda x: "on", "erase: got 'on', needs one of 'decayed', 'off', 'undecayed'"),
    ("use_beta_sigmoid_in_kernel", lambda x: False, "allow_neg_eigval: doubles a sigmoid"),
]


def test_wrong_arguments_are_named() -> None:
    x = make(Step("wrong", rope=16, offset=True, negative=True, **NATIVE), device=DEVICE)
    rows = [(x | {name: change(x.get(name))}, (ValueError, TypeError), message) for name, change, message in WRONG]
    assert_refused(gated_delta_step_, rows)


def test_a_log_decay_above_0_is_refused() -> None:
    x, gate = torch.ones(1, 1, 4), torch.full((1, 1, 1), 0.5)
    state = torch.zeros(1, 1, 4, 4)
    with pytest.raises(ValueError, match=r"a: got a log decay of 0.5, needs at most 0"):
        gated_delta_step_(x, x, x, gate, gate, state, None, None)
    gated_delta_step_(x, x, x, gate, gate, state, torch.zeros(1), torch.zeros(1))  # a logit


@pytest.mark.gpu
@pytest.mark.parametrize("K", [16, 64, 100, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "wiring", [{"norm": "per_head", "conv": 4, "qk_silu": False, "rope": 16}, NATIVE], ids=["teacher", "native"]
)
def test_low_precision_steps_under_a_graph(K: int, dtype: torch.dtype, wiring: dict[str, Any]) -> None:
    x = make(Step("graph", B=4, H=4, HQ=4, HV=4, K=K, V=K, **wiring), dtype, DEVICE)
    wanted = truth(x)
    run(gated_delta_step_, x)  # compiles
    x = x | {name: None if x[name] is None else x[name].clone() for name in ("state", "conv_tail")}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = gated_delta_step_(**x)
    graph.replay()
    assert relative_error(o, wanted["o"]) < torch.finfo(dtype).eps
    assert relative_error(x["state"], wanted["state"]) < 1e-5
    if x["conv_tail"] is not None:
        assert relative_error(x["conv_tail"], wanted["conv_tail"]) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize(("K", "V"), [(128, 128), (64, 64), (64, 200), (256, 96), (16, 130), (96, 96)])
@pytest.mark.parametrize("B", [1, 200], ids=["early slices", "many programs"])
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=str)
def test_one_token_is_the_same_bits_every_time(K: int, V: int, B: int, state: torch.dtype) -> None:
    """A race between slices, or over the tail, would show in one of many runs."""
    case = Step("repeated", B=B, H=4, HQ=4, HV=4, K=K, V=V, padding=B > 1, rope=K // 4 * 2, positions=B, **NATIVE)
    x = make(case, torch.bfloat16, DEVICE)
    x["state"] = x["state"].to(state)
    first, wanted = run(gated_delta_step_, x), truth(x | {"state": x["state"].float()})
    bound = torch.finfo(torch.bfloat16).eps
    assert relative_error(first["o"], wanted["o"]) < bound
    assert relative_error(first["state"], wanted["state"]) < (1e-5 if state == torch.float32 else bound)
    assert relative_error(first["conv_tail"], wanted["conv_tail"]) < 1e-6
    for _ in range(20):
        again = run(gated_delta_step_, x)
        assert all(torch.equal(again[name], y) for name, y in first.items())

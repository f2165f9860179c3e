"""Shapes and hazards on which every form of the gated delta rule is tested, and functions to compare results."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from deltanet_kernels import naive_gated_delta_rule


@dataclass(frozen=True)
class Sizes:
    """Those of one call. K = V and one state per head unless said otherwise."""

    name: str
    T: int
    B: int = 1
    H: int = 1
    HQ: int | None = None
    HV: int | None = None
    K: int = 16
    V: int | None = None
    cu_seqlens: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def others(self) -> tuple[int, int, int, int]:
        """HQ, HV, V, and the number of sequences."""
        sequences = self.B if self.cu_seqlens is None else len(self.cu_seqlens) - 1
        return self.HQ or self.H, self.HV or self.H, self.V or self.K, sequences


@dataclass(frozen=True)
class Case(Sizes):
    """One call of the gated delta rule."""

    g: str = "random"  # random | zero | closed | shut | heads | tokens | last | reset
    beta: str = "random"  # random | zero | two
    keys: str = "random"  # random | equal | zero
    l2norm: bool = True
    initial_state: bool = True
    raw: bool = False  # gates as logits, with A_log, dt_bias and the sigmoid
    scale: float | None = None
    erase: str = "decayed"
    condition: float = 1.0  # factor on tolerances: how much the problem itself amplifies rounding


CASES = [
    # lengths around the chunk
    *(Case(f"T={T}", T=T, B=2, H=2) for T in (1, 2, 15, 63, 64, 65, 130)),
    Case("long", T=400, H=2, K=8),
    # head sizes
    *(Case(f"K={K}", T=70, K=K) for K in (40, 60, 96, 100)),
    Case("K=192,V=256", T=20, K=192, V=256),
    Case("K<V", T=70, B=2, H=2, K=16, V=40),
    Case("K=16,V=128", T=70, K=16, V=128),
    Case("K=32,V=60", T=70, K=32, V=60),
    Case("K>V", T=70, B=2, H=2, K=40, V=16),
    Case("K=1,V=1", T=20, H=2, K=1, V=1, l2norm=False),
    # grouped heads
    Case("value heads share a key head", T=70, B=2, H=2, HQ=2, HV=6),
    Case("query heads share a state", T=70, B=2, H=2, HQ=6, HV=2),
    Case("query heads share a state of narrow values", T=70, HQ=3, K=40, V=24),
    Case("value heads with own queries", T=70, B=2, H=1, HQ=3, HV=3),
    Case("one key head, 2 queries, 4 values", T=70, B=2, H=1, HQ=2, HV=4, V=24),
    Case("one key head, 4 queries, 2 values", T=70, B=2, H=1, HQ=4, HV=2, V=24),
    # packed sequences
    Case("packed", T=150, H=2, cu_seqlens=(0, 30, 95, 150)),
    Case("packed, empty and single", T=150, H=2, cu_seqlens=(0, 0, 1, 2, 2, 66, 130, 150, 150)),
    Case("packed, tokens after the last", T=150, H=2, HQ=4, cu_seqlens=(0, 70, 71, 140)),
    Case("packed, nothing but empty", T=5, cu_seqlens=(0, 0, 0)),
    Case("packed, no state", T=90, H=2, HV=4, HQ=2, cu_seqlens=(0, 20, 90), initial_state=False),
    # gates
    Case("g=0", T=130, H=2, g="zero"),
    Case("g=-200", T=130, H=2, g="closed"),
    Case("open head beside a closed one", T=130, H=2, g="heads"),
    Case("open tokens between closed ones", T=130, H=2, g="tokens"),
    Case("closed at a chunk's last token", T=130, H=2, g="last"),
    Case("g=-inf", T=70, H=2, g="reset"),
    # write strength and keys
    Case("beta=0", T=70, H=2, beta="zero"),
    # A reflection per token: the plain recurrence in float32 errs by 5e-6 (gated: 1e-6) instead of 2e-7.
    Case("beta=2 on equal keys", T=130, H=2, beta="two", keys="equal", g="zero", condition=30),
    Case("beta=2 on equal keys, gated", T=130, H=2, beta="two", keys="equal", condition=5),
    Case("zero keys", T=70, H=2, keys="zero"),
    Case("keys as they are", T=130, H=2, l2norm=False),
    # raw gates, scale, no state
    Case("raw gates", T=70, B=2, H=2, raw=True),
    Case("raw gates, packed", T=70, H=2, HV=4, HQ=4, raw=True, cu_seqlens=(0, 3, 64, 69)),
    Case("scale", T=70, H=2, scale=-0.7),
    Case("no state", T=70, B=2, H=2, initial_state=False),
]


# Every form of the erase term, on the shapes and hazards that take different code.
ERASE_CASES = [
    *(Case(f"off, T={T}", T=T, B=2, H=2, erase="off") for T in (1, 130)),
    Case("off, shared queries", T=70, H=1, HQ=4, HV=2, V=24, erase="off"),
    Case("off, packed, raw gates", T=80, H=1, HV=2, K=8, cu_seqlens=(0, 0, 1, 66, 75), erase="off", raw=True),
    Case("off, closed gates", T=70, H=2, erase="off", g="tokens", l2norm=False),
    Case("off, beta=0", T=70, beta="zero", erase="off", initial_state=False),
    *(Case(f"undecayed, T={T}", T=T, B=2, H=2, erase="undecayed") for T in (1, 2, 130)),
    Case("undecayed, shared heads", T=70, H=1, HQ=2, HV=4, V=24, erase="undecayed"),
    Case("undecayed, packed, raw gates", T=80, K=8, cu_seqlens=(0, 0, 1, 66, 75), erase="undecayed", raw=True),
    Case("undecayed, g=-150", T=70, H=2, erase="undecayed", g="shut"),
    Case("undecayed, closed tokens", T=130, H=2, erase="undecayed", g="tokens"),
    Case("undecayed, closed at a chunk's last token", T=130, erase="undecayed", g="last"),
    Case("undecayed, g=-inf", T=70, erase="undecayed", g="reset"),
    Case("undecayed, beta=0, no state", T=70, erase="undecayed", beta="zero", initial_state=False),
    Case("undecayed, beta=2 on equal keys", T=130, erase="undecayed", beta="two", keys="equal", condition=5),
    Case("off, K > V", T=70, K=40, V=16, erase="off"),
    Case("undecayed, K = 1", T=20, H=2, K=1, V=1, l2norm=False, erase="undecayed"),
]  # fmt: skip


def make_inputs(case: Case, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> dict[str, Any]:
    """Keyword arguments of the operator. The numbers are those of `dtype`; g, beta and states never below float32."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    (B, T, H, K), (HQ, HV, V, N) = (case.B, case.T, case.H, case.K), case.others
    k = randn(B, T, H, K)
    if case.keys == "equal":
        k = randn(B, 1, H, K) + 1e-3 * k
    elif case.keys == "zero":
        k[:, ::3] = 0
        k[..., 0, :] = 0
    if not case.l2norm:
        k = k / k.norm(dim=-1, keepdim=True)
    tensors = {"q": randn(B, T, HQ, K), "k": k, "v": randn(B, T, HV, V)}
    tensors = {name: x.to(dtype) for name, x in tensors.items()}

    gates = {"g": _log_decay(case, rand(B, T, HV)), "beta": 2 * rand(B, T, HV)}
    if case.beta == "zero":
        gates["beta"][:, ::2] = 0
    elif case.beta == "two":
        gates["beta"] = 2 - 0.01 * gates["beta"]
    if case.raw:
        gates = {"g": randn(B, T, HV), "beta": randn(B, T, HV)}
        gates |= {"A_log": randn(HV), "dt_bias": randn(HV)}
    if case.initial_state:
        gates["initial_state"] = randn(N, HV, K, V)
    inputs = as_inputs(case, tensors, gates, dtype, device)
    if case.erase != "decayed":
        inputs["erase"] = case.erase
    return inputs | {
        "scale": case.scale,
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": case.l2norm,
        "use_gate_in_kernel": case.raw,
        "use_beta_sigmoid_in_kernel": case.raw,
    }


def as_inputs(
    case: Sizes, tensors: dict[str, torch.Tensor], gates: dict[str, torch.Tensor], dtype: torch.dtype, device: str
) -> dict[str, Any]:
    """Tensors in `dtype`, gates and states never below float32, and the bounds of sequences."""
    made = tensors | {name: x.to(torch.promote_types(dtype, torch.float32)) for name, x in gates.items()}
    inputs: dict[str, Any] = {name: x.to(device).requires_grad_() for name, x in made.items()}
    if case.cu_seqlens is None:
        return inputs
    return inputs | {"cu_seqlens": torch.tensor(case.cu_seqlens, dtype=torch.int32, device=device)}


def _log_decay(case: Case, uniform: torch.Tensor) -> torch.Tensor:
    g = closed(case.g, -0.3 * uniform)
    if case.g == "shut":
        g.fill_(-150.0)
    elif case.g == "heads":
        g[..., 0] = -200.0
    elif case.g == "reset":
        g[:, ::7] = -torch.inf
    return g


def closed(kind: str, g: torch.Tensor) -> torch.Tensor:
    """Log decays g [B, T, ...] with the hazards that rules with and without channels share."""
    if kind == "zero":
        g.zero_()
    elif kind == "closed":
        g.fill_(-200.0)
    elif kind == "tokens":
        g[:, 1::3] = -200.0
    elif kind == "last":
        g[:, 63::64] = -200.0
    return g


def as_double(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same numbers in float64 on the CPU, from which the truth is computed."""
    return {
        name: x.detach().cpu().double().requires_grad_() if isinstance(x, torch.Tensor) and x.requires_grad
        else x.cpu() if isinstance(x, torch.Tensor) else x
        for name, x in inputs.items()
    }  # fmt: skip


def results(
    function: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    inputs: dict[str, Any],
    outputs: tuple[str, ...] = ("o", "final_state"),
) -> dict[str, torch.Tensor]:
    """Output, final state, and the gradient of every input under a random gradient of the named outputs."""
    o, state = function(**inputs)
    found = {"o": o.detach(), "final_state": state.detach()}
    generator = torch.Generator().manual_seed(1)
    upstream = {
        "o": torch.randn(o.shape, generator=generator, dtype=torch.float64),
        "final_state": torch.randn(state.shape, generator=generator, dtype=torch.float64),
    }
    used = {"o": o, "final_state": state}
    leaves = {name: x for name, x in inputs.items() if isinstance(x, torch.Tensor) and x.requires_grad}
    outputs = tuple(name for name in outputs if used[name].requires_grad)  # an empty output has no history
    gradients = torch.autograd.grad(
        [used[name] for name in outputs],
        list(leaves.values()),
        [upstream[name].to(used[name]) for name in outputs],
        allow_unused=True,
    )
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        found[f"d{name}"] = torch.zeros_like(leaf) if gradient is None else gradient
    return found


def truth(inputs: dict[str, Any], outputs: tuple[str, ...] = ("o", "final_state")) -> dict[str, torch.Tensor]:
    """The correct value of `results`: the recurrence in float64."""
    return results(naive_gated_delta_rule, as_double(inputs), outputs)


def plainly_in(
    dtype: torch.dtype, inputs: dict[str, Any], recurrence: Callable[..., Any] = naive_gated_delta_rule
) -> dict[str, torch.Tensor]:
    """Results of the recurrence computed in `dtype`, gates included; only the state is float32."""
    low = {name: x.detach().cpu() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    for name, x in low.items():
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            low[name] = (x if name == "initial_state" else x.to(dtype)).requires_grad_()
    return results(recurrence, low)


@functools.cache
def truth_of(case: Case, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The truth for `make_inputs(case, dtype)`, computed once."""
    return truth(make_inputs(case, dtype))


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """|found - wanted| / |wanted|; tensors that should be (almost) zero are measured against 0.01 per element."""
    if wanted.numel() == 0:
        return 0.0
    size = max(wanted.norm().item(), 0.01 * wanted.numel() ** 0.5)
    return (found.detach().cpu().double() - wanted.cpu().double()).norm().item() / size


def assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float) -> None:
    """Every result within `tolerance` in the relative L2 norm; NaN fails."""
    assert found.keys() == wanted.keys()
    errors = {name: relative_error(found[name], wanted[name]) for name in wanted}
    wrong = {name: f"{error:.1e}" for name, error in errors.items() if not error <= tolerance}
    assert not wrong, f"relative errors over {tolerance:.0e}: {wrong}"


def assert_repeats(run: Callable[[], dict[str, torch.Tensor]], times: int) -> None:
    """Every further run gives the bits of the first."""
    first = run()
    for _ in range(times):
        again = run()
        assert all(torch.equal(again[name], x) for name, x in first.items())


def assert_as_good(
    found: dict[str, torch.Tensor], plain: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], dtype: torch.dtype
) -> None:
    """Errors at most twice those of the recurrence in the same dtype, or a few roundings (eps/2 each)."""
    for name, x in wanted.items():
        bound = max(1.5 * torch.finfo(dtype).eps, 2 * relative_error(plain[name], x))
        assert relative_error(found[name], x) <= bound, name


def assert_integers_exact(
    chunk: Callable[..., Any],
    recurrence: Callable[..., Any],
    half: torch.dtype,
    K: int,
    V: int | None = None,
    HV: int = 2,
    kinds: int | None = None,
    gradients: bool = True,
    device: str = "cuda",
) -> None:
    """One-hot keys, integer values, no decay, beta 0 or 1: every product is exact, so every bit must be.

    Args:
        kinds: number of different keys, K by default.
    """
    torch.manual_seed(0)
    B, T, H, V = 2, 192, 2, V or K
    q = torch.randint(-1, 2, (B, T, H, K)) * (torch.rand(B, T, H, K) < 8 / K)
    k = torch.nn.functional.one_hot(torch.randint(0, kinds or K, (B, T, H)), K)
    v, beta = torch.randint(-4, 5, (B, T, HV, V)), torch.randint(0, 2, (B, T, HV))
    do = torch.randint(-1, 2, (B, T, HV, V)) * (torch.rand(B, T, HV, V) < 0.1)
    answers = []
    for function, dtype, place in ((chunk, half, device), (recurrence, torch.float64, "cpu")):
        leaves = [x.to(place, dtype).requires_grad_(gradients) for x in (q, k, v)]
        wide = torch.promote_types(dtype, torch.float32)
        gates = [torch.zeros(B, T, HV, dtype=wide, device=place), beta.to(place, wide)]
        o, state = function(*leaves, *gates, scale=1.0, output_final_state=True)
        grads = torch.autograd.grad([o], leaves, [do.to(place, dtype)]) if gradients else ()
        answers.append([o, state, *grads])
    for found, wanted in zip(*answers, strict=True):
        assert torch.equal(found.cpu(), wanted.to(found.dtype))

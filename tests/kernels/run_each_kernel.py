"""Runs every Triton kernel once, on small inputs, forward and backward, on a GPU, for compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH=.:kernels compute-sanitizer --tool memcheck \
        python -m tests.kernels.run_each_kernel

Without the caching allocator every tensor has its own allocation, so that a step past its end is seen.
"""

import functools

import torch

from deltanet_kernels.arguments import StepCall
from deltanet_kernels.gated_delta_rule.recurrent import gated_delta_rule_step_
from deltanet_kernels.gated_delta_rule.step import delta_step_
from tests.kernels import window_cases
from tests.kernels.cases import Case, make_inputs, results
from tests.kernels.channel_cases import CHANNEL_CASES, make_channel_inputs
from tests.kernels.state_cases import Shape
from tests.kernels.state_cases import results as state_results
from tests.kernels.test_decode_attention import SHAPES as CACHES
from tests.kernels.test_decode_attention import make as make_cache
from tests.kernels.test_group_rule import CASES as GROUP_CASES
from tests.kernels.test_group_rule import arguments as group_arguments
from tests.kernels.test_group_rule import triton as triton_group
from tests.kernels.test_prompt import CASES as PROMPTS
from tests.kernels.test_prompt import make as make_prompt
from tests.kernels.test_prompt import triton_inputs
from tests.kernels.test_step import TENSORS, Step, make
from tests.kernels.test_triton_channel import triton_chunk as triton_channel_chunk
from tests.kernels.test_triton_channel import triton_recurrent as triton_channel_recurrent
from tests.kernels.test_triton_mesa import CASES as MESA_CASES
from tests.kernels.test_triton_mesa import arguments as mesa_arguments
from tests.kernels.test_triton_mesa import on_device, triton_mesa
from tests.kernels.test_triton_window import triton_window
from tests.kernels.test_window_prompt import CASES as MIXTURES
from tests.kernels.test_window_prompt import make as make_mixture
from tests.kernels.test_window_prompt import triton_mixture
from tests.kernels.test_window_step import CASES as WINDOW_STEPS
from tests.kernels.test_window_step import empty, triton_step_
from tests.kernels.test_window_step import make as make_window_step
from tests.kernels.test_window_step import run as run_window_steps
from tests.kernels.triton_mode import (
    triton_chunk,
    triton_conv,
    triton_decode_attention,
    triton_gates,
    triton_keep,
    triton_norm,
    triton_rms_norm,
)

CASES = [
    Case("packed, grouped", T=150, H=2, HQ=2, HV=4, K=64, raw=True, cu_seqlens=(0, 0, 1, 66, 140)),
    Case("query heads share a state", T=70, B=2, H=1, HQ=2, HV=1, K=40, V=24),
    Case("head size 64, nothing shared", T=130, H=2, K=64, raw=True),
    Case("head size 128", T=130, H=1, K=128),
    Case("head size 128, whole chunks", T=128, H=2, K=128, raw=True),
    Case("head size 128, whole chunks, grouped", T=64, H=1, HV=2, K=128, beta="zero"),
    Case("head size 64, whole chunks", T=64, H=2, K=64),
    Case("head size 64, whole chunks, grouped", T=128, H=1, HV=2, K=64, V=128, raw=True),
    Case("head size 256", T=70, H=1, K=256),
    Case("no erasing, packed", T=150, H=2, HV=4, K=64, raw=True, cu_seqlens=(0, 0, 1, 66, 140), erase="off"),
    Case("undecayed, whole chunks", T=128, H=2, K=128, erase="undecayed", beta="zero"),
    Case("undecayed, grouped", T=70, H=1, HQ=2, HV=4, K=40, V=24, erase="undecayed"),
    Case("undecayed, packed", T=150, H=2, K=128, cu_seqlens=(0, 0, 1, 66, 140), erase="undecayed"),
]
STEPS = [
    Step("all of it", T=2, K=64, V=64, conv=4, rope=64, padding=True),
    Step("odd sizes, grouped heads", H=1, HQ=4, K=100, V=20, norm="per_head", rope=50, positions=2),
    Step("head size 128", K=128, V=128, conv=4),
    Step("several tokens, odd sizes", T=3, K=100, V=20, conv=4, rope=50, positions=2),
    Step("slices of wide values, padding", B=4, K=64, V=200, conv=4, rope=64, padding=True),
    Step("many programs", B=150, K=128, V=100, conv=2),
    Step("head size 256", K=256, V=256, conv=4),
    Step("as given, undecayed", K=64, V=64, given=True, erase="undecayed"),
]


def main() -> None:
    for case in CASES:
        for dtype in (torch.bfloat16, torch.float32):
            inputs = make_inputs(case, dtype, "cuda")
            results(triton_chunk, inputs)
            if case.cu_seqlens is None:
                token = [inputs[name].detach()[:, :1] for name in ("q", "k", "v", "g", "beta")]
                gated_delta_rule_step_(*token, inputs["initial_state"].detach().clone())
        torch.cuda.synchronize()
        print(case, flush=True)
    for channel_case in CHANNEL_CASES:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            inputs = make_channel_inputs(channel_case, dtype, "cuda")
            results(triton_channel_chunk, inputs)
            with torch.no_grad():
                triton_channel_recurrent(**inputs)
    torch.cuda.synchronize()
    print("decay per channel", flush=True)
    for case in (*GROUP_CASES, Case("heads of 128", T=128, H=2, K=128), Case("grouped", T=128, HQ=3, K=64)):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            results(triton_group, group_arguments(case, dtype, "cuda"))
    torch.cuda.synchronize()
    print("read at boundaries", flush=True)
    for segments, T in ((2, 300), (2, 256), (4, 300)):  # sequential, complete chunks, composed
        inputs = make_inputs(Case(f"{segments} segments", T=T, H=2, K=64, g="heads"), torch.bfloat16, "cuda")
        results(functools.partial(triton_chunk, segments=segments), inputs)
    for bounds in (None, torch.tensor((0, 1, 1, 68, 75), device="cuda")):
        x = torch.randn(1, 80, 10, device="cuda", requires_grad=True)
        weight = torch.randn(10, 4, device="cuda", requires_grad=True)
        y, state = triton_conv(x, weight, None, "silu", None, True, bounds)
        (y.sum() + state.sum()).backward()
    x, z = (torch.randn(3, 35, 3, 20, device="cuda", requires_grad=True) for _ in range(2))
    triton_norm(x, z, torch.ones(3, 20, device="cuda", requires_grad=True), 1e-6).sum().backward()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        wide = torch.randn(3, 35, 3 * 20 + 7, device="cuda", dtype=dtype)
        x = wide[..., :60].unflatten(-1, (3, 20))
        triton_rms_norm(x, x[0, 0, 0], 1e-6, 0.0, True, x, torch.empty(x.shape, device="cuda", dtype=dtype))
    for step in STEPS:
        for dtype in (torch.bfloat16, torch.float32):
            x = make(step, dtype, "cuda")
            options = (x["allow_neg_eigval"], x["use_beta_sigmoid_in_kernel"], x["erase"])
            delta_step_(StepCall(*(x[name] for name in TENSORS), 0.1, 1e-6, True, True, *options))
    torch.cuda.synchronize()
    print("convolution, norm, fused step", flush=True)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for window_case in window_cases.CASES:
            window_cases.results(triton_window, window_cases.make(window_case, dtype, "cuda"))
        for window_step in WINDOW_STEPS:
            run_window_steps(triton_step_, make_window_step(window_step, dtype, "cuda"), empty(window_step, dtype))
    torch.cuda.synchronize()
    print("window", flush=True)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for prompt in PROMPTS:
            triton_inputs(**make_prompt(prompt, dtype))
        for mixture in MIXTURES:
            x = make_mixture(mixture, dtype)
            triton_mixture(**x)
            for window in (1, 7):
                triton_keep(x["window_output"], x["state_output"], window, 3)
        gates = torch.randn(2, 35, 7, device="cuda", dtype=dtype)
        triton_gates(gates[..., :3], gates[..., 3:6], torch.ones(3, device="cuda"), torch.ones(3, device="cuda"), 1)
    torch.cuda.synchronize()
    print("prompt", flush=True)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for cache in (*CACHES, (1, 9, 3, 5000, 64), (2, 32, 8, 5000, 128)):
            triton_decode_attention(*make_cache(cache, "holes", dtype), None)
    torch.cuda.synchronize()
    print("attention to a cache", flush=True)
    wide = [Shape("", T=130, H=1, HQ=2, HV=2, K=size, V=size) for size in (64, 128)]
    for shape in (*MESA_CASES, *wide):
        state_results(triton_mesa, on_device(mesa_arguments(shape)))
    torch.cuda.synchronize()
    print("Mesa", flush=True)


if __name__ == "__main__":
    main()

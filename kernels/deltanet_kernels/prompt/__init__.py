"""The elementwise work of a layer that reads a prompt, in few kernels and without gradients.

    file          computes
    ------------  ------------------------------------------------------------------------------------------
    inputs.py     q, k and v of a state, and q and k of a window beside it, from the outputs of the projections
    gates.py      log decay and write strength from their logits
    cpu.py        both in PyTorch: CPU tensors, and CUDA calls that the kernels do not support
    calls.py      the arguments of each operator, and their checks

What follows the recurrence, the output norm and gate and the mixture with a window, is in `window/mixture.py`. Decoding
has kernels of its own (`gated_delta_rule/step.py`), training the differentiable operators.
"""

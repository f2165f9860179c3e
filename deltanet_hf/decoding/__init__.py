"""Decoding by CUDA graph: the step of a converted model is recorded once per batch size and replayed for each token.

`generate` of a converted model uses it on CUDA devices (`generation.py`), unless something cannot be recorded
(`obstacles.py`) or the caller passes `disable_compile=True`.

    file                  holds
    --------------------  ------------------------------------------------------------------------------
    generation.py         where `generate` is entered, and the callable that stands for the model's forward
    obstacles.py          the reasons for decoding without a graph, and how to tell that a model has changed
    recorded_step.py      inputs and outputs of the step, its recording, and the recordings of each model
    projections.py        the weights of a layer's projections side by side, as few matrix products
    few_launches.py       a model's own modules by few kernels: in steps, and in prompts of converted models
    fused_norms.py        its norms: one kernel each, in a step with the residual sums before them
    fused_mlps.py         its feed-forward blocks: one product for two projections, one kernel for SiLU and product
    deferred_sum.py       sums that are put off for them
    recorders.py          how a device records work; the tests add a recorder for CPUs
    graphed_step.py       the recorded step for other loops than `generate`
    compiled_forward.py   torch.compile's form of a model, which `graphed_step` can record instead
    fixed_cache.py        the tensors of a cache at addresses that stay
    fixed_key_values.py   growing keys and values in a fixed number of places, and their masks

Recurrent states and windows have one size at any length, so one recording serves all positions. The keys and values of
kept softmax layers get more places than there are tokens; where they run out, the step is recorded again.
"""

from deltanet_hf.decoding.projections import join_projections
from deltanet_hf.decoding.recorded_step import decoded_by, forget_graphs

__all__ = ["decoded_by", "forget_graphs", "join_projections"]

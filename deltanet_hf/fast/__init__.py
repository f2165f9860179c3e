"""The fast form of a model: what its own modules compute, by few launches and without gradients.

    file             holds
    ---------------  ---------------------------------------------------------------------------------------------------
    form.py          `fast_form(model)`: the form or the reason why there is none, decided once per model, and asked
                     for once per `generate`
    reasons.py       these reasons: hooks, adapters, offloading, sharding, training, replaced methods
    decoder.py       the decoder and its layers, with the residual sums handed on to the next norm
    mixer.py         the steps of a mixer (mixers/layer/mixer.py) that it computes in another way
    delta_rule.py    those of the delta family: gates, and the decoding step in one kernel
    delayed.py       those of a state of what has left its window, in 8 or 4 bits
    of_mixer.py      which of these a mixer takes
    window.py        prefill and decoding step of a mixer's window (mixers/layer/window_branch.py)
    softmax.py       softmax and window layers, with one product for q, k and v
    packed.py        their prefill and decoding step, alone or mixed, with a cache in 8 or 4 bits
    norms.py         norms with residual sums, one kernel each
    mlp.py           feed-forward blocks
    joint.py         linear layers with one input as one matrix product
    side_by_side.py  two calls at the same time, where a graph is recorded
    children.py      modules whose children are others

Each form computes what the model's own modules do, but for rounding. `deltanet_hf.decoding` records its step.
"""

from deltanet_hf.fast.decoder import FastDecoder
from deltanet_hf.fast.form import fast_form, held_form, with_fast_form

__all__ = ["FastDecoder", "fast_form", "held_form", "with_fast_form"]

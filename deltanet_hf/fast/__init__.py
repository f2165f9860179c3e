"""The fast form of a model: what its own modules compute, by few launches and without gradients.

    file             holds
    ---------------  ---------------------------------------------------------------------------------------------------
    form.py          `fast_form(model)`: the form, or the reason why there is none (hooks, adapters, offloading,
                     sharding, training, replaced methods); `eval()`, `to()`, `generate` and `serve` ask for it
    decoder.py       the decoder and its layers, with the residual sums handed on to the next norm; which of the
                     following a layer takes
    families.py      a row for each family: its norms, and which of its parts are plain
    mixer.py         the steps of a mixer (mixers/layer/mixer.py) that it computes in another way
    window.py        prefill and decoding step of a mixer's window (mixers/layer/window_branch.py)
    softmax.py       softmax and window layers, with one product for q, k and v
    packed.py        layers with a cache in 8 or 4 bits: softmax, windows, states of what has left them, and mixed heads
    parts.py         linear layers with one input, norms with residual sums, feed-forward blocks

Each form computes what the model's own modules do, but for rounding. `deltanet_hf.decoding` captures its step.
"""

from deltanet_hf.fast.decoder import FastDecoder
from deltanet_hf.fast.form import fast_form, held_form, with_fast_form

__all__ = ["FastDecoder", "fast_form", "held_form", "with_fast_form"]

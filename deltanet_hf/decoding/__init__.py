"""Decoding by CUDA graph: the step of a converted model is captured once per batch size and replayed for each token.

Short prompts are captured, too.

`generate` of a converted model uses it on CUDA devices (`generation.py`), unless something cannot be captured
(`obstacles.py`), it has no fast form (`deltanet_hf.fast`), or the caller passes `disable_compile=True`.

    file                 holds
    -------------------  ------------------------------------------------------------------------------
    generation.py        where `generate` is entered, and the callable that stands for the model's forward
    obstacles.py         the reasons for decoding without a graph
    captured_step.py     inputs and outputs of the step, the tensors of its cache at addresses that stay, and its graph
    captured_prefill.py  the same for short prompts
    captured_graphs.py   the graphs of each model, and which prompts are read by one
    capture.py           how a device captures work; the tests add a capture for CPUs
    served.py            the same for softmax models
    graphed_step.py      the captured step for other loops than `generate`

Recurrent states and windows have one size at any length, so one graph serves all positions. The keys and values of
kept softmax layers get more places than there are tokens; where they run out, the step is captured again.
"""

from deltanet_hf.decoding.captured_graphs import decoded_by, forget_graphs
from deltanet_hf.decoding.served import serve

__all__ = ["decoded_by", "forget_graphs", "serve"]

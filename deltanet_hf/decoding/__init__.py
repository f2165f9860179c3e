"""Decoding by CUDA graph: the step of a converted model is recorded once per batch size and replayed for each token.

Short prompts are recorded, too.

`generate` of a converted model uses it on CUDA devices (`generation.py`), unless something cannot be recorded
(`obstacles.py`), it has no fast form (`deltanet_hf.fast`), or the caller passes `disable_compile=True`.

    file                  holds
    --------------------  ------------------------------------------------------------------------------
    generation.py         where `generate` is entered, and the callable that stands for the model's forward
    obstacles.py          the reasons for decoding without a graph
    recorded_step.py      inputs and outputs of the step, and its recording
    recorded_prompt.py    the same for short prompts
    prompts.py            which prompts are read by a recording
    recordings.py         the recordings of each model
    recorders.py          how a device records work; the tests add a recorder for CPUs
    served.py             the same for softmax models
    graphed_step.py       the recorded step for other loops than `generate`, or that of torch.compile's form of a model
    fixed_cache.py        the tensors of a cache at addresses that stay

Recurrent states and windows have one size at any length, so one recording serves all positions. The keys and values of
kept softmax layers get more places than there are tokens; where they run out, the step is recorded again.
"""

from deltanet_hf.decoding.recordings import decoded_by, forget_graphs
from deltanet_hf.decoding.served import serve

__all__ = ["decoded_by", "forget_graphs", "serve"]

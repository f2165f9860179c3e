"""The gated delta rule whose queries read the state at boundaries: of what has left a window that moves by groups.

Tokens are written in groups of GROUP = 32, and the queries of group i read the state before its writes:

    S_0 = initial state;  S_{i+1} = S_i after the writes of tokens 32 i ... 32 i + 31 (gated_delta_rule/__init__.py)
    o_t = scale * q_t^T S_{t // 32}

No query sees a key of its own group, so there are no scores within a group. For a window of N complete groups the
caller shifts: queries from token 32 N on, and keys, values and gates up to 32 N tokens before the end.

    file                  computes
    --------------------  -----------------------------------------------------------------------------------------
    reference.py          group by group by the recurrence: the tests' ground truth
    cpu.py                the form in PyTorch, differentiable
    chunk.py              the form on CUDA, differentiable: its launches
    states.py             the states, and the outputs if no query heads share a state
    outputs.py            the outputs if query heads share states
    read.py               the outputs of one group, for both
    states_backward.py    the gradients of the states, after query_sums.py if query heads share states
    gradients_queries.py  the gradients of the queries
    gates.py              the gates of a prompt on CUDA
    step.py               one token beside a packed window on CUDA: its launches
    step_kernels.py       its kernels, before and after the window's attention
    cpu_step.py           both in PyTorch
    calls.py              the calls and their checks
    rounding.py           states in 8 bits, in PyTorch
    round_state.py        the same on CUDA

From gated_delta_rule/ come the stages before the states, without their scores, the segments of long sequences
(segments.py), and with GROUPS the other gradients (gradients_pairs.py, gradients_inputs.py) or all of them
(gradients_64.py, hopper/gradients_128.py) by `chips.KERNELS`.
"""

"""Test-time training (arXiv 2407.04620) with a linear inner model, in mini-batches of tokens.

The state is the weight of an inner model f that learns, while it reads, to give v for k. All m tokens of a mini-batch
take their gradient at the same weights B, those with which the mini-batch began. Per state, with log decay g_t <= 0
(0 in the paper) and step size eta_t:

    B_t = e^{g_t} (S_{t-1} if t begins a mini-batch, else B_{t-1})
    S_t = e^{g_t} S_{t-1} - eta_t dL_t/dB_t

    linear   f(k) = B^T k                      L = |f(k) - v|^2 / 2    o_t = scale * S_t^T q_t
    norm     f(k) = k + LN((W_0 + B)^T [k,1])  L = |f(k) - v|^2 / 2    o_t = q_t + LN((W_0 + S_t)^T [q_t,1])

With m = 1 the linear form is the gated delta rule. `norm` is the paper's TTT-Linear: LN is a layer norm with weight and
bias per head, the first weights W_0 are learned, and the last row of the weights is the bias of the inner model. S is
what has been added to W_0, so that it begins at 0 and decays to W_0. Padding does not count in the mini-batches.

    file           computes
    -------------  ------------------------------------------------------------------------------------------------
    chunk.py       the operator on whole sequences, by the following
    reference.py   the recurrence of both forms: the tests' ground truth, and decoding
    inner_norm.py  the layer norm, its gradient in closed form, and the outputs of `norm`
    linear.py      the chunk form of `linear`, differentiable
    norm.py        `norm` by mini-batches, differentiable
    grid.py        the tokens of a call in their places of the mini-batches
    calls.py       the call, the state and the check
"""

"""The memory of Titans (arXiv 2501.00663) with a linear inner model: gradient descent with momentum and weight decay.

Per state, with log decay g_t <= 0, log momentum m_t <= 0 and step size theta_t:

    Z_t = e^{m_t} Z_{t-1} + theta_t k_t (v_t - M_{t-1}^T k_t)^T
    M_t = e^{g_t} M_{t-1} + Z_t        o_t = scale * M_t^T q_t

The inner loss is |M^T k - v|^2 / 2. The prediction reads the memory before its decay, so without momentum
(m = -inf) this is the rule of Comba (arXiv 2506.02475) with its feedback at 1.

    file           computes
    -------------  ------------------------------------------------------------------------------------------------
    reference.py   the recurrence: the tests' ground truth, and decoding
    chunk.py       the chunk form, differentiable
    calls.py       the call, the state and the check
"""

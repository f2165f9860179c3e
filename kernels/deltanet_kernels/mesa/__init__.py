"""The Mesa layer: ridge regression of the values on the keys, solved anew for every token (MesaNet, arXiv 2506.05233).

Per state, with log decay g_t <= 0, write weight beta_t and a ridge Lambda > 0 per key channel:

    S_t = e^{g_t} S_{t-1} + beta_t k_t v_t^T        H_t = e^{g_t} H_{t-1} + beta_t k_t k_t^T
    (H_t + diag(Lambda)) x_t = q_t                  o_t = scale * x_t^T S_t

W_t = (H_t + diag(Lambda))^{-1} S_t minimises sum_s w_s |W^T k_s - v_s|^2 + tr(W^T Lambda W) with the weights
w_s = beta_s e^{g_{s+1} + ... + g_t}. The delta rule takes one gradient step per token towards it.

    file                    computes
    ----------------------  ---------------------------------------------------------------------------------------
    reference.py            the recurrence with a direct solver; the tests' ground truth
    solve.py                the linear systems of all tokens by conjugate gradients, and their gradient, in PyTorch
    cpu.py                  the chunk form in PyTorch, differentiable
    conjugate_gradients.py  the linear systems and the outputs of a chunk, in one Triton kernel
    chunk.py                the chunk form on CUDA, differentiable
    recurrent.py            token by token, for decoding
    calls.py                the call, the state and the checks
"""

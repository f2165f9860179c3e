"""Softmax attention over a window of the last tokens and the first tokens ("sinks") of each sequence.

Sinks beside a window: StreamingLLM (Xiao et al., arXiv 2309.17453). Token i of a sequence, counted from 0, sees token j
if j <= i and (i - j < window or j < sinks). Every kernel splits these pairs in the same way, so that none counts twice:

    window pair    0 <= i - j < window
    sink pair      j < sinks and i - j >= window

    file           computes
    -------------  ------------------------------------------------------------------------------------------------
    reference.py   the definition, with a T x T mask; the tests' ground truth
    cpu.py         the blocked form in PyTorch: CPU tensors, and CUDA calls that no kernel supports
    masked.py      attention under any mask in PyTorch, on any device
    forward.py     o and the log-sum-exp, tile by tile with an online softmax (FlashAttention, arXiv 2205.14135)
    gradients_q.py the gradient of q, and each query tile's part of the gradients of the sinks
    gradients_k.py the sum of those parts, and the gradients of k and v
    attention.py   launches these kernels and registers the operator with PyTorch
    cpu_step.py    one decoding step in PyTorch
    step.py        one decoding step in one kernel
    mixture.py     the output mixed with that of a state, behind its norm and gate, without gradients
    keep.py        the decoding cache after a whole sequence
    cpu_prompt.py  these two in PyTorch
    tiles.py       what the kernels share: places of tiles, loads, masks
    softcap.py     scores in units of log 2, capped or not
    config.py      tile sizes
    calls.py       the arguments of each operator, and their checks

Glossary, for one sequence and one query head:

    i, j           positions of a query and of a key in their sequence, from 0
    s_ij           scale * <q_i, k_j>; with a cap C: C u_ij with u_ij = tanh(scale * <q_i, k_j> / C)
    lse_i          log(sum of e^{s_ij} over the tokens j that i sees)
    p_ij           e^{s_ij - lse_i}
    delta_i        <do_i, o_i> - dlse_i;  ds_ij = p_ij (<do_i, v_j> - delta_i), times 1 - u_ij^2 with a cap
    M, N, S        queries, keys and sinks per tile; D channels
    n              number of a token in the decoding cache, from 1; 0 marks an empty place
"""

"""The delta rule with a decay per key channel: Kimi Delta Attention, Gated DeltaNet-2, gated linear attention.

    S_t = Diag(e^{g_t}) S_{t-1} + beta_t k_t (v_t - p_t^T Diag(e^{g_t}) S_{t-1})^T        o_t = scale * q_t^T S_t

`reference.py` has the recurrence, `cpu.py` the chunked form in PyTorch, `chunk.py` and `recurrent.py` launch the Triton
kernels; `config.py` holds the sizes that they are launched with. `calls.py` has the arguments of the operators.

    stage                          file                      when
    -----------------------------  ------------------------  ----------------------------------------------------------
    decay between two tokens       decay.py                  functions that the kernels of scores and gradients share
    scores, decayed q, p, k        scores.py                 CUDA; K up to 128, V up to 256
    inverse (I + L)^-1             ../gated_delta_rule/      the same
                                   solve.py
    states, then outputs           states.py, outputs.py     the same
    gradients of the states        states_backward.py        the same
    gradients of pairs of tokens   gradients_pairs.py        the same
    gradients of q, k, p, g, beta  gradients_inputs.py       the same
    recurrence, short inputs       recurrent.py              CUDA, without gradients
    gates per channel or value     ../fine_gates.py          the recurrence called as flash-linear-attention's

Glossary, for one state head and a chunk of C tokens with rows i and columns j; the rest is in the glossary of
`gated_delta_rule`:

    G              [C, K] inclusive sum of g over the chunk, per channel
    p              erase key; k unless it is given
    P              scores: sum_c scale q_ic k_jc e^{G_ic - G_jc} for i >= j
    L              sum_c beta_i p_ic k_jc e^{G_ic - G_jc} for i > j
    reads          scale q e^G: what the queries read from the state that enters the chunk
    erases         beta p e^G: what the writes take from that state
    writes         k e^{G_last - G}: what a value becomes in the state that leaves the chunk
    fade           e^{G_last} [K]
    V'             T (beta V - erases S): the values that the chunk writes into the state
"""

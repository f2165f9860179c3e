"""The gated delta rule (Gated Delta Networks, arXiv 2412.06464, equation 10).

    S_t = e^{g_t} S_{t-1} + beta_t k_t (v_t - k_t^T e^{g_t} S_{t-1})^T        o_t = scale * q_t^T S_t

Each file below computes one stage of one form of the operator. `chunk_forward.py`, `chunk_backward.py`, `recurrent.py`
and `step.py` launch the kernels; `chips.py` says which of them serve a call and in which sizes, `launch_plan.py` has
what the launches of a call share; `chunk.py` is the Triton form of the chunked operator, and its gradient.

    stage                          file                      when
    -----------------------------  ------------------------  ---------------------------------------------------------
    public functions               ../fla_functions.py       any call, with the arguments of flash-linear-attention
    operators                      ../operators.py           what they call, and callers whose arguments need
                                                             no check; PyTorch or Triton: ../dispatch.py
    recurrence, reference          reference.py              any device, float32 and float64; the tests' ground truth
    calls in other dtypes, layouts drop_in.py                before the others, for calls that the kernels do not take
    CPU, chunked                   cpu.py, cpu_forward.py,   CPU tensors, and CUDA calls that no kernel supports
                                   cpu_backward.py
    CPU, few tokens                cpu_recurrent.py          CPU tensors without gradients, at most 8 tokens
    CPU, decoding step             cpu_step.py               CPU tensors, and the composition used by step.py
    scores, row factors            scores.py                 chunked CUDA calls that hopper/solve.py does not serve
    inverse (I + L)^-1             solve.py                  after scores.py, unless erase is "off"
    both in one                    hopper/solve.py           Hopper, bfloat16, K 64 or 128, V a power of two >= 16,
                                                             HQ = H, erase "decayed", T a multiple of C, not packed;
                                                             see also `Kernel.gluon` in chips.py
    states and outputs             states.py                 chunked CUDA calls; outputs_kernel follows if HQ > HV
    sums over query heads          query_sums.py             backward, where several query heads read one state
    gradients of the states        states_backward.py        chips.KERNELS
    gradients within a chunk       gradients_pairs.py, then  chips.KERNELS
                                   gradients_inputs.py
    the same in one kernel         gradients_64.py           chips.KERNELS
    the same in one kernel         hopper/gradients_128.py   chips.KERNELS
    last steps that these share    gradients_raw.py          gradients of the raw rows and of the gates
    long sequences, cut            segments.py               from 256 chunks on, if the states fill at most half the
                                                             chip
    the recurrent operator         recurrent.py              fused_recurrent_gated_delta_rule on CUDA, without
                                                             gradients
    decoding step of a layer       step.py, step_kernels.py  CUDA; states up to 128 x 128, larger for one token; parts
                                   step_inputs.py            of the kernels, their sizes (step_sizes.py) and the checks
                                                             of a call (step_checks.py)

`erase` of the public functions chooses the form of the erase term (reference.py). The kernels in hopper/ have the
default form only; the others take the constants of `row_factors.erase_flags` and leave out what a form does not have.

Glossary, for one state head and a chunk of C tokens with rows i and columns j:

    HQ, H, HV, HO  heads of the queries, of the keys, of values and states, and of the output, max(HQ, HV). HQ > H where
                   query heads share a state, as they share keys and values in grouped-query attention
    state S        [K, V] matrix that the recurrence updates; float32 unless the caller holds it in bfloat16
    chunk          C consecutive tokens of one sequence; a complete chunk has no padding
    G              inclusive cumulative sum of the log decay g within the chunk
    gamma, rev     e^G and e^{G_last - G}: decay since the start, and until the end, of the chunk
    D_ij           e^{G_i - G_j} for i >= j, else 0
    L              strictly lower triangle of beta_i D_ij <k_i, k_j>
    T              (I + L)^-1
    P              scores: scale * D * (Q K^T), lower triangle
    U, W           U = K S, W = beta (V - gamma U)
    V'             T W: the values that the chunk writes into the state. The paper's U and W are other matrices,
                   T diag(beta) V and T diag(beta gamma) K; its U - W S is V'
    closed gate    a token with g < -100; e^g is 0 in float32, so the state before it is forgotten
    s              number of closed gates up to and including a token of the chunk. A closed gate counts in s and adds
                   nothing to G, so that G keeps its digits. D_ij = 0 where s_i != s_j; gamma_i = 0 where s_i > 0
    row factors    float32 numbers per token and head, computed once: G, s, and those listed in row_factors.py
    undecayed      the prediction of token i comes from the state before its decay: G_{i-1} instead of G_i in L and U
    f, r           1 / |q| and 1 / |k| if the operator normalises q and k, else 1
    state kernel   the sequential stage, which processes the chunks of a sequence in order (states.py)
    segment        a run of consecutive chunks of one sequence that a program processes (segments.py)
    bound          upper bound of the logarithm of a chunk's gain on the state, used to find what a segment forgets
    dX             gradient of the loss with respect to X
"""

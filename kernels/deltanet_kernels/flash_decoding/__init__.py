"""Softmax attention of one query per sequence to a cache of keys and values, split over its places (Flash-Decoding).

A decoding step has only B HK pairs of a sequence and a key head, too few programs for a GPU. Here the places of a pair
are cut into spans. A program reads one span c for all query heads of its pair, with an online softmax (FlashAttention,
arXiv 2205.14135), and leaves the maximum m_c of its scores s_j and two sums relative to it. A second kernel adds the
spans:

    t_c = sum_j e^{s_j - m_c}        a_c = sum_j e^{s_j - m_c} v_j
    o = sum_c e^{m_c} a_c / sum_c e^{m_c} t_c

    file           computes
    -------------  ------------------------------------------------------------------------------------------------
    reference.py   the attention by PyTorch's SDPA: CPU tensors, and CUDA calls that the kernels do not support
    kernels.py     the kernel of a span; the one that adds them is in common/online_softmax.py
    attention.py   launches them and registers the operator with PyTorch
    config.py      tile sizes, and the number of spans
    calls.py       the arguments, and their check
"""

"""A cache of keys and values in 8 or 4 bits, and attention to it: of prompts, of parts of them, and of single queries.

Keys are quantised per channel over groups of 32 tokens, values per token over groups of 32 channels (KIVI, arXiv
2402.02750), on even steps from the lowest number of a group. The current group of a sequence, which ends with its last
token, and its first four tokens are in 8 bits. A group is packed when the first token behind it arrives.

    file           holds
    -------------  ------------------------------------------------------------------------------------------------
    layout.py      the tensors of a cache, and quantising and restoring numbers in PyTorch
    reference.py   the operators by PyTorch: CPU tensors, and CUDA calls that the kernels do not support
    arranged.py    several tokens after others by PyTorch, with padding too
    numbers.py     rounding, packing and restoring numbers in Triton
    kernels.py     the kernels: attention over a span of groups, putting a token, and packing
    prompt.py      those of a prompt or a part of one: the cache of all its tokens, and attention that sees the restored
                   numbers
    launches.py    launches them and registers the operators with PyTorch
    calls.py       the arguments of each operator, as one typed object
    checks.py      argument checks
"""

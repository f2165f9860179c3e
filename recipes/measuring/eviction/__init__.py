"""Learned eviction (DMS, Łańcucki et al., arXiv 2506.05345): a trained rival of windows, by masks.

A gate per key/value head and token decides whether the token stays in the cache once it is older than a window. Nothing
is stored or dropped here; masks compute what a model with such a cache would, and bytes follow from what it would keep.

`python -m measuring.eviction ARRAYS OUT --teacher FOLDER --text TOKENS.npy --keep 5.3MB@2k` trains gates and measures
them; `attention.py` has the attention, `gates.py` the gates in a model, `training.py` the training.
"""

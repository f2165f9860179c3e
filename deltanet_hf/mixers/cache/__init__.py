"""The caches of converted layers, as layers of transformers' `Cache`.

    protocol.py              what every layer of a cache says of itself, and how a kind is added
    argument.py              the name under which transformers hands a cache over
    key_values.py            the same of transformers' own layers
    cache_layer.py           a layer's part of a cache, static or not, made by its first call
    state.py                 the tensors of one layer, and how many tokens it has seen
    mixed_cache.py           the parts of a layer whose heads are of different kinds
    history.py               the last calls of a layer, from which tokens are taken back
    window_cache.py          keys and values of a window with sinks, in 16 bits
    quantised_kv_cache.py    keys and values in 8 or 4 bits, of a window or of all tokens, and what a query sees of them
    quantised_cache_spec.py  what such a cache keeps, and the shapes of its tensors
    sinks_apart.py           sinks that a query sees otherwise than other tokens, and learned ones
    static_key_values.py     growing keys and values in a fixed number of places, and their masks
    cache_bytes.py           the bytes of a cache

Layers get their part by `cache_layer`.
"""

"""The kinds that stay quadratic: a family's softmax attention to all tokens, with something added before its softmax.

    attention_kind.py   their base
    decay_bias.py       scores that fall with the distance: forgetting attention and ALiBi
    deltaformer.py      values that are corrected by the delta rule
    path.py             queries and keys that DeltaNet has turned

A kind of its own derives from `AttentionKind`.
"""

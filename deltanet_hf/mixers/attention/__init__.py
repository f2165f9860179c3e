"""The softmax attention of a family, changed in place: its module, its weights and their names stay.

family_attention.py the same under the contract of all kinds of layers (`LayerKind`)
window_softmax.py   the softmax under a window and sinks (`window.py`)
packed_softmax.py   the softmax over keys and values in 8 or 4 bits
still_key_bias.py   what a key's bias adds in channels that hardly turn, left out for keys of few bits
single_query.py     the softmax of one token, for decoding
far_positions.py    whole heads that read further than the teacher
cut_distances.py    the same by distances that are cut
head_split.py       narrower attentions, each with some of the heads (`mixed_heads.py`)
paired_class.py     a class of ours in front of the family's
routed_config.py    a configuration that hands the family's attention to a function of ours
"""

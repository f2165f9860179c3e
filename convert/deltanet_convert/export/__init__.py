"""Converted models as Qwen3.5 text models, which other runtimes can load, and back.

The export is exact. Qwen3.5's linear layer is the layer of the profile `qwen3_5`. Qwen3.5's softmax layer is Qwen3's
with an output gate: the export sets the gate to sigmoid(0) = 1/2 and doubles the output projection. Its norms store
w - 1; where that would lose bits, a power of two moves from the norm's weight into the matrices that read the norm's
output (`norms.py`). `rewrite.py` has every tensor in both directions.

Idle layers, whose weights are all zero, are added where a runtime needs an attention layer or equal distances between
attention layers (`slots.py`).

An import (`import_qwen3_5.py`) undoes an export bit for bit, with the help of the record `export.json`. Any other
Qwen3.5 text checkpoint, with or without a vision tower, keeps its gated attention: the import only renames its tensors
for the model class of deltanet-hf.
"""

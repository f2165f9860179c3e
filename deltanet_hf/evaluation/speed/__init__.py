"""`deltanet-hf bench`: how fast models read and decode, over context lengths and batch sizes, and what they hold."""

#!/bin/sh
# Qwen3 0.6B in the layout of Qwen3-Next: three layers of Gated DeltaNet, then one of attention.
# Needs the extras train and eval.
set -e
deltanet-hf convert Qwen/Qwen3-0.6B students/qwen3-gdn --keep every:4 --mixer gated_deltanet
deltanet-hf distill qwen3-0.6b student=students/qwen3-gdn output=runs/qwen3-gdn
deltanet-hf eval runs/qwen3-gdn/final --tasks arc_easy,sciq --limit 200
deltanet-hf generate runs/qwen3-gdn/final --prompt "What is photosynthesis?"

#!/bin/sh
# Llama 3.2 1B with windows and Gated DeltaNet states: convert, train on one GPU, compare with the teacher, ask.
# The checkpoint is gated: accept its terms on the Hub, then `hf auth login`. Needs the extras train and eval.
set -e
deltanet-hf convert meta-llama/Llama-3.2-1B students/llama-3.2-1b
deltanet-hf distill llama-3.2-1b student=students/llama-3.2-1b output=runs/llama-3.2-1b --dry-run
deltanet-hf distill llama-3.2-1b student=students/llama-3.2-1b output=runs/llama-3.2-1b
deltanet-hf report meta-llama/Llama-3.2-1B runs/llama-3.2-1b/final --out report --suite texts # --text NAME=FILE adds KL
deltanet-hf generate runs/llama-3.2-1b/final --prompt "The capital of France is"

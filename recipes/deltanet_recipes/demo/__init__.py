"""`make demo`: the main job on SmolLM2-135M-Instruct, on a CPU, from the checkpoint to a report."""

"""`deltanet-hf demo` converts, aligns and evaluates SmolLM2-135M-Instruct on a CPU and writes a report."""

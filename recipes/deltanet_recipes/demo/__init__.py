"""`deltanet-hf demo` converts SmolLM2-135M-Instruct on a CPU, asks it, measures it and writes a report."""

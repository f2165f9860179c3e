"""What measures the project: studies, the laboratory and benchmarks. A checkout runs it; the wheel does not have it."""

"""Measurements of the project: studies, laboratory and benchmarks. A checkout runs them; the wheel lacks them."""

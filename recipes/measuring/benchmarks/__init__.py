"""Benchmarks of training, which are run by hand on GPUs."""

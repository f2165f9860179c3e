"""Benchmarks of conversions; each is a command."""

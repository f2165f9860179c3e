"""Benchmarks of whole models and conversions: speed, training of large shapes, memory."""

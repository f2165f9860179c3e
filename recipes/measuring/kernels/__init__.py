"""Timings of the operators beside other implementations, and the result files."""

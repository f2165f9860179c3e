"""Timings of the operators beside other implementations: `python -m measuring.kernels NAME`."""

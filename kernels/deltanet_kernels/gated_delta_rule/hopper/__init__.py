"""Kernels for Hopper (sm_90) in Gluon; launches.py launches them, chips.KERNELS says for which calls."""

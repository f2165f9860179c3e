"""Kernels for Hopper (sm_90) in Gluon; select.py says which calls they serve."""

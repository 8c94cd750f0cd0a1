"""Measurements: how fast the kernels are, beside what, and on which machine."""

"""The CPU kernels."""

"""Versions of the fused forward beside each other."""

"""The fused forward on a Hopper GPU, 16-bit and fp32, and what limits it."""

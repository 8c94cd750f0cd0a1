"""The general kernel, forced, beside PyTorch's kernels that use the same instructions."""

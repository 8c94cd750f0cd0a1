"""Few queries: the split-key kernels beside PyTorch's attention."""

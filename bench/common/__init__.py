"""What every benchmark shares: the C interface, timing, result files, and pages written from them."""

"""Ways to put pruned attention under code that was written for something else."""

"""The three-kernel pipeline on a GPU."""

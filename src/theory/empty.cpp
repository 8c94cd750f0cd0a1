// Equations of the paper.

"""Products of weights off the GPU by the cores of the host."""

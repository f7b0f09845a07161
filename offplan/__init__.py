"""offplan plans, then runs, a model whose weights do not fit the GPU."""

__version__ = "0.1.0"

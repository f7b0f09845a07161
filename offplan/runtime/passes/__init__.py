"""Passes of a model are run by a schedule, eagerly at first and then as captured CUDA graphs."""

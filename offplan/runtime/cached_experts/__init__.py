"""Experts that layers keep in GPU memory one by one: those used last."""

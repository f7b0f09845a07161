"""Weights are computed with as they are stored: multiplied from their codes, or expanded before."""

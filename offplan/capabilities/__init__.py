"""Capabilities of plans: each has one file here, for its keys, words and refusals."""

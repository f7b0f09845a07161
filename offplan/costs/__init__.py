"""Costs of a plan: compute, memory, and the timeline that prices a schedule."""

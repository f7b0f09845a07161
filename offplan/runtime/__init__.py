"""Executes a plan: store, ring, loader and executor. Imports neither costs nor planner."""

"""Profiles of the hardware: one file a machine, each figure with its source."""

"""Offloaded weights in the memory of a second GPU."""

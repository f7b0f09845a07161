"""Stored forms: what a weight's stored tensors are, and which shape they stand for. No torch."""

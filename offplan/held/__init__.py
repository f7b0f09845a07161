"""Weights of one GPU, lowered once a question: stages of layers of units."""

"""What one GPU holds of a model, lowered once a question: stages of layers of units."""

"""Models run by transformers' own passes, around which offplan moves the weights."""

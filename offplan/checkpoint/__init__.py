"""What the model is: tensors, layers, segments, experts and KV cache, from headers alone."""

"""The model as headers alone tell it: tensors, layers, segments, experts and KV cache."""

"""A model's layers compute with these: attention, caches, experts, kernels."""

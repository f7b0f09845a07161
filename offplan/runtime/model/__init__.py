"""What a model's layers compute with: attention, caches, experts, kernels."""

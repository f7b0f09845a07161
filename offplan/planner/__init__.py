"""The search: which plan of a stated space is the fastest that fits. Pure and deterministic."""

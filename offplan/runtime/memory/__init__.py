"""The memory that weights live in while a plan runs: arena, ring and store."""

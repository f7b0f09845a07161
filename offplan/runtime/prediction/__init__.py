"""Drafts by a checkpoint's own prediction layer, which is a model of its own."""

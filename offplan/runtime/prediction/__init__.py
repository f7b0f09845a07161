"""Drafts by a checkpoint's own prediction layer, which lies on the device as a model of its own."""

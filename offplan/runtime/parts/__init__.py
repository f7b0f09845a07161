"""Prompts that stream a layer's routed experts in parts."""

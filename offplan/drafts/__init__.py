"""Drafts: where they come from, how many a pass has, and what is counted of them. No torch."""

"""Hits of one cache by a list, for tests of what caches of every size hit."""


def count_hits(steps: list[set[int]], num_experts: int, num_kept: int) -> int:
    """Count the hits of one cache by keeping it: an independent statement of the order."""
    order: list[int] = list(range(num_experts))
    used: set[int] = set()
    held: set[int] = set()
    hits = 0
    for step in steps:
        hits += len(step & held)
        order = [e for e in order if e in step] + [e for e in order if e not in step]
        used |= step
        held = {e for e in order[:num_kept] if e in used}
    return hits

"""The places of a cache that a token sees, by the words of ``coded_kernel.SEES``."""


def find_seen(sees: str, position: int, reach: int) -> tuple[int, int]:
    """Find the first place of the cache that a token sees, and the place behind the last."""
    stop = position + 1
    if sees == "window":
        return max(0, stop - reach), stop
    if sees == "chunk":
        return position - position % reach, stop
    if sees == "ring":
        return 0, min(reach, stop)
    return 0, position % reach + 1 if sees == "ring_of_chunk" else stop

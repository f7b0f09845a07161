"""Text from strangers, made safe to print."""


def printable(text: str) -> str:
    """Write as escapes what a terminal would obey or cannot show; lines and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)

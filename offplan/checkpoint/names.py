"""The parts of a tensor's name."""


def is_index(part: str) -> bool:
    """Whether a name part is an index as writers write it: ASCII digits, no leading zero, few.

    Anything else is a word: ``03`` must not stand for the same layer or expert as ``3``.
    """
    return part.isascii() and part.isdecimal() and len(part) < 7 and (part[0] != "0" or part == "0")

"""Names of machines as people type them: ``two RTX 3090s with 64 GB RAM``, ``4060 8GB laptop``."""

import re
from typing import NamedTuple

_ALIKE = str.maketrans({"\u00d7": "x", "*": "x", **dict.fromkeys("™®©", "")})
_BETWEEN = re.compile(r"\((?:tm|r|c)\)|[\s,;:+&/()_-]+")
_GLUED = re.compile(r"((?:[1-5]0|16)[1-9]0|ti|super)(?=[0-9]{1,2} ?g)")
"""The end of a card's name with a memory right behind: ``4060ti16g``."""
_GIB = r"([0-9]{1,4}) ?(?:g|gb|gib|gigs?)\b"
_NO_AMOUNT = r"(?! ?[0-9]+ ?g)"
"""Behind a word that an amount follows, the amount before it is another memory's."""
_RAM = re.compile(
    rf"\bram {_GIB}|"
    rf"{_GIB}(?: of)?(?: (?:system|main|host|ddr[345]x?))* (?:ram|ddr[345]x?)\b{_NO_AMOUNT}"
)
_VRAM = re.compile(rf"\bvram {_GIB}|{_GIB}(?: of)? (?:vram|gddr\w*|hbm\w*)\b{_NO_AMOUNT}")
_EITHER = re.compile(rf"\b{_GIB}")
_LAPTOP = re.compile(r"laptop|mobile|notebook|max ?q\b|(?<=[0-9i])m\b| m$")
_SYSTEM = re.compile(r"\b(?:(wsl) ?2?|(windows)(?: 1[01])?|(linux|ubuntu))\b")
_NUMBERS = {"two": 2, "dual": 2, "double": 2, "pair": 2, "three": 3, "four": 4, "eight": 8}
_NUMBER = rf"[2-9]|1[0-6]|(?:{'|'.join(_NUMBERS)})"
_COUNT = re.compile(
    rf"(?P<before>{_NUMBER})(?:x| x)? *(?<![0-9])(?P<name>.+)|"
    r"(?P<first>.+?)(?: *(?<!rt)(?<!gt)(?<!xt)x) *(?P<behind>[2-9]|1[0-6])",
    re.IGNORECASE,
)
"""A name with a number of GPUs: ``2x rtx3090``, ``two 3090s`` or ``rtx3090 x2``."""
_SUPER = re.compile(r"(?:(?<=[0-9]{3}0)|(?<=ti)) ?s\b")
"""The end of ``4080s`` and ``4070 ti s``."""
_NOISE = re.compile(
    r"\b(?:nvidia|geforce|tesla|gpus?|graphics|video|cards?|desktop|founders|edition|fe|oc|my|an?|"
    r"the|with|and|of|on|one|single|generation|blackwell|workstation|asus|msi|gigabyte|zotac|palit|"
    r"evga|pny|gainward|inno3d|galax|kfa2|colorful)\b"
)
"""Words beside a name that change no figure of it. A server's edition has other figures."""


class Typed(NamedTuple):
    """The parts of a name as it was typed. Amounts are in GiB."""

    gpu: str
    """The GPU's name without spaces, makers and the parts below: ``rtx4060ti``."""
    is_laptop: bool = False
    vram: int | None = None
    """Memory that was called the GPU's."""
    ram: int | None = None
    """Memory that was called the machine's."""
    amounts: tuple[int, ...] = ()
    """Memory that was called neither."""
    system: str | None = None
    num_gpus: int = 1


def split_count(text: str) -> tuple[str, int]:
    """Split a number of GPUs off a name; the number is 1 where there is none."""
    text = text.strip().translate(_ALIKE)
    if (found := _COUNT.fullmatch(text)) is None:
        return text, 1
    number = (found["before"] or found["behind"]).lower()
    return (found["name"] or found["first"]).strip(), _NUMBERS.get(number) or int(number)


def parse_typed(text: str) -> Typed:
    """Read a name's parts; what is none of them stays in ``gpu``."""
    left = _BETWEEN.sub(" ", text.lower().translate(_ALIKE)).strip()
    left = _GLUED.sub(r"\1 ", left)
    left, ram = _take(_RAM, left)
    left, vram = _take(_VRAM, left)
    amounts = tuple(int(each) for each in _EITHER.findall(left))
    left, systems = _EITHER.sub(" ", left), _SYSTEM.search(left)
    system = None
    if systems is not None:
        system = "wsl2" if systems[1] else "windows" if systems[2] else "linux"
        left = _SYSTEM.sub(" ", left)
    left, is_laptop = _LAPTOP.sub(" ", left), bool(_LAPTOP.search(left))
    left = re.sub(r"\b([2-9]|1[0-6])x(?=[a-z])", r"\1x ", left)  # 2xnvidia
    left, num_gpus = split_count(" ".join(_NOISE.sub(" ", left).split()))
    left = _SUPER.sub("" if num_gpus > 1 else "super", left)  # two 4080s are no 4080 Super
    return Typed(re.sub("[^a-z0-9]", "", left), is_laptop, vram, ram, amounts, system, num_gpus)


def _take(pattern: re.Pattern[str], text: str) -> tuple[str, int | None]:
    """Take one amount out of a text; leave a text with none, or with several, as it is."""
    found = pattern.findall(text)
    if len(found) != 1:
        return text, None
    return pattern.sub(" ", text), int("".join(found[0]))

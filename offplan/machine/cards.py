"""Shipped machines by the names of their GPUs, and those nearest to a name that none has."""

import difflib
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from offplan.machine.typed import Typed

SHIPPED = Path(__file__).parent / "profiles"
_MAKERS = re.compile(r"nvidia|geforce|tesla|gpu|[^a-z0-9]")
_OTHER_NAMES = {
    "gb10-c2c": ("dgxspark", "spark"),
    **{
        f"{name}-pcie5": tuple(f"{name}{form}" for form in ("sxm", "sxm5", f"{size}gb", "hgx"))
        for name, size in (("h200", 141), ("h20", 96))
    },
    "h100-pcie5": ("h100sxm", "h100sxm5", "h10080gb", "h10080gbhbm3", "h100hgx"),
    "b200-pcie5": ("b200sxm", "b200hgx", "dgxb200"),
    "b300-pcie5": ("b300sxm", "b300hgx", "dgxb300", "b300288gb"),
    "h100-nvl-pcie5": ("h10094gb",),
    "a100-pcie4": ("a100pcie", "a10080gb", "a10080gbpcie"),
    "rtxpro6000-pcie5": ("pro6000", "rtx6000pro", "6000pro", "rtxpro6000wk"),
    "titanrtx-pcie3": ("rtxtitan",),
}
_MEMORY = re.compile(r"^gpu_memory: \{value: (([0-9]+) Gi?B),", re.MULTILINE)
_VARIANT = re.compile(r"-[0-9]+gb\b")
"""The part of a shipped name that tells a card's memory from the usual."""
_CARD = re.compile(r"(?:rtx|gtx)?([0-9]{2})([0-9]0)(ti)?(super)?")
"""The normalised name of a GeForce card: generation, tier, and what stands behind."""
_CARD_WITHIN = re.compile(r"(?<![0-9])(1[06]|[2-5]0)([1-9]0)(ti)?(super)?(?![0-9])")
"""The same among other words."""
_VRAM_GIB = {
    **dict.fromkeys(("1060", "1660", "1660ti", "1660super", "4050"), 6),
    **dict.fromkeys(("1070", "1070ti", "1080"), 8),
    **{"1650": 4, "1650super": 4, "1050ti": 4, "1080ti": 11},
}
"""GPU memory of cards of which no profile is shipped. Source: NVIDIA's specifications."""
_MOST_NAMED = 80


class Card(NamedTuple):
    """A shipped machine, by its GPU."""

    name: str
    """The profile's name: ``rtx4060ti-16gb-pcie4``."""
    forms: frozenset[str]
    """Normalised names of the GPU, without its memory and ``laptop``."""
    is_laptop: bool
    memory: str
    """GPU memory as the profile has it; empty if that is no whole number."""
    is_variant: bool
    """True if the usual card of this name has other memory."""

    @property
    def gib(self) -> int | None:
        """GPU memory as people call it, in GiB or GB; None if that is no whole number."""
        return int(self.memory.split()[0]) if self.memory else None

    @property
    def short(self) -> str:
        """The name without its link."""
        return self.name.rpartition("-")[0] or self.name


def shipped_profiles() -> list[str]:
    """Names of the profiles that come with offplan."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


@cache
def _read_cards() -> tuple[Card, ...]:
    return tuple(_read_card(name) for name in shipped_profiles())


def _read_card(name: str) -> Card:
    gpu = name.rpartition("-")[0] or name
    memory = _MEMORY.search((SHIPPED / f"{name}.yaml").read_text("utf-8"))
    is_variant, is_laptop = bool(_VARIANT.search(gpu)), gpu.endswith("-laptop")
    return Card(
        name,
        frozenset(_forms(_VARIANT.sub("", gpu).removesuffix("-laptop"), name)),
        is_laptop,
        memory[1] if memory else "",
        is_variant,
    )


def find_exact(text: str) -> str | None:
    """Find the shipped profile with this name, but for its link, ``rtx`` and punctuation."""
    wanted = normalise(text)
    return next((name for name in shipped_profiles() if wanted in _names(name)), None)


def find_cards(typed: Typed) -> list[Card]:
    """Find the shipped cards of a name, whatever their memory; the usual one comes first."""
    found = [
        each
        for each in _read_cards()
        if typed.gpu in each.forms and each.is_laptop == typed.is_laptop
    ]
    return sorted(found, key=lambda each: each.is_variant)


def is_geforce(typed: Typed) -> bool:
    """Return True for the name of a GeForce card, shipped or not."""
    return _CARD.fullmatch(typed.gpu) is not None


def find_nearest(typed: Typed) -> list[str]:
    """Name shipped machines near to a name: two in kind and memory, or those spelled alike."""
    wanted = _CARD.fullmatch(typed.gpu) or _CARD_WITHIN.search(typed.gpu)
    if wanted is None:
        spelled = {form: name for name in shipped_profiles() for form in _names(name)}
        close = difflib.get_close_matches(typed.gpu[:_MOST_NAMED], spelled, 3)
        return [*dict.fromkeys(spelled[each] for each in close)]
    model = "".join(part or "" for part in wanted.groups())
    known = None if typed.is_laptop else _VRAM_GIB.get(model)
    vram = typed.vram or next(iter(typed.amounts), known)
    ranked = []
    for each in _read_cards():
        own = next(filter(None, map(_CARD.fullmatch, each.forms)), None)
        if own is None:
            continue
        lack = 0 if vram is None else abs(vram - (each.gib or 0))
        kind = each.is_laptop != typed.is_laptop
        generation, tier = (abs(int(own[part]) - int(wanted[part])) for part in (1, 2))
        marks = [bool(own[part]) != bool(wanted[part]) for part in (3, 4)]
        is_same = generation == tier == 0 and not any(marks)
        key = (not is_same, kind, lack, tier, generation, *marks, each.is_variant)
        ranked.append((key, each.name))
    return [name for _, name in sorted(ranked)[:2]]


def _names(name: str) -> set[str]:
    """Return what may be typed for a shipped name, its memory and ``laptop`` included."""
    return {normalise(name), *_forms(name.rpartition("-")[0] or name, name)}


def _forms(gpu: str, name: str) -> set[str]:
    gpu = normalise(gpu)
    return {gpu, gpu.removeprefix("rtx"), *_OTHER_NAMES.get(name, ())}


def normalise(text: str) -> str:
    """Return a name in small letters and digits alone, without makers."""
    return _MAKERS.sub("", text.lower())

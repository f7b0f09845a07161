"""Names of machines: a shipped profile or a file, and what is changed of it."""

import difflib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from offplan.errors import InputError, ProfileError
from offplan.hostmem.limits import find_ram, lockable_bytes
from offplan.kinds import describe_kind
from offplan.machine.assumed import parse_link, rate_of_memory
from offplan.machine.cards import (
    SHIPPED,
    Card,
    find_cards,
    find_exact,
    find_nearest,
    is_geforce,
    normalise,
    shipped_profiles,
)
from offplan.machine.typed import Typed, parse_typed, split_count
from offplan.units import parse_bytes

_CHANGE = re.compile(
    r"[,;]\s*(?=[a-z0-9_]+ ?=)|\s+(?=(?:pcie|v?ram|os|ddr|link) ?=)", re.IGNORECASE
)
_PCIE = re.compile(r"([0-9])(?:\.0)?x([0-9]+)", re.IGNORECASE)
_NO_LANES = re.compile(r"(pcie)=(?:gen ?)?([3-6])(?:\.0)?", re.IGNORECASE)
_LANES = re.compile(r"^link: PCIe [3-6] x([0-9]+)$", re.MULTILINE)
_MOST_LANES = 16
_OTHER_MAKERS = {
    "AMD": r"(amd|instinct|radeon|ryzenai|strixhalo)+.*|mi[0-9]{2,3}[axp]?|"
    r"(pro)?(rx|w)[0-9]{3,4}(xtx|xt|gre|m|s)*|[5679][0-9]{3}(xtx|xt|gre)",
    "Intel": r"(intel|gaudi|flex[0-9]|max1[0-9]{3}|arc(pro)?[ab]?[0-9]|iris).*|arc|"
    r"[ab][3-7][1578]0m?",
    "Apple": r"(apple|mac(book|mini|studio|pro)|imac).*|mac|m[1-9](pro|max|ultra)?([0-9]{2,3}gb)?",
}
"""Normalised names of GPUs of other makers than NVIDIA."""
_RUN_THERE = {
    "AMD": "llama.cpp, built for ROCm or Vulkan, runs GGUF files on it",
    "Intel": "llama.cpp, built for SYCL or Vulkan, runs GGUF files on it",
    "Apple": "llama.cpp, built for Metal, runs GGUF files on it, and MLX its own checkpoints",
}
"""Programs for GPUs of other makers. Source: llama.cpp's docs/build.md; mlx-lm's README."""
_NVIDIA = re.compile(r"nvidia|geforce|tesla|quadro|[gr]tx", re.IGNORECASE)
"""Parts of a name that say NVIDIA, whatever maker of a processor is named beside."""
_BEFORE_TURING = re.compile(
    r"(v100s?|p(4|6|40|100)|m(4|6|10|40|60)|k(10|20x?|40|80))(pcie|sxm[23]?)?([0-9]{2}gb)?|"
    r"(quadro)?(g[pv]100|[kmp][1-6][0-9]{2,3}([0-9]{2}gb)?)|"
    r"(gtx)?titan(x|xp|xpascal|v|z|black)?|(gtx)?(9|10)[5-8]0(ti)?([0-9]gb)?|mx[1-3][0-9]{2}"
)
"""Normalised names of NVIDIA's GPUs of Volta and before."""
_SHORT_KEYS = {
    **{"pcie": "link", "ram": "host_memory", "vram": "gpu_memory", "os": "system"},
    "ddr": "cores",
}
_SYSTEMS = ("linux", "wsl2", "windows")
_HOW_TO_WRITE = (
    "write a GPU's name, a laptop's with -laptop, and the machine's memory behind it: "
    "rtx4090,ram=64GiB or rtx4060-laptop,ram=16GiB"
)
_BARE_SYSTEM = re.compile(rf",\s*(?=(?:{'|'.join(_SYSTEMS)})(?:,|$))", re.IGNORECASE)
"""The comma before a system without its key, as people write ``rtx4090,wsl2,ram=64GiB``."""
_KEPT_BY = re.compile(rf"less what ({'|'.join(_SYSTEMS)}|the operating system) keeps(?!:)")
"""The end of the source of a figure that ``ram=`` gave, or that was measured on Linux."""


class MachineName(NamedTuple):
    """The value of ``--machine``: ``rtx4090-pcie4,pcie=4x8,ram=64GiB``."""

    base: str
    """The name of a shipped profile, or a file."""
    changes: tuple[str, ...] = ()
    """Figures given in place of the profile's: ``ram=64GiB``."""
    num_gpus: int = 1
    """GPUs that were typed with the name: ``rtx3090 x2``. The profile describes one of them."""
    assumed: str = ""
    """The change that was taken in place of one without lanes: ``pcie=4x16``."""

    def __str__(self) -> str:
        return ",".join((self.base, *self.changes))

    @property
    def is_shipped(self) -> bool:
        """True if its profile comes with offplan."""
        return self.base in shipped_profiles()

    @property
    def why_no_cores(self) -> str | None:
        """Why the host's cores are to multiply nothing by the changes alone; None if they may."""
        if "os=windows" in map(str.lower, self.changes):
            return "their kernels are for Linux on x86-64, and this machine's system is Windows"
        return None

    def move(self, moved: Callable[[str], str]) -> "MachineName":
        """Return the name by which it is known elsewhere: a file's path is ``moved``."""
        return self if self.is_shipped else self._replace(base=moved(self.base))

    def find_file(self) -> Path:
        """Return the profile's file; raises ProfileError, with the nearest names, for none."""
        path = SHIPPED / f"{self.base}.yaml" if self.is_shipped else Path(self.base)
        if self.base.isprintable() and path.is_file():
            if not self.is_shipped and (kind := describe_kind(path, "a machine")) is not None:
                raise ProfileError(f"{self.base} is no machine profile: {kind}")
            return path
        if self.base.isprintable() and (kind := describe_kind(self.base, "a machine")) is not None:
            raise ProfileError(f"no machine profile {self.base!r}: {kind}")
        if (maker := _find_maker(self.base)) is not None:
            raise ProfileError(
                f"no machine profile {self.base!r}: offplan runs models on NVIDIA's GPUs, and "
                f"comes with figures of none by {maker}; {_RUN_THERE[maker]}. For offplan "
                "name a GPU that `offplan machines` lists; a profile's file with that GPU's "
                "figures gives plans, which `offplan run` does not execute there"
            )
        typed = parse_typed(self.base)
        if (unsaid := _describe_memory(typed)) is not None:
            raise ProfileError(f"no machine profile {self.base!r}: {unsaid}")
        too_old = why_no_run(self.base)
        meant = "" if too_old and not is_geforce(typed) else " or ".join(find_nearest(typed))
        help_ = "" if too_old else "; " + _HOW_TO_WRITE
        raise ProfileError(
            f"no machine profile {self.base!r}: it is neither a file nor a name that `offplan "
            "machines` lists"
            + (f"; is {meant} meant?" if meant else "." if too_old else help_)
            + (f" {too_old}" if too_old else "")
        )

    def read_changes(self) -> dict[str, Any]:
        """Return the changes as a profile's file would give them.

        Raises ProfileError for a link that is not understood, and for a key given twice.
        """
        data: dict[str, Any] = {}
        for change in self.changes:
            short, _, text = change.partition("=")
            key = _SHORT_KEYS.get(short.lower(), short.lower())
            if key == short.lower() and (near := difflib.get_close_matches(key, _SHORT_KEYS, 1)):
                raise ProfileError(f"`machine={self}`: there is no {short!r}; is {near[0]} meant?")
            if key in data:
                raise ProfileError(f"`machine={self}`: {key} is given twice")
            if short.lower() == "pcie":
                found = _PCIE.fullmatch(text)
                text = f"PCIe {found[1]} x{found[2]}" if found else text
                if parse_link(text) is None:
                    raise ProfileError(
                        f"`machine={self}`: {change} is no link: write its generation (3 to 6) and "
                        "lanes as pcie=4x16"
                    )
            is_figure = key not in ("link", "name", "system")
            given = {"value": text, "basis": "reported", "source": "given with --machine"}
            if short.lower() == "ddr":
                try:
                    given = rate_of_memory(text)
                except InputError as error:
                    raise ProfileError(f"`machine={self}`: {change} {error}") from None
            data[key] = given if is_figure else text
        system, ram = data.pop("system", None), data.get("host_memory")
        if any(change.lower().startswith("ram=") for change in self.changes):
            data["host_memory"] = _find_lockable(str(self), ram, system or "linux")
        elif system is not None:
            raise ProfileError(
                f"`machine={self}`: os= says how much of the memory can be page-locked; give the "
                "memory, too, as ram=64GiB"
            )
        return data


def find_enough_ram(source: str, locked_bytes: int) -> int | None:
    """Find the memory of a machine of which so much can be page-locked.

    ``source`` is that of the machine's ``host_memory``. None if it does not tell which system keeps
    a part, or if no machine has so much memory.
    """
    found = _KEPT_BY.search(source)
    return None if found is None else find_ram(locked_bytes, found[1])


def _find_lockable(named: str, ram: Any, system: str) -> Any:
    """Return the figure of what can be page-locked, for that of all memory."""
    if system.lower() not in _SYSTEMS:
        raise ProfileError(f"`machine={named}`: found os={system}, expected {', '.join(_SYSTEMS)}")
    try:
        num_bytes = lockable_bytes(parse_bytes(ram["value"]), system.lower())
    except InputError:
        return ram  # it is refused as other figures are
    told = f"given with --machine: {ram['value']} of memory, less what {system} keeps"
    return {**ram, "value": num_bytes, "source": told}


def parse_name(text: str) -> MachineName:
    """Read a machine's name: the exact or loose name of a shipped profile, or a file's path.

    ``RTX 4090`` and ``4090`` are ``rtx4090-pcie4``; a file of such a name comes first. A number of
    GPUs beside the name is left out of it. A link without lanes has those of the card.
    """
    base, *changes = _CHANGE.split(_BARE_SYSTEM.sub(",os=", text))
    named = _parse_base(base)
    return _assume_lanes(named._replace(changes=(*named.changes, *changes)))


def _parse_base(base: str) -> MachineName:
    named = MachineName(base)
    if named.is_shipped or not base.isprintable() or Path(base).is_file():
        return named
    if (exact := find_exact(base)) is not None:
        return named._replace(base=exact)
    one, number = split_count(base)
    if number > 1 and (exact := find_exact(one)) is not None:
        return named._replace(base=exact, num_gpus=number)
    if (described := _choose(parse_typed(base))) is not None:
        return described
    if number == 1 or split_count(one)[1] > 1:
        return named
    # a file, or a card of which no profile is shipped
    is_known = Path(one).is_file() or why_no_run(one) is not None or is_geforce(parse_typed(one))
    return named._replace(base=one, num_gpus=number) if is_known else named


def _choose(typed: Typed) -> MachineName | None:
    """Choose the shipped machine of a typed name; None if none or several may be meant."""
    card, vram, others = _find_card(typed)
    if card is None or others:
        return None
    changes = {"vram": None if vram == card.gib else vram, "ram": typed.ram}
    given = [f"{key}={gib}GiB" for key, gib in changes.items() if gib is not None]
    given += [] if typed.system is None else [f"os={typed.system}"]
    return MachineName(card.name, tuple(given), typed.num_gpus)


def _find_card(typed: Typed) -> tuple[Card | None, int | None, list[int]]:
    """Return the shipped card of a typed name, None if there is none, and its amounts, in GiB.

    They are the GPU's memory, and those of which nobody said what they are.
    """
    cards, others = find_cards(typed), list(typed.amounts)
    known = [card.gib for card in cards]
    vram = typed.vram or next((each for each in others if each in known), None)
    if typed.vram is None and vram is not None:
        others.remove(vram)
    elif vram is not None and vram not in known and vram / typed.num_gpus in known:
        vram //= typed.num_gpus  # what all of them have
    usual = next(iter(cards), None)
    return next((each for each in cards if vram in (None, each.gib)), usual), vram, others


def _describe_memory(typed: Typed) -> str | None:
    """Say of which memory a typed name leaves open what it is, and how to write it; or None."""
    card, _, others = _find_card(typed)
    if card is None or not others:
        return None
    gib = others[0]
    return (
        f"{card.name} has {card.memory} of GPU memory; write `{card.short},ram={gib}GiB` for a "
        f"machine with {gib} GiB of memory, or `{card.short},vram={gib}GiB` for a GPU with so much"
    )


def _assume_lanes(named: MachineName) -> MachineName:
    """Give a link without lanes those of the shipped card, of another machine 16."""
    for number, change in enumerate(named.changes):
        if (found := _NO_LANES.fullmatch(change)) is not None:
            text = (SHIPPED / f"{named.base}.yaml").read_text("utf-8") if named.is_shipped else ""
            card = _LANES.search(text)
            link = f"pcie={found[2]}x{card[1] if card else _MOST_LANES}"
            changes = (*named.changes[:number], link, *named.changes[number + 1 :])
            return named._replace(changes=changes, assumed=link)
    return named


def why_no_run(gpu: str) -> str | None:
    """Return why ``run`` cannot execute a model on a GPU of this name, None if none is known.

    Source: CUDA 13.0's release notes: Maxwell, Pascal and Volta are dropped. PyPI's wheels of the
    torch that offplan is tested with are built for it.
    """
    if (maker := _find_maker(gpu)) is not None:
        return (
            f"`offplan run` executes models on NVIDIA's GPUs, found one by {maker}, {gpu}; "
            f"{_RUN_THERE[maker]}"
        )
    if _BEFORE_TURING.fullmatch(normalise(gpu)):
        return (
            f"`offplan run` needs a GPU of Turing (RTX 20, T4) or newer, found {gpu}: CUDA 13, for "
            "which torch's wheels are built, supports none before; llama.cpp, built for CUDA 12 or "
            "Vulkan, runs GGUF files there"
        )
    return None


def _find_maker(gpu: str) -> str | None:
    """Find who makes a GPU, None if no name of another maker than NVIDIA is known."""
    if _NVIDIA.search(gpu):
        return None
    name = normalise(gpu)
    return next((each for each, known in _OTHER_MAKERS.items() if re.fullmatch(known, name)), None)

"""Figures that a profile may leave out, and what is assumed in their place.

Each is an estimate, and names in its source what it rests on.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from offplan.errors import InputError
from offplan.units import format_rate, parse_flops, parse_rate

UVA_SHARE = 0.92
"""In-place reads of each byte once over DMA. Source: 51 of 55.4 GB/s measured on an H200."""
_LANE_BYTES_PER_S = {3: 0.98462e9, 4: 1.96923e9, 5: 3.93846e9, 6: 7.5625e9}
"""Bytes per second of one lane, one way. Source: PCI-SIG: 8, 16 and 32 GT/s with 128b/130b; 64 GT/s
with 242 bytes of payload in a flit of 256."""
_EFFICIENCY = {
    3: (0.79, "25 GB/s reported of PCIe 4 x16 links"),
    4: (0.79, "25 GB/s reported of PCIe 4 x16 links"),
    5: (0.88, "55.4 GB/s measured of the PCIe 5 x16 link of an H200"),
    6: (0.88, "55.4 GB/s measured of the PCIe 5 x16 link of an H200"),
}
"""Rate of large pinned copies over the lanes' peak, and what it is taken from, by generation."""
_LINK = re.compile(r"PCIe ?(?:Gen ?)?([3-6])(?:\.0)? ?x ?(1|2|4|8|16)", re.IGNORECASE)
_MEMORY = re.compile(r"([3-6])-([0-9]{1,6})x([0-9]{1,4})", re.IGNORECASE)
_TRANSFERS = {3: (800, 3200), 4: (1333, 5600), 5: (3200, 12800), 6: (6400, 25600)}
"""Megatransfers a second of each generation, the least and the most.

Source: JEDEC's slowest grades, and modules sold for overclocking; LPDDR5X has 10,667. Of DDR6,
which nobody sells, twice those of DDR5.
"""
_MOST_CHANNELS = 32
"""Source: two sockets of 16."""
_TRANSFER_BYTES = 8
"""Bytes of a transfer of one channel, of 64 bits. Source: JEDEC."""
_CORES_SHARE = 2 / 3, "two thirds"
"""Part of the memory's peak that cores read, but of a desktop's DDR4.

Desktops' DDR5 lies on both sides of it, and servers of many channels at it or below. A name of
the memory does not tell whose cores read it.

Source: reads of two channels of DDR5 on AMD's single dies: 62.9 of 89.6 GB/s by a Ryzen 9700X,
46.4 by a 9600X (https://github.com/memtest86plus/memtest86plus/issues/557, 2025-10-29). On Intel's:
95 of 102.4 by a 270K Plus (https://github.com/memtest86plus/memtest86plus/issues/612, 2026-05-12).
Source: 8 channels of DDR4-2666: 113 of 171 GB/s read by an EPYC 7452
(https://github.com/kvcache-ai/ktransformers/pull/2175, 2026-09-10). 24 of DDR5-4800: 530 of 922
by two EPYC 9124 (https://github.com/ggml-org/llama.cpp/discussions/11530, undated; at second hand).
Source: two Xeon 4510 with 4 channels of DDR5-4400 read 111 of 141 GB/s, their expert kernels 68
(https://github.com/JustVugg/colibri/issues/537, 2026-07-28).
"""
_DESKTOP_DDR4_SHARE = 3 / 4, "three quarters"
"""Part of the peak of one or two channels of DDR4 that cores read.

Source: Guru3D reads 46 of 51.2 GB/s of DDR4-3200 on a desktop
(https://guru3d.com/review/g-skill-tridentz-royal-ddr4-3200-mhz-review/page-10, undated), and 43 by
AIDA64 on Intel's Z170 (https://guru3d.com/review/gigabyte-z170x-gaming-g1-review/page-17, undated).
Source: a Ryzen 5900X decodes Mixtral Q8_0 at 3.58 tokens a second from two channels of DDR4-3600
(https://github.com/ggml-org/llama.cpp/issues/4716, 2023-12-31). By our count that is 13.7 GB
a token, and 0.85 of 57.6 GB/s.
Source: decoding takes 0.84 to 0.91 of what a pure read does, on a Raspberry Pi 5
(https://github.com/ggml-org/llama.cpp/issues/26484, 2026-08-08): 0.71 to 0.82 of these peaks.
"""
_DESKTOP_CHANNELS = 2
_PARSERS = {"hbm": parse_rate, "matmul": parse_flops}
_EVERYWHERE = {
    "copy_latency": ("6 us", "5.4 us measured on an H200, rounded up"),
    "layer_overhead": ("25 us", "20 captured kernels that do next to nothing, on an H200"),
    "gpu_overhead": (
        "1 GiB",
        "context and libraries of a process that has run a model, and its graphs",
    ),
}
"""Figures that hardly depend on the machine."""
ACHIEVED_SHARES = {"hbm": 0.87, "matmul": 0.69}
"""Shares of a datasheet's peak that kernels achieve. Profiles give figures of other bases as
achieved. Among these is ``matmul`` of GeForce cards: half the peak, for sums in float32.

Source: an H200 achieves 4.17 of 4.8 TB/s and 680 of 989 TFLOP/s by products back to back; an H100
reads 1.158 GB in 0.40 ms, 0.86 of 3.35 TB/s. By others' best product of any shape
(https://github.com/mag-/gpu_benchmark) an A100 has 0.82 of its peak, an L40S 0.70 and an L4 0.76;
of the figures that profiles have, an RTX 4090 has 1.08 and an RTX 3090 1.10.
"""
_OF_THE_LINK = (
    *("h2d", "uva", "copy_latency", "uva_beside_copies", "h2d_concurrent"),
    *("h2d_curve", "h2d_pageable_curve", "d2h_curve"),
)
_OF_THE_GPU = ("layer_times",)
_OF_THE_CORES = ("cores_beside_copies", "host_reads", "host_threads")
_DEPENDENTS = {
    **dict.fromkeys(("link", "h2d"), _OF_THE_LINK),
    **dict.fromkeys(("hbm", "matmul", "vector", "layer_overhead"), _OF_THE_GPU),
    "cores": _OF_THE_CORES,
}
"""Figures that no longer hold once another is changed."""


def change_figures(figures: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a profile's data with some of its keys changed, without what rested on those."""
    outdated = {each for key in changes for each in _DEPENDENTS.get(key, ())}
    return {key: value for key, value in figures.items() if key not in outdated} | changes


def complete_figures(figures: dict[str, Any]) -> dict[str, Any]:
    """Return a profile's data with what it leaves out, so far as it can be assumed."""
    complete = {"link": "host link", **figures} if "h2d" in figures else dict(figures)
    for key, (value, source) in _EVERYWHERE.items():
        complete.setdefault(key, estimate(value, source))
    for key, share in ACHIEVED_SHARES.items():
        if key in complete:
            complete[key] = _achieve(complete[key], share, _PARSERS[key])
    if "h2d" not in complete and (link := parse_link(complete.get("link"))) is not None:
        peak = link.lanes * _LANE_BYTES_PER_S[link.generation]
        efficiency, seen = _EFFICIENCY[link.generation]
        source = f"{format_rate(peak)}, the peak of {link}, x {efficiency} as in {seen}"
        complete["h2d"] = estimate(format_rate(efficiency * peak), source)
    if "uva" not in complete and (h2d := _read_rate(complete.get("h2d"))) is not None:
        source = f"{UVA_SHARE} of h2d, as measured on an H200: 51 of 55.4 GB/s"
        complete["uva"] = estimate(format_rate(UVA_SHARE * h2d), source)
    return complete


class PCIeLink(NamedTuple):
    """A PCI Express link; its text is how profiles name it."""

    generation: int
    lanes: int

    def __str__(self) -> str:
        return f"PCIe {self.generation} x{self.lanes}"


def parse_link(text: object) -> PCIeLink | None:
    """Read ``PCIe 4 x16``, or ``pcie 4.0 x16``; None for links of other kinds."""
    found = _LINK.fullmatch(text) if isinstance(text, str) else None
    return PCIeLink(int(found[1]), int(found[2])) if found else None


def rate_of_memory(text: str) -> dict[str, Any]:
    """Estimate what cores read of memory by its name: ``5-6000x2``; raises InputError for none."""
    if (found := _MEMORY.fullmatch(text)) is None:
        raise InputError(
            "is no memory: write its generation (3 to 6), megatransfers a second and channels as "
            "ddr=5-6000x2"
        )
    generation, transfers, number = (int(each) for each in found.groups())
    least, most = _TRANSFERS[generation]
    if not least <= transfers <= most or not 1 <= number <= _MOST_CHANNELS:
        raise InputError(
            f"is no memory: found {found[2]} megatransfers a second and {found[3]} channels, "
            f"expected {least} to {most} of DDR{generation} and 1 to {_MOST_CHANNELS} channels"
        )
    peak = 1e6 * transfers * _TRANSFER_BYTES * number
    channels = f"{number} channel{'s' * (number != 1)} of DDR{generation}-{transfers}"
    is_desktop_ddr4 = generation == 4 and number <= _DESKTOP_CHANNELS
    share, in_words = _DESKTOP_DDR4_SHARE if is_desktop_ddr4 else _CORES_SHARE
    source = f"{channels}: {format_rate(peak)}, of which cores read {in_words}"
    return estimate(format_rate(share * peak), source)


def estimate(value: Any, source: str) -> dict[str, Any]:
    """Return a figure that was estimated, as a profile's data."""
    return {"value": value, "basis": "estimated", "source": source}


def _achieve(figure: Any, share: float, parse: Callable[[str | float], float]) -> Any:
    """Return the rate that kernels achieve, for a datasheet's; any other as it is."""
    if not isinstance(figure, dict) or figure.get("basis") != "datasheet":
        return figure
    try:
        peak = parse(figure["value"])
    except (InputError, KeyError, TypeError):
        return figure  # the profile's check refuses it
    source = f"{share} of the peak, as an H200 achieves: {figure.get('source')}"
    return {**figure, "value": share * peak, "basis": "estimated", "source": source}


def _read_rate(figure: object) -> float | None:
    """Read a figure's rate; None if it is none, which the profile's check tells."""
    try:
        return parse_rate(figure["value"] if isinstance(figure, dict) else figure)  # type: ignore[arg-type]
    except (InputError, KeyError):
        return None

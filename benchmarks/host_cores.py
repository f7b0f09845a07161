"""Time products by the host's cores beside plain reads of the same bytes, and print JSON.

    python -m benchmarks.host_cores [--threads N] [--instructions avx2] [--form fp8 ...] [--mib 192]
                                    [--area-mib 2048] [--columns 2880 --inner 2880]
                                    [--orders of_processor one_by_one beside apart]

Each sample lies between two reads of as many bytes by the same threads, and its ratio is to their
mean: 1 is what the memory gives. Each call has other bytes, of ``--area-mib`` that no cache holds:
an Intel host with 300 MB of cache read 256 MiB again and again at 290 GB/s, and 2 GiB at 144.
Samples whose two reads differ by more than 15 % are left out. One thread is timed by its own clock,
which stands while others have the core. A matrix of ``--mib`` is multiplied by 1, 2, 4 and 8 rows;
eight experts of one token are sent through gate and up, SiLU and down as one region; so are 8
tokens of two experts each that share eight. ``--orders`` times products of one row in each of these
orders of a matrix's rows, and nothing else. No GPU is needed.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable

import torch

from offplan.forms.form import RAW, Component, Form, Kind, WordOrder
from offplan.hostcores.library import Activation, Experts, InstructionSet, Matrix, RowOrder, Team
from offplan.hostmem.block import HostBlock
from offplan.runtime.forms.packing import pack
from offplan.runtime.forms.reference import Components
from offplan.runtime.host_cores import cores

ROUNDS = 15
MOST_S = 4.0
ROWS = (1, 2, 4, 8)
INT4 = Form(Kind.W4A16, (1, 128), WordOrder.COMPRESSED_TENSORS)
INT8 = Form(Kind.W8A16, (1, 128), WordOrder.COMPRESSED_TENSORS)
FORMS = {
    "bf16": RAW,
    "fp8": Form(Kind.FP8_BLOCK, (128, 128)),
    "mxfp4": Form(Kind.MXFP4, (1, 32)),
    "nvfp4": Form(Kind.NVFP4, (1, 16)),
    "int4": INT4,
    "int8": INT8,
    "packed": Form(Kind.PACKED),
}
BYTES_OF_WEIGHT = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0, "packed": 1.5}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--instructions", choices=["avx2", "avx512"])
    parser.add_argument("--form", nargs="*", choices=list(FORMS), default=list(FORMS))
    parser.add_argument("--mib", type=int, default=192)
    parser.add_argument("--area-mib", type=int, default=2048)
    parser.add_argument("--columns", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=1024)
    orders = [order.name.lower() for order in RowOrder]
    parser.add_argument("--orders", nargs="*", choices=orders, default=[])
    options = parser.parse_args()
    torch.manual_seed(0)
    library = cores.load()
    wanted = InstructionSet[options.instructions.upper()] if options.instructions else None
    team = library.team_of_caller(options.threads)
    bench = Bench(
        team, library.kernels(wanted), options.area_mib << 20, (options.columns, options.inner)
    )
    bench.orders = [RowOrder[order.upper()] for order in options.orders]
    chosen = library.instruction_sets[-1] if wanted is None else wanted
    facts = {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": options.threads,
        "instructions": chosen.name.lower(),
        "torch": torch.__version__,
        "mib": options.mib,
        "columns": options.columns,
        "inner": options.inner,
    }
    made = {name: bench.time_form(name, options.mib << 20) for name in options.form}
    print(
        json.dumps(
            {
                **facts,
                "read_gb_per_s": round(statistics.median(bench.reads) / 1e9, 2),
                "forms": made,
            },
            indent=2,
        )
    )


class Bench:
    """Times what a team does between two plain reads."""

    def __init__(self, team: Team, kernels: int, area_bytes: int, sizes: tuple[int, int]) -> None:
        self._team, self._kernels, self._area_bytes = team, kernels, area_bytes
        self._columns, self._inner = sizes
        self.orders: list[RowOrder] = []
        self._clock = time.thread_time if team.num_threads == 1 else time.perf_counter
        self._area, self._at = own(torch.ones(area_bytes, dtype=torch.uint8)), 0
        self.reads: list[float] = []

    def time_form(self, name: str, num_bytes: int) -> dict[str, object]:
        """Time the products of a form; returns what is printed of them."""
        rows = int(num_bytes / BYTES_OF_WEIGHT.get(name, 0.5) / self._columns) // 64 * 64
        one = make_parts(name, (rows, self._columns))
        taken = sum(value.nbytes for part, value in one.items() if part is not Component.PATCHES)
        parts = [one, *(map_parts(own, one) for _ in range(self._area_bytes // taken - 1))]
        weights = itertools.cycle([cores.describe(FORMS[name], each) for each in parts])
        made: dict[str, object] = {}
        for num in ROWS[:1] if self.orders else ROWS:
            x = torch.randn(num, self._columns).to(torch.bfloat16)

            def run(x: torch.Tensor = x) -> object:
                return cores.multiply(self._team, self._kernels, next(weights), x)

            made[f"{num} rows"] = self._time_orders(run, taken)
        made |= self._time_experts(name)
        return made

    def _time_experts(self, name: str) -> dict[str, object]:
        columns, inner = self._columns, self._inner
        one = round(3 * inner * columns * BYTES_OF_WEIGHT.get(name, 0.5))
        num_experts = max(16, self._area_bytes // one // 8 * 8)
        up_parts = make_parts(name, (num_experts, 2 * inner, columns))
        down_parts = make_parts(name, (num_experts, columns, inner))
        up, down = (cores.describe(FORMS[name], each) for each in (up_parts, down_parts))
        experts = describe(up, down, num_experts)
        whole = sum(
            value.nbytes
            for each in (up_parts, down_parts)
            for part, value in each.items()
            if part is not Component.PATCHES
        )
        made: dict[str, object] = {}
        for tokens, chosen in ((1, 8), (8, 2))[: 1 if self.orders else 2]:
            x = torch.randn(tokens, columns).to(torch.bfloat16)
            turn = 0

            def run(x: torch.Tensor = x, tokens: int = tokens, chosen: int = chosen) -> object:
                nonlocal turn
                own = (turn * 8 + torch.arange(tokens * chosen) % 8) % num_experts
                turn += 1  # others each time, which no cache has
                factors = torch.full((tokens, chosen), 0.25)
                return cores.send(
                    self._team, self._kernels, experts, x, own.view(tokens, chosen), factors
                )

            key = "8 experts of 1 row" if tokens == 1 else "8 experts of 2 rows each"
            made[key] = self._time_orders(run, whole * 8 // num_experts)
        return made

    def _time_orders(self, run: Callable[[], object], taken: int) -> dict[str, object]:
        """Time ``run`` in each order of rows that was asked for, twice in turn; or as it is."""
        if not self.orders:
            return self._time(run, taken)
        made: dict[str, object] = {}
        for turn, order in itertools.product((1, 2), self.orders):
            cores.load().take_rows(order)
            made[f"{order.name.lower()}, {turn}"] = self._time(run, taken)
        cores.load().take_rows(RowOrder.OF_PROCESSOR)
        return made

    def _time(self, run: Callable[[], object], taken: int) -> dict[str, object]:
        """Time ``run``, which reads so many bytes, between plain reads."""
        run()
        seen: list[tuple[float, float, float]] = []
        ends = time.perf_counter() + MOST_S
        while time.perf_counter() < ends and sum(map(is_calm, seen)) < ROUNDS:
            before = self._read(taken)
            start = self._clock()
            run()
            rate = taken / (self._clock() - start)
            seen.append((rate, before, self._read(taken)))
        calm = [each for each in seen if is_calm(each)] or seen
        ratios = sorted(2 * rate / (before + after) for rate, before, after in calm)
        return {
            "ratio": round(statistics.median(ratios), 3),
            "quarters": [round(ratios[len(ratios) * part // 4], 3) for part in (1, 3)],
            "gb_per_s": round(statistics.median(rate for rate, _, _ in calm) / 1e9, 2),
            "calm_samples": len(calm),
            "samples": len(seen),
        }

    def _read(self, num_bytes: int) -> float:
        """Return the bytes per second of a plain read."""
        num_bytes = min(self._area.nbytes, max(num_bytes, 32 << 20))
        self._at += num_bytes
        if self._at + num_bytes > self._area.nbytes:
            self._at = 0
        start = self._clock()
        self._team.read(self._area.data_ptr() + self._at // 64 * 64, num_bytes)
        rate = num_bytes / (self._clock() - start)
        self.reads.append(rate)
        return rate


def is_calm(sample: tuple[float, float, float]) -> bool:
    """Whether nothing else seems to have run meanwhile: the reads before and after agree."""
    return min(sample[1:]) > 0.85 * max(sample[1:])


def describe(up: Matrix, down: Matrix, num_experts: int) -> Experts:
    made = Experts(up=up, down=down, num_experts=num_experts, is_gated=1)
    made.activation, made.alpha, made.limit = Activation.SILU, 1.0, float("inf")
    return made


def map_parts(change: Callable[[torch.Tensor], torch.Tensor], parts: Components) -> Components:
    return {part: change(value) for part, value in parts.items()}


def own(value: torch.Tensor) -> torch.Tensor:
    """Copy into memory as slabs have it, contiguous and of ordinary pages."""
    block = HostBlock(value.nbytes, pin=False, remedy="a smaller --mib")
    return block.tensor.view(value.dtype).view(value.shape).copy_(value)


def make_parts(name: str, shape: tuple[int, ...]) -> Components:
    """Make random parts of [..., out, in]: one matrix of 64 rows, again and again."""
    *stack, num_out, num_in = shape
    form, rows = FORMS[name], 64
    repeats = num_out // rows
    if name == "packed":
        values = torch.randn(rows, num_in).to(torch.bfloat16) * 0.02
        parts = pack(values)
        used = int(parts[Component.PATCH_BLOCKS].max())
        assert used <= 64
        blocks = torch.zeros(repeats, 2, dtype=torch.int32)
        parts[Component.PATCHES], parts[Component.PATCH_BLOCKS] = (
            parts[Component.PATCHES][:1],
            blocks,
        )
        tall = {part: value for part, value in parts.items() if "PATCH" not in part.name}
        tall = {p: value.repeat(repeats, 1) for p, value in tall.items()} | {
            part: parts[part] for part in (Component.PATCHES, Component.PATCH_BLOCKS)
        }
    else:
        tall = {part: value.repeat(repeats, 1) for part, value in _rows(form, num_in).items()}
        if form.kind is Kind.FP8_BLOCK:
            tall[Component.SCALE] = torch.rand(-(-num_out // 128), -(-num_in // 128))
        if form.kind is Kind.NVFP4:
            tall[Component.GLOBAL_SCALE] = torch.ones(1, 1)
    if stack:
        tall = {p: value.expand(*stack, *value.shape) for p, value in tall.items()}
    return map_parts(own, tall)


def _rows(form: Form, num_in: int) -> Components:
    def words(num: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31, (64, num), dtype=torch.int32)

    if form is RAW:
        return {Component.WEIGHT: (torch.randn(64, num_in) * 0.02).to(torch.bfloat16)}
    if form.kind is Kind.FP8_BLOCK:
        return {Component.WEIGHT: torch.randn(64, num_in).to(torch.float8_e4m3fn)}
    if form.kind in (Kind.W4A16, Kind.W8A16):
        per = 8 if form.kind is Kind.W4A16 else 4
        scales = torch.rand(64, num_in // 128).to(torch.bfloat16)
        return {Component.WEIGHT: words(num_in // per), Component.SCALE: scales}
    codes = words(num_in // 8).view(torch.uint8)
    if form.kind is Kind.MXFP4:
        scales = torch.randint(117, 124, (64, num_in // 32), dtype=torch.uint8)
        return {Component.WEIGHT: codes, Component.SCALE: scales}
    return {
        Component.WEIGHT: codes,
        Component.SCALE: torch.rand(64, num_in // 16).to(torch.float8_e4m3fn),
    }


if __name__ == "__main__":
    main()

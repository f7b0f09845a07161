"""What measuring makes of its timings; the clock is a script here."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from offplan.errors import MemoryLimitError, OffplanError
from offplan.library.machines import measure_here
from offplan.machine import measure, measure_host, measure_link
from offplan.machine.measure_time import Timing, summarise
from offplan.machine.profile import MachineProfile, load_profile
from offplan.plan import Goal

MIB = 2**20
Work = Callable[[], object]


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks of ordinary memory stand in for pinned and for device memory."""

    def on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *args, device=None, **options: make(*args, **options)

    for name in ("empty", "zeros", "arange"):
        monkeypatch.setattr(torch, name, on_cpu(getattr(torch, name)))
    monkeypatch.setattr(measure_link, "CURVE_BYTES", (4096, MIB, 2 * MIB))
    monkeypatch.setattr(measure_link, "REREAD_BYTES", MIB)
    monkeypatch.setattr(measure_link, "PINNED_BYTES", 2 * MIB)
    memory = lambda size: nullcontext(torch.zeros(size, dtype=torch.uint8))  # noqa: E731
    monkeypatch.setattr(measure_link, "pinned", memory)
    monkeypatch.setattr(measure_link, "view_in_place", lambda block, device: block)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def with_keys(figures: dict[str, object]) -> MachineProfile:
    known = load_profile("h200-pcie5").model_dump()
    return MachineProfile.model_validate(known | figures)


def test_samples_are_reduced_to_median_and_spread() -> None:
    assert summarise([1.0, 1.1, 0.9, 4.0, 1.0]) == Timing(1.0, 3.1, 5)


def test_dma_is_the_rate_of_the_largest_copy_and_a_fitted_latency(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = iter((4096, MIB, 2 * MIB) * 2)

    def time_work(work: Work, repeats: int, *, queued: bool) -> Timing:
        work()
        assert queued
        size = next(sizes)
        assert repeats == {4096: 50, MIB: 50, 2 * MIB: 32}[size]
        return Timing(size / 1e9 + (0.0 if size == 2 * MIB else 5e-6), 0.01)

    monkeypatch.setattr(measure_link, "time_work", time_work)
    profile = with_keys(measure_link.measure_pinned())
    assert profile.h2d.value == pytest.approx(1e9)
    assert (profile.h2d.samples, profile.h2d.spread) == (7, 0.01)
    assert 0 < profile.copy_latency.value < 5e-6
    assert profile.h2d_curve is not None
    assert [point.bytes for point in profile.h2d_curve.value] == [4096, MIB, 2 * MIB]
    assert profile.d2h_curve is not None


@pytest.mark.parametrize(("slower", "rate"), [(2, 0.5e9), (0.9, 1e9)])
def test_in_place_nothing_comes_faster_than_once_and_alone(
    monkeypatch: pytest.MonkeyPatch, slower: float, rate: float
) -> None:
    once = 2 * MIB / 1e9
    beside = Timing(once * slower, 0)
    monkeypatch.setattr(measure_link, "_time_beside_copies", lambda *tensors: beside)
    # the products read half of the block: 0.8, 1, 2, 1.9, 5 and 17 times
    seconds = iter([once, *(once / 2 * times for times in (0.8, 1, 2, 1.9, 5, 17))])
    taken = lambda work: (work(), Timing(next(seconds), 0))[1]  # noqa: E731
    monkeypatch.setattr(measure_link, "time_work", taken)
    profile = with_keys(measure_link.measure_in_place())
    assert profile.uva.value == pytest.approx(1e9)
    assert profile.uva_beside_copies is not None
    assert profile.uva_beside_copies.value == pytest.approx(rate)
    assert profile.uva_rereads is not None
    points = [(point.rows, point.factor) for point in profile.uva_rereads.value]
    factors = (1, 1, 2, 2, 5, 17)
    assert points == [
        (rows, pytest.approx(factor))
        for rows, factor in zip((1, 128, 256, 512, 1024, 4096), factors, strict=True)
    ]


def test_products_read_their_own_shapes_and_never_less_for_more_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dense, experts = (8, 64), (2**12, 16, 32)
    products = [(dense, 256), (dense, 512), (experts, 512)]
    made: list[tuple[int, ...]] = []
    seconds = iter((2.2 * 1024 / 1e9, 1.9 * 1024 / 1e9, 0.7 * 2**21 / 1e9))

    def time_work(work: Callable[[], torch.Tensor]) -> Timing:
        made.append(tuple(work().shape))
        return Timing(next(seconds), 0)

    monkeypatch.setattr(measure_link, "time_work", time_work)
    reads = measure_link.measure_in_place_reads(
        products, 8, 1e9, multiply_experts=lambda values, rows, starts: rows @ values[0].mT
    )
    assert [(read.shape, read.tokens) for read in reads] == products
    assert [read.factor for read in reads] == [pytest.approx(2.2), pytest.approx(2.2), 1]
    # half of the experts fit the block, with one pair each of 8 x 512 pairs for all
    assert made == [(256, 8), (512, 8), (2**11, 16)]


def test_other_gpus_that_are_not_there_or_taken_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def taken(_: object) -> None:
        raise RuntimeError("CUDA-capable device(s) is/are busy or unavailable")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda other, this: True)
    monkeypatch.setattr(measure_link, "_copy_together", taken)
    monkeypatch.setattr(measure_link, "_copy_from", taken)
    for count in (1, 2):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert measure_link.measure_concurrent() == {}
        assert measure_link.measure_peer() == {}


def test_each_gpu_has_its_rate_beside_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    share = measure_link._SHARE_BYTES
    samples = [[share / 50e9, share / 25e9]] * 6 + [[share / 50e9, share / 20e9]]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(measure_link, "_copy_together", lambda devices: samples)
    concurrent = with_keys(measure_link.measure_concurrent()).h2d_concurrent
    assert concurrent is not None
    assert [each.rate for each in concurrent.value] == [pytest.approx(r) for r in (50e9, 25e9)]
    assert [each.spread for each in concurrent.value] == [0, 0.25]
    assert [each.num_gpus for each in concurrent.value] == [2, 2]


@pytest.mark.parametrize(
    ("num_gpus", "together"), [(1, []), (2, [2]), (4, [2, 4]), (6, [2, 4, 6]), (8, [2, 4, 8])]
)
def test_so_many_gpus_copy_at_once_as_plans_may_be_for(
    num_gpus: int, together: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On this host two have the link to themselves, and all beyond share one."""
    share = measure_link._SHARE_BYTES

    def copy_together(devices: list[torch.device]) -> list[list[float]]:
        slowed = max(1, len(devices) / 2)
        return [[slowed * share / 50e9 for _ in devices]] * 3

    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(measure_link, "_copy_together", copy_together)
    found = measure_link.measure_concurrent()
    if not together:
        assert found == {}
        return
    machine = with_keys(found)
    assert sorted(machine.concurrent_rates) == together
    assert machine.h2d_concurrent is not None
    devices = [(each.num_gpus, each.device) for each in machine.h2d_concurrent.value]
    assert devices == [(number, device) for number in together for device in range(number)]
    for number in together:
        shared = machine.with_gpus(Goal(engine="vllm", tensor_parallel=number)).h2d.value
        assert shared == pytest.approx(min(machine.h2d.value, 100e9 / number))


def test_gpus_that_are_taken_leave_those_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy_together(devices: list[torch.device]) -> list[list[float]]:
        if len(devices) > 2:
            raise RuntimeError("CUDA-capable device(s) is/are busy or unavailable")
        return [[0.1, 0.1]] * 3

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(measure_link, "_copy_together", copy_together)
    assert [*with_keys(measure_link.measure_concurrent()).concurrent_rates] == [2]


def test_a_driver_that_refuses_to_pin_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        def cudaHostRegister(self, *_: int) -> int:
            return 2

    monkeypatch.setattr(torch.cuda, "cudart", Driver)
    with (
        pytest.raises(MemoryLimitError, match=r"page-lock 4 KiB .*CUDA error 2.*ulimit -l"),
        measure_host.pinned(4096),
    ):
        pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_nothing_is_measured_without_a_device() -> None:
    with pytest.raises(OffplanError, match="no CUDA device to measure"):
        measure_here()


@pytest.mark.parametrize(
    ("held", "others", "counted"),
    [(0, 0, 0), (2, 2, 0), (2, 1, 1), (2, 4, 2)],
    ids=["nobody else", "others", "more of them", "fewer"],
)
def test_what_others_hold_is_no_overhead(
    held: int, others: int, counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All counts if that of others would leave no room for a context."""
    gib = 2**30
    own, total = gib // 2, 24 * gib
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (total - own - held * gib, total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    overhead: Any = measure._measure_memory(others * gib)["gpu_overhead"]
    assert overhead["value"] == own + counted * gib + measure.LIBRARY_BYTES

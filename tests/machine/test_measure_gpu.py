"""The machine as it is: plausible, complete, and as free afterwards as before."""

import functools

import pytest
import torch

from offplan.machine.curve import FIT_FROM_BYTES
from offplan.machine.measure import measure_machine
from offplan.machine.measure_link import count_together
from offplan.machine.profile import MachineProfile, dump_profile, parse_profile
from offplan.plan import Goal
from offplan.upkeep.local_gpu import find_local_gpu

pytestmark = pytest.mark.gpu

OF_ONE_GPU = ("h2d", "uva", "uva_beside_copies", "hbm", "matmul", "layer_overhead", "pinning")
TABLES = ("h2d_curve", "h2d_pageable_curve", "d2h_curve", "uva_rereads")


@functools.cache
def measured() -> MachineProfile:
    return measure_machine(with_others=True)


def test_every_figure_is_there_with_its_samples() -> None:
    profile = measured()
    for name in (*OF_ONE_GPU, *TABLES):
        figure = getattr(profile, name)
        assert figure.samples > 1
        assert name in TABLES or figure.spread >= 0
    assert profile.basis == "measured"
    assert parse_profile(dump_profile(profile), "a copy") == profile


def test_rates_are_plausible() -> None:
    profile = measured()
    assert 1e9 < profile.uva.value < 1.1 * profile.h2d.value < 500e9
    assert profile.uva_beside_copies is not None
    assert 0.5 * profile.uva.value < profile.uva_beside_copies.value <= profile.uva.value
    assert profile.h2d.value < profile.hbm.value < 20e12
    assert 1e12 < profile.matmul.value < 5e15
    assert 0 <= profile.copy_latency.value < 1e-3
    assert profile.host_memory is not None
    assert profile.pinning is not None
    assert profile.pinning.value > 1e8


def test_larger_copies_are_faster_and_the_line_is_near() -> None:
    profile = measured()
    assert profile.h2d_curve is not None
    curve = profile.h2d_curve.value
    assert curve[0].rate < curve[len(curve) // 2].rate < 1.1 * curve[-1].rate
    for point in curve:
        if point.bytes >= FIT_FROM_BYTES:
            assert profile.copy_seconds(point.bytes) == pytest.approx(point.seconds, rel=0.25)


def test_products_of_many_rows_read_again() -> None:
    table = measured().uva_rereads
    assert table is not None
    assert table.value[0].factor < 1.5
    assert table.value[-1].factor > table.value[0].factor


def test_what_is_measured_is_given_back() -> None:
    measured()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    measure_machine()
    assert torch.cuda.memory_reserved() == before


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second CUDA device")
def test_other_gpus_are_measured() -> None:
    profile = measured()
    assert profile.h2d_concurrent is not None
    rates, count = profile.h2d_concurrent.value, torch.cuda.device_count()
    assert sorted(profile.concurrent_rates) == count_together(count)
    for number in count_together(count):
        assert [each.device for each in rates if each.num_gpus == number] == list(range(number))
    # with the others copying a GPU has its own link at most
    assert all(1e9 < each.rate < 1.1 * profile.h2d.value for each in rates)
    assert all(each.spread is not None for each in rates)
    this = torch.cuda.current_device()
    if any(torch.cuda.can_device_access_peer(other, this) for other in range(count) if other):
        assert profile.peer is not None
        assert profile.peer_latency is not None
        assert profile.peer.value > 1e9


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second CUDA device")
def test_plans_of_ranks_have_the_link_that_was_measured() -> None:
    profile = measured()
    assert 2 in profile.concurrent_rates
    slowest = min(profile.concurrent_rates[2])
    shared = profile.with_gpus(Goal(engine="vllm", tensor_parallel=2))
    assert shared.h2d.value == pytest.approx(min(slowest, profile.h2d.value))
    assert shared.uva.value <= profile.uva.value


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second CUDA device")
def test_the_current_device_is_the_one_measured() -> None:
    with torch.cuda.device(1):
        torch.cuda.reset_peak_memory_stats(0)
        torch.cuda.reset_peak_memory_stats(1)
        idle = torch.cuda.memory_allocated(0)
        measure_machine()
    assert torch.cuda.max_memory_allocated(0) == idle
    assert torch.cuda.max_memory_allocated(1) > 2**28


def test_the_local_gpu_is_the_one_that_is_measured() -> None:
    gpu = find_local_gpu()
    assert gpu is not None
    node = measured().numa_node
    assert (gpu.name, gpu.total_bytes) == (measured().name, measured().gpu_memory.value)
    assert gpu.numa_node == (None if node is None else node.value)
    assert 0 < gpu.free_bytes <= gpu.total_bytes
    assert gpu.num_gpus == torch.cuda.device_count()

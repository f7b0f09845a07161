"""Rates of a profile are what kernels achieve, whatever a datasheet says."""

import pytest

from offplan.machine.assumed import ACHIEVED_SHARES
from offplan.machine.cards import shipped_profiles
from offplan.machine.profile import (
    VECTOR_SHARE,
    dump_profile,
    load_profile,
    parse_profile,
)

MINE = "{{name: {name}, link: PCIe 4 x16, hbm: {hbm}, matmul: 60 TFLOP/s, gpu_memory: 24 GiB}}"
PEAK = "{value: 1 TB/s, basis: datasheet, source: a leaflet}"


@pytest.mark.parametrize(("given", "achieved"), [("1 TB/s", 1.0), (PEAK, ACHIEVED_SHARES["hbm"])])
def test_a_datasheet_gives_peaks_and_others_what_is_achieved(given: str, achieved: float) -> None:
    profile = parse_profile(MINE.format(name="mine", hbm=given), "mine.yaml")
    assert profile.hbm.value == pytest.approx(achieved * 1e12)
    assert profile.matmul.value == 60e12
    again = parse_profile(dump_profile(profile), "again.yaml")
    assert again.hbm.value == profile.hbm.value
    assert again.hbm.basis == ("reported" if achieved == 1 else "estimated")


def test_geforce_cards_are_not_halved_twice() -> None:
    assert load_profile("rtx4090-pcie4").matmul.value == 165e12
    assert load_profile("h100-pcie5").matmul.value == pytest.approx(0.69 * 989e12)
    assert load_profile("h200-pcie5").matmul.value == 680e12


@pytest.mark.parametrize("name", [name for name in shipped_profiles() if name != "cpu"])
def test_every_gpu_has_the_rate_of_its_cores(name: str) -> None:
    profile = load_profile(name)
    assert profile.vector is not None
    assert 1 / 75 < profile.vector.value / profile.matmul.value < 1 / 2


def test_cores_of_a_measured_gpu_are_those_of_its_name() -> None:
    known, other = (
        parse_profile(MINE.format(name=name, hbm="1 TB/s"), "mine.yaml")
        for name in ("NVIDIA GeForce RTX 3090", "some other")
    )
    shipped = load_profile("rtx3090-pcie4").vector
    assert shipped is not None
    assert known.vector is None
    assert known.vector_rate == shipped.value
    assert other.vector_rate == VECTOR_SHARE * 60e12


@pytest.mark.parametrize("name", ["rtx2060", "rtx2060-12gb", "rtx3050", "rtx3050-6gb"])
def test_cards_of_one_name_are_told_apart_by_memory(name: str) -> None:
    shipped = load_profile(name)
    assert shipped.model_copy(update={"vector": None}).vector_rate == shipped.vector.value

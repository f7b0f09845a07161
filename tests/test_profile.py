"""Machine profiles: shipped, read, refused."""

from pathlib import Path

import pytest
import yaml

from offplan.errors import ProfileError
from offplan.machine.profile import (
    LayerTime,
    dump_profile,
    load_profile,
    parse_profile,
    shipped_profiles,
)
from tests.costs.builders import make_machine

SHIPPED = ("a100-pcie4", "cpu", "gh200-c2c", "h200-pcie5", "rtx4090-pcie4")
TIME = LayerTime(layer="x", phase="decode", batch=1, tokens=1, context=64, seconds=0.5)


def test_shipped_profiles_are_listed() -> None:
    assert shipped_profiles() == sorted(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_profiles_are_plausible(name: str) -> None:
    profile = load_profile(name)
    assert profile.uva.value <= profile.h2d.value <= profile.hbm.value
    assert profile.layer_times == ()
    for figure in (profile.h2d, profile.uva, profile.hbm, profile.matmul, profile.gpu_memory):
        assert len(figure.source) > 10


@pytest.mark.parametrize("name", SHIPPED)
def test_dump_reads_back(name: str) -> None:
    profile = load_profile(name).model_copy(update={"layer_times": (TIME,)})
    again = parse_profile(dump_profile(profile), "copy")
    assert again == profile
    assert again.fingerprint == profile.fingerprint != load_profile(name).fingerprint


def test_basis_is_the_weakest_of_the_link() -> None:
    assert load_profile("h200-pcie5").basis == "measured"
    assert load_profile("rtx4090-pcie4").basis == "reported"
    assert load_profile("cpu").basis == "estimated"


def test_copies_cost_latency_and_rate() -> None:
    profile = load_profile("h200-pcie5")
    assert profile.copy_seconds(0) == pytest.approx(5.4e-6)
    # the measured curve: 4 MiB at 53.8 GB/s, 64 MiB at 55.4
    assert 2**22 / profile.copy_seconds(2**22) == pytest.approx(53.8e9, rel=0.05)
    assert 2**26 / profile.copy_seconds(2**26) == pytest.approx(55.4e9, rel=0.01)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("name:", "nome:"), "name"),
        (("55.4 GB/s", "fast"), "h2d.value"),
        (("55.4 GB/s", "0 GB/s"), "h2d.value"),
        (("basis: measured", "basis: guessed"), "basis"),
        (("profile: 1", "profile: 2"), "profile"),
        (("link: PCIe 5 x16", "link: [PCIe"), "not YAML"),
        (("link: PCIe 5 x16", "link: PCIe 5 x16\nlink: PCIe 4 x16"), "'link' is given twice"),
    ],
)
def test_wrong_profiles_are_refused(change: tuple[str, str], message: str) -> None:
    text = dump_profile(load_profile("h200-pcie5"))
    text = text.replace("55400000000.0", "55.4 GB/s")
    assert change[0] in text
    with pytest.raises(ProfileError, match=message):
        parse_profile(text.replace(*change, 1), "a profile")


def test_a_file_that_is_far_too_long_is_no_profile(tmp_path: Path) -> None:
    path = tmp_path / "machine.yaml"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ProfileError, match="is no machine profile: it is longer than 1 MiB"):
        load_profile(str(path))


def test_unknown_name_lists_the_shipped_ones() -> None:
    with pytest.raises(ProfileError, match="cpu, gh200-c2c"):
        load_profile("no-such-machine")


def test_a_second_gpu_as_the_store() -> None:
    machine = make_machine(peer=20e9, gpu_memory=2**30)
    peer = machine.with_peer_store()
    assert (machine.store, peer.store) == ("host", "peer")
    assert peer.copy_seconds(20) == pytest.approx(1e-6 + 1e-9)
    assert peer.host_memory == machine.gpu_memory
    context = machine.gpu_overhead.model_copy(update={"value": 2**20})
    beside = machine.model_copy(update={"gpu_overhead": context}).with_peer_store()
    assert beside.host_memory is not None
    assert beside.host_memory.value == 2**30 - 2**20
    assert peer.fingerprint != machine.fingerprint
    with_latency = machine.model_copy(update={"peer_latency": machine.layer_overhead})
    assert with_latency.with_peer_store().copy_latency.value == 2e-6
    with pytest.raises(ProfileError, match=r"test machine has no `peer`.* plan with --store host"):
        make_machine().with_peer_store()


@pytest.mark.parametrize("value", ["5e-324", "1e-300", "0", "1e300", ".inf", ".nan", "999 B/s"])
@pytest.mark.parametrize("figure", ["h2d", "uva", "hbm", "matmul"])
def test_rates_past_any_machine_are_refused(figure: str, value: str) -> None:
    refuse(figure, value)


@pytest.mark.parametrize(
    ("figure", "value"),
    [
        ("gpu_memory", "0 B"),
        ("gpu_memory", "-1"),
        ("copy_latency", "61 s"),
        ("layer_overhead", "1e18"),
    ],
)
def test_figures_past_any_machine_are_refused(figure: str, value: str) -> None:
    refuse(figure, value)


def refuse(figure: str, value: str) -> None:
    profile = yaml.safe_load(dump_profile(load_profile("cpu")))
    profile[figure]["value"] = yaml.safe_load(value)
    with pytest.raises(ProfileError, match=f"a profile: {figure}.value: "):
        parse_profile(yaml.safe_dump(profile), "a profile")

"""Machine profiles: shipped, read, refused."""

import re
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from offplan.errors import ProfileError
from offplan.machine.assumed import parse_link, rate_of_memory
from offplan.machine.cards import SHIPPED as FOLDER
from offplan.machine.cards import shipped_profiles
from offplan.machine.name import find_enough_ram, parse_name
from offplan.machine.profile import (
    LayerTime,
    MachineProfile,
    dump_profile,
    load_profile,
    parse_profile,
    profile_schema,
)
from offplan.plan import Goal
from offplan.records import load_yaml
from offplan.units import parse_rate
from tests.costs.builders import make_machine

SHIPPED = shipped_profiles()
SCHEMA = Draft202012Validator(profile_schema())
TIME = LayerTime(layer="x", phase="decode", batch=1, tokens=1, context=64, seconds=0.5)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_profiles_are_plausible(name: str) -> None:
    profile = load_profile(name)
    assert profile.uva.value <= profile.h2d.value <= profile.hbm.value
    assert profile.layer_times == ()
    for figure in (profile.h2d, profile.uva, profile.hbm, profile.matmul, profile.gpu_memory):
        assert len(figure.source) > 10


@pytest.mark.parametrize("name", SHIPPED)
def test_dump_reads_back(name: str) -> None:
    numeric = TIME.model_copy(update={"layer": "589e57806582"})
    profile = load_profile(name).model_copy(update={"layer_times": (TIME, numeric)})
    text = dump_profile(profile)
    again = parse_profile(text, "copy")
    SCHEMA.validate(load_yaml(text))
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


@pytest.mark.parametrize("name", SHIPPED)
def test_the_schema_takes_shipped_profiles(name: str) -> None:
    SCHEMA.validate(load_yaml((FOLDER / f"{name}.yaml").read_text("utf-8")))


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("rtx4090", "rtx4090-pcie4"),
        ("RTX 4090", "rtx4090-pcie4"),
        ("NVIDIA GeForce RTX 4090", "rtx4090-pcie4"),
        ("4090", "rtx4090-pcie4"),
        ("RTX 4090 Laptop GPU", "rtx4090-laptop-pcie4"),
        ("4060ti 16gb", "rtx4060ti-16gb-pcie4"),
        ("a6000", "rtxa6000-pcie4"),
        ("H200,ram=1TiB", "h200-pcie5,ram=1TiB"),
        ("cpu", "cpu"),
    ],
)
def test_names_are_typed_loosely(typed: str, name: str) -> None:
    assert str(parse_name(typed)) == name


def test_loose_names_are_of_one_profile() -> None:
    geforce = [name for name in SHIPPED if "GeForce" in load_profile(name).name]
    assert len(geforce) > 20
    whole = {load_profile(name).name: name for name in geforce if "-16gb" not in name}
    assert {name: str(parse_name(name)) for name in whole} == whole
    assert {str(parse_name(name.rpartition("-")[0] or name)) for name in SHIPPED} == set(SHIPPED)


@pytest.mark.parametrize(("typed", "near"), [("rtx4099", "rtx4090-pcie4"), ("b2000", "b200-pcie5")])
def test_unknown_names_have_suggestions(typed: str, near: str) -> None:
    with pytest.raises(ProfileError, match=f"`offplan machines` lists; is .*{near}.* meant"):
        load_profile(typed)


@pytest.mark.parametrize(
    ("change", "rate", "source"),
    [
        ("ddr=5-6000x2", 64e9, "2 channels of DDR5-6000: 96 GB/s, of which cores read two thirds"),
        ("DDR=4-3200x1", 19.2e9, "1 channel of DDR4-3200"),
        ("ddr=4-3200x2", 38.4e9, "51.2 GB/s, of which cores read three quarters"),
        ("ddr=4-2666x8", 113.7e9, "170.6 GB/s, of which cores read two thirds"),
        ("ddr=5-4800x12", 307.2e9, "12 channels"),
        ("ddr=5-10667x8", 455.1e9, "8 channels of DDR5-10667"),
        ("cores=70GB/s", 70e9, "given with --machine"),
    ],
)
def test_the_cores_rate_is_given(change: str, rate: float, source: str) -> None:
    """Another rate leaves nothing of what was measured beside the profile's own."""
    for name in ("rtx4090", "h200-pcie5"):
        profile = load_profile(f"{name},{change}")
        assert profile.cores is not None
        assert profile.cores.value == pytest.approx(rate, rel=1e-3)
        assert source in profile.cores.source
        assert (profile.cores_beside_copies, profile.host_reads) == (None, None)
        assert profile.cores_rate_beside.value == profile.cores.value


@pytest.mark.parametrize("generation", ["3-800", "4-2666", "5-4800", "6-6400"])
def test_more_channels_and_more_transfers_are_faster(generation: str) -> None:
    number, transfers = map(int, generation.split("-"))
    for faster in (transfers, transfers + 1, 2 * transfers):
        rates = [_rate_of(f"{number}-{faster}x{channels}") for channels in range(1, 33)]
        slower = [_rate_of(f"{number}-{transfers}x{channels}") for channels in range(1, 33)]
        assert rates == sorted(rates)
        assert all(rate >= less for rate, less in zip(rates, slower, strict=True))


def _rate_of(memory: str) -> float:
    return parse_rate(rate_of_memory(memory)["value"])


def test_figures_are_changed_behind_the_name() -> None:
    usual, changed = load_profile("rtx4090"), load_profile("rtx4090,pcie=4x8,ram=64GiB")
    assert changed.link == "PCIe 4 x8"
    assert changed.h2d.value == pytest.approx(usual.h2d.value / 2, rel=0.01)
    assert (changed.uva.value, changed.uva.basis) == (11.45e9, "estimated")
    assert changed.host_memory is not None
    assert changed.host_memory.value == 2**36 - 2**36 // 10, "the system keeps a tenth"
    assert changed.hbm == usual.hbm
    assert changed.fingerprint != usual.fingerprint


def test_what_rested_on_a_changed_figure_is_gone(tmp_path: Path) -> None:
    measured = load_profile("h200").model_dump(mode="json", exclude_none=True)
    measured["h2d_curve"] = measured["h2d"] | {"value": [{"bytes": 2**26, "rate": 55.4e9}]}
    measured["layer_times"] = [TIME.model_dump(mode="json")]
    path = tmp_path / "machine.yaml"
    path.write_text(yaml.safe_dump(measured), "utf-8")
    assert load_profile(str(path)).h2d_curve is not None
    slower = load_profile(f"{path},h2d=12GB/s")
    assert (slower.h2d_curve, slower.layer_times) == (None, (TIME,))
    assert slower.uva.value == pytest.approx(0.92 * 12e9)
    assert load_profile(f"{path},matmul=300TFLOP/s").layer_times == ()


@pytest.mark.parametrize(
    ("changes", "lockable"),
    [
        ("ram=64GiB,os=linux", 57.6),
        ("ram=16GiB", 14),
        ("ram=2GiB", 1),
        ("ram=64GiB,os=wsl2", 28.8),
        ("os=WSL2,RAM=32GiB", 14),
        ("ram=64GiB,os=windows", 32),
        ("host_memory=64GiB", 64),
    ],
)
def test_what_of_the_memory_can_be_locked(changes: str, lockable: float) -> None:
    found = load_profile(f"rtx4090,{changes}").host_memory
    assert found is not None
    assert found.value == pytest.approx(lockable * 2**30, abs=1)


@pytest.mark.parametrize(
    ("source", "gib"),
    [
        ("given with --machine: 64GiB of memory, less what linux keeps", 48),
        ("given with --machine: 64GiB of memory, less what wsl2 keeps", 96),
        ("given with --machine: 64GiB of memory, less what windows keeps", 96),
        ("what can be pinned: physical memory, less what the operating system keeps, torch 2", 48),
        ("what can be pinned: ulimit -l, torch 2", None),
        ("given with --machine", None),
    ],
)
def test_the_memory_that_would_do(source: str, gib: int | None) -> None:
    assert find_enough_ram(source, 40 * 2**30) == (None if gib is None else gib * 2**30)
    assert find_enough_ram(source, 2**50) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("os=wsl2", "give the memory, too, as ram=64GiB"),
        *(
            (f"ddr={wrong}", "is no memory: write its generation")
            for wrong in ("5", "5-6000", "7-1x2", "5-6000x99999")
        ),
        *(
            (f"ddr={wrong}", f"ddr={wrong} is no memory: found {found}, expected {expected}")
            for wrong, found, expected in (
                ("5-6000x0", "6000 .* and 0 channels", ".* of DDR5 and 1 to 32 channels"),
                ("5-99999x99", "99999 .* and 99 channels", "3200 to 12800 of DDR5 and 1 to 32"),
                ("5-12801x2", "12801 .* and 2 channels", "3200 to 12800 of DDR5"),
                ("3-799x2", "799 .* and 2 channels", "800 to 3200 of DDR3"),
                ("4-3200x33", "3200 .* and 33 channels", "1333 to 5600 of DDR4 and 1 to 32"),
            )
        ),
        ("ddr=5-6000x2,cores=9GB/s", "cores is given twice"),
        ("ram=8GiB,os=dos", "found os=dos, expected linux, wsl2, windows"),
        ("ram=8", "host_memory.value: '8' has no unit: is 8GiB meant"),
        ("pcie=7x2", "pcie=7x2 is no link"),
        ("ram=1GiB,ram=2GiB", "host_memory is given twice"),
        ("hmb=1TB/s,h2d=fast", "h2d.value: 'fast' is not .*; hmb: there is no such key; is hbm"),
    ],
)
def test_wrong_changes_are_told_at_once(changes: str, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        load_profile(f"rtx4090,{changes}")


@pytest.mark.parametrize(
    "text",
    [
        "{base: RTX 4090, h2d: 12 GB/s, host_memory: 64 GiB}",
        "{name: X, link: PCIe 3 x16, hbm: 360 GB/s, matmul: 25 TFLOP/s, gpu_memory: 12 GiB}",
        "{name: X, h2d: 12 GB/s, hbm: 360 GB/s, matmul: 25 TFLOP/s, gpu_memory: 12 GiB}",
    ],
)
def test_a_file_may_give_only_what_it_knows(text: str) -> None:
    SCHEMA.validate(load_yaml(text))
    profile = parse_profile(text, "a profile")
    assert profile.h2d.value == pytest.approx(12e9, rel=0.05)
    assert profile.uva.value == pytest.approx(0.92 * profile.h2d.value, rel=0.001)
    assert profile.gpu_memory.basis in ("reported", "datasheet")


def test_the_profiles_of_the_page_are_read() -> None:
    page = (FOLDER.parents[2] / "docs" / "machines.md").read_text("utf-8")
    examples = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert len(examples) == 2
    for text in examples:
        SCHEMA.validate(load_yaml(text))
        parse_profile(text, "an example")


def test_the_schema_wants_what_cannot_be_assumed() -> None:
    assert not SCHEMA.is_valid({"name": "X", "link": "PCIe 4 x16"})
    assert not SCHEMA.is_valid({"base": "rtx4090", "h2d": "12"})
    with pytest.raises(ProfileError, match=r"hbm: it is missing; matmul: it is missing; gpu_m"):
        parse_profile("{name: X, link: PCIe 4 x16}", "a profile")


@pytest.mark.parametrize(
    ("figure", "message"),
    [
        ("h2d: 12", "h2d.value: '12' has no unit: is 12GB/s meant"),
        ("gpu_memory: 24", "gpu_memory.value: '24' has no unit: is 24GiB meant"),
        ("host_memory: '64'", "host_memory.value: '64' has no unit: is 64GiB meant"),
        ("h2d: [12]", "h2d: it should be a valid mapping"),
    ],
)
def test_a_figure_alone_has_its_unit(figure: str, message: str) -> None:
    text = f"{{base: rtx4090, {figure}}}"
    assert not SCHEMA.is_valid(load_yaml(text))
    with pytest.raises(ProfileError, match=message):
        parse_profile(text, "a profile")


@pytest.mark.parametrize("link", ["PCIe 3 x16", "pcie 3.0 x16", "PCIe Gen3 x16", "PCIe3x16"])
def test_links_are_typed_loosely(link: str) -> None:
    assert str(parse_link(link)) == "PCIe 3 x16"


def test_another_file_is_no_base() -> None:
    with pytest.raises(ProfileError, match=r"base: machine.yaml does not come with offplan"):
        parse_profile("base: machine.yaml", "a profile")


def test_a_second_gpu_as_the_store() -> None:
    machine = make_machine(peer=20e9, gpu_memory=2**30)
    peer = machine.with_store("peer")
    assert (machine.store, peer.store) == ("host", "peer")
    assert peer.copy_seconds(20) == pytest.approx(1e-6 + 1e-9)
    assert peer.host_memory == machine.gpu_memory
    context = machine.gpu_overhead.model_copy(update={"value": 2**20})
    beside = machine.model_copy(update={"gpu_overhead": context}).with_store("peer")
    assert beside.host_memory is not None
    assert beside.host_memory.value == 2**30 - 2**20
    assert peer.fingerprint != machine.fingerprint
    with_latency = machine.model_copy(update={"peer_latency": machine.layer_overhead})
    assert with_latency.with_store("peer").copy_latency.value == 2e-6
    with pytest.raises(ProfileError, match=r"test machine has no `peer`.* plan with `store=host`"):
        make_machine().with_store("peer")


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


def test_ranks_share_the_link_where_that_was_measured() -> None:
    alone = make_machine(h2d=50e9, uva=40e9)
    rates = [{"device": 0, "rate": 25e9}, {"device": 1, "rate": 20e9}]
    figure = {"value": rates, "basis": "measured", "source": "a test"}
    machine = MachineProfile.model_validate({**dict(alone), "h2d_concurrent": figure})
    assert machine.with_gpus(Goal(engine="vllm", tensor_parallel=1)) == machine
    assert link_of(alone.with_gpus(Goal(engine="vllm", tensor_parallel=2))) == link_of(alone)
    assert not machine.timed_layers  # kept once it was asked for
    assert [*machine.concurrent_rates] == [2]
    shared = machine.with_gpus(Goal(engine="vllm", tensor_parallel=2))
    assert link_of(shared) == (20e9, 16e9)
    assert link_of(machine.with_gpus(Goal(engine="vllm", tensor_parallel=4))) == link_of(machine)
    assert machine.with_gpus(Goal(engine="vllm", tensor_parallel=2, pipeline_parallel=2)) == shared
    # a token passes one stage after the other
    assert link_of(machine.with_gpus(Goal(engine="vllm", pipeline_parallel=2))) == link_of(machine)


def link_of(machine: MachineProfile) -> tuple[float, float]:
    return machine.h2d.value, machine.uva.value


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (4, 1)])
def test_several_gpus_have_what_they_exchange_through(sizes: tuple[int, int]) -> None:
    machine = load_profile("h200-pcie5")
    tensor, pipeline = sizes
    goal = Goal(engine="vllm", tensor_parallel=tensor, pipeline_parallel=pipeline)
    one, several = (machine.with_link("host", each) for each in (Goal(), goal))
    assert one.gpu_overhead == machine.gpu_overhead
    assert several.gpu_overhead.value == machine.gpu_overhead.value + (1152 << 20)
    assert several.gpu_overhead.source is not None
    assert "NCCL" in several.gpu_overhead.source
    known = {"value": "1 GiB", "basis": "measured", "source": "a test"}
    measured = MachineProfile.model_validate({**dict(machine), "ranks_overhead": known})
    given = measured.with_link("host", goal).gpu_overhead
    assert given.value == machine.gpu_overhead.value + 2**30


def test_gpus_have_the_link_of_as_many_that_copied_at_once() -> None:
    rates = [
        {"device": device, "rate": 80e9 / number, "num_gpus": number}
        for number in (2, 4, 8)
        for device in range(number)
    ]
    figure = {"value": rates, "basis": "measured", "source": "a test"}
    alone = make_machine(h2d=50e9, uva=40e9)
    machine = MachineProfile.model_validate({**dict(alone), "h2d_concurrent": figure})
    assert machine.with_gpus(Goal(engine="vllm", tensor_parallel=1)) == machine
    found = [
        machine.with_gpus(Goal(engine="vllm", tensor_parallel=number)).h2d.value
        for number in (2, 3, 4, 8)
    ]
    assert found == [40e9, 20e9, 20e9, 10e9]  # of three: no faster than four


def test_threads_that_are_left_out_read_in_proportion_less() -> None:
    figures = {"cores": "40 GB/s", "cores_beside_copies": "30 GB/s"}
    data = load_profile("rtx4090").model_dump() | figures
    untold = MachineProfile.model_validate(data)
    machine = MachineProfile.model_validate({**data, "host_threads": "16"})
    assert machine.with_threads(None) is machine.with_threads(16) is machine
    fewer, more = machine.with_threads(4), machine.with_threads(32)
    rates = [(each.cores_rate.value, each.cores_rate_beside.value) for each in (fewer, more)]
    assert rates == [(10e9, 7.5e9), (40e9, 30e9)]
    assert fewer.cores_rate.basis == fewer.cores_rate_beside.basis == "estimated"
    assert fewer.cores_rate.source == "4 of 16 threads of: the profile, which names no source"
    # a profile that counts no threads gives nothing to scale by
    assert untold.with_threads(4).cores_rate == untold.cores_rate
    told = untold.with_threads(4).host_threads
    assert told is not None
    assert (told.value, told.basis) == (4, "estimated")

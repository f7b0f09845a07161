"""Names of machines: what people type, and the nearest card where there is none of that name."""

import pytest

from offplan.errors import ProfileError
from offplan.machine.cards import shipped_profiles
from offplan.machine.name import parse_name, why_no_run
from offplan.machine.profile import load_profile


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("RTX 3060 Ti", "rtx3060ti-pcie4"),
        ("rtx3070ti", "rtx3070ti-pcie4"),
        ("3080 Ti", "rtx3080ti-pcie4"),
        ("3090ti", "rtx3090ti-pcie4"),
        ("rtx4060ti", "rtx4060ti-pcie4"),
        ("rtx4060ti-16gb", "rtx4060ti-16gb-pcie4"),
        ("4070 super", "rtx4070-super-pcie4"),
        ("4070 Ti", "rtx4070ti-pcie4"),
        ("RTX 4080 SUPER", "rtx4080-super-pcie4"),
        ("rtx2080ti", "rtx2080ti-pcie3"),
        ("NVIDIA T4", "t4-pcie3"),
        ("Tesla T4", "t4-pcie3"),
        ("NVIDIA H100 80GB HBM3", "h100-pcie5"),
        ("V100", "v100-pcie3"),
        ("v100-32gb", "v100-32gb-pcie3"),
        ("A40", "a40-pcie4"),
        ("DGX Spark", "gb10-c2c"),
        ("gb10", "gb10-c2c"),
        ("h100 sxm", "h100-pcie5"),
        ("H100 SXM5", "h100-pcie5"),
        ("h100-nvl", "h100-nvl-pcie5"),
        ("NVIDIA H20", "h20-pcie5"),
        ("b300", "b300-pcie5"),
        ("rtx4090,pcie=3", "rtx4090-pcie4,pcie=3x16"),
        ("rtx4060,pcie=gen4,ram=32GiB", "rtx4060-pcie4,pcie=4x8,ram=32GiB"),
        ("rtx4090,pcie=4x4", "rtx4090-pcie4,pcie=4x4"),
    ],
)
def test_what_people_type(typed: str, found: str) -> None:
    assert str(parse_name(typed)) == found


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("4060 8GB laptop", "rtx4060-laptop-pcie4"),
        ("5060 ti 8gb ram 16gb", "rtx5060ti-pcie5,ram=16GiB"),
        ("3080 10gb ram 12gb", "rtx3080-pcie4,ram=12GiB"),
        ("4090 vram 24gb ram 64gb", "rtx4090-pcie4,ram=64GiB"),
        ("dual 3090 48gb vram", "rtx3090-pcie4"),
        ("rtx 4070 laptop 8gb", "rtx4070-laptop-pcie4"),
        ("laptop 4060", "rtx4060-laptop-pcie4"),
        ("rtx 4080m", "rtx4080-laptop-pcie4"),
        ("GeForce RTX 4060 Max-Q", "rtx4060-laptop-pcie4"),
        ("3070 notebook", "rtx3070-laptop-pcie4"),
        ("RTX 3060 12GB", "rtx3060-pcie4"),
        ("rtx 3060 12 gig", "rtx3060-pcie4"),
        ("rtx3060 8g", "rtx3060-8gb-pcie4"),
        ("RTX4060Ti 16G", "rtx4060ti-16gb-pcie4"),
        ("4060ti16gb", "rtx4060ti-16gb-pcie4"),
        ("rtx 5060 ti 8 gb", "rtx5060ti-pcie5"),
        ("rtx4090 24 GB VRAM", "rtx4090-pcie4"),
        ("4090 48GB VRAM", "rtx4090-pcie4,vram=48GiB"),
        ("4070tis", "rtx4070ti-super-pcie4"),
        ("4070 Ti S", "rtx4070ti-super-pcie4"),
        ("4080S", "rtx4080-super-pcie4"),
        ("L40S 48GB", "l40s-pcie4"),
        ("RTX PRO 6000 Blackwell Workstation Edition", "rtxpro6000-pcie5"),
        ("rtx 6000 pro 96gb", "rtxpro6000-pcie5"),
        ("rtx a6000 48gb", "rtxa6000-pcie4"),
        ("MSI GeForce RTX\u2122 4070 Ti SUPER", "rtx4070ti-super-pcie4"),
        ("nvidia rtx 3090 founders edition", "rtx3090-pcie4"),
        ("rtx3090 + 64GB RAM", "rtx3090-pcie4,ram=64GiB"),
        ("4090, 64 GB of DDR5", "rtx4090-pcie4,ram=64GiB"),
        ("rtx 5090 32gb 192gb ram", "rtx5090-pcie5,ram=192GiB"),
        ("4060 laptop 8GB 16GB RAM", "rtx4060-laptop-pcie4,ram=16GiB"),
        ("RTX 4060 8 GB, 32 GB RAM, Windows 11", "rtx4060-pcie4,ram=32GiB,os=windows"),
        ("rtx4090 wsl2,ram=64GiB", "rtx4090-pcie4,os=wsl2,ram=64GiB"),
        ("rtx4090, ram=64GiB", "rtx4090-pcie4,ram=64GiB"),
        ("4x 4090 ram=256GB", "rtx4090-pcie4,ram=256GB"),
    ],
)
def test_how_people_describe_it(typed: str, found: str) -> None:
    assert str(parse_name(typed)) == found
    load_profile(typed)


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (
            "3060 laptop with 32GB",
            "6 GiB of .* `rtx3060-laptop,ram=32GiB` .* `rtx3060-laptop,vram=",
        ),
        ("4090 48GB", "24 GiB of .* `rtx4090,vram=48GiB`"),
        ("2080ti 22gb", "11 GiB of .* `rtx2080ti,vram=22GiB`"),
        ("a100 40gb", "80 GB of .* `a100,vram=40GiB`"),
        ("rtx5090 32gb 64gb", "32 GiB of .* `rtx5090,ram=64GiB`"),
        ("my gaming pc", "write a GPU's name, .* rtx4060-laptop,ram=16GiB"),
    ],
)
def test_what_to_write_where_a_name_leaves_something_open(typed: str, told: str) -> None:
    with pytest.raises(ProfileError, match=told):
        load_profile(typed)


@pytest.mark.parametrize("typed", ["two RTX 3090s", "dual 3090", "a pair of 3090", "3090 x 2 24gb"])
def test_a_number_of_gpus_in_words(typed: str) -> None:
    assert parse_name(typed)[::2] == ("rtx3090-pcie4", 2)


@pytest.mark.parametrize("name", shipped_profiles())
def test_every_shipped_machine_may_be_several(name: str) -> None:
    short = name.rpartition("-")[0] or name
    forms = f"2x {name}", f"{name} x2", f"2xNVIDIA {short}", f"{short}x8", f"2xgeforce_{short}"
    for typed in forms:
        named = parse_name(typed)
        assert named.base == name
        assert named.num_gpus in (2, 8)


@pytest.mark.parametrize("name", shipped_profiles())
def test_every_shipped_machine_has_the_names_of_its_gpu(name: str) -> None:
    short = name.rpartition("-")[0] or name
    for typed in (
        name,
        short,
        short.upper(),
        short.replace("-", " "),
        short.replace("rtx", "RTX "),
    ):
        assert str(parse_name(typed)) == name


@pytest.mark.parametrize("typed", ["rtx3090 x2", "2x rtx3090", "2x3090", "RTX 3090 * 2", "3090X2"])
def test_a_number_of_gpus_is_no_part_of_the_name(typed: str) -> None:
    named = parse_name(f"{typed},ram=64GiB")
    assert (str(named), named.num_gpus) == ("rtx3090-pcie4,ram=64GiB", 2)


@pytest.mark.parametrize(("typed", "base"), [("3x 7900xtx", "7900xtx"), ("gtx1080 x3", "gtx1080")])
def test_nor_of_a_name_that_is_not_shipped(typed: str, base: str) -> None:
    assert parse_name(typed)[::2] == (base, 3)


@pytest.mark.parametrize("typed", ["x2", "2x", "my box x2", "v100 sxm2", "2x 2x rtx3090"])
def test_other_names_have_no_number_of_gpus(typed: str) -> None:
    assert parse_name(typed).num_gpus == 1


@pytest.mark.parametrize(
    ("typed", "nearest"),
    [
        ("gtx1080ti", "rtx2080ti-pcie3"),
        ("gtx 1660 super", "rtx2060-pcie3"),
        ("rtx4050", "rtx4050-laptop-pcie4"),
        ("rtx 4090 ti", "rtx4090-pcie4 or rtx3090ti-pcie4"),
        ("5080 super", "rtx5080-pcie5"),
        ("rtx3050ti laptop", "rtx4050-laptop-pcie4"),
        ("Ryzen 7 5800X RTX 3060", "rtx3060-pcie4"),
        ("i7-13700H, RTX 4060", "rtx4060-pcie4"),
        ("two 3090 with nvlink", "rtx3090-pcie4"),
        ("h20O", "h20-pcie5"),
    ],
)
def test_the_nearest_card_is_nearest_in_kind_and_memory(typed: str, nearest: str) -> None:
    with pytest.raises(ProfileError, match=f"is {nearest}"):
        parse_name(typed).find_file()


@pytest.mark.parametrize(
    ("typed", "maker"),
    [
        ("mi300x", "AMD"),
        ("AMD Instinct MI325X", "AMD"),
        ("RX 7900 XTX", "AMD"),
        ("Radeon Pro W7900", "AMD"),
        ("Arc B580", "Intel"),
        ("gaudi3", "Intel"),
        ("m4 max", "Apple"),
        ("M3", "Apple"),
        ("MacBook Pro M4", "Apple"),
        ("7900xtx", "AMD"),
        ("Ryzen AI Max+ 395", "AMD"),
        ("Iris Xe", "Intel"),
    ],
)
def test_gpus_of_other_makers_are_called_so(typed: str, maker: str) -> None:
    with pytest.raises(ProfileError, match=f"none by {maker}; llama.cpp, built for") as told:
        parse_name(typed).find_file()
    assert "meant?" not in str(told.value)


@pytest.mark.parametrize(
    "gpu",
    [
        *("NVIDIA V100", "Tesla V100S-PCIE-32GB", "Tesla P40", "Tesla M40 24GB", "Quadro P6000"),
        *("NVIDIA GeForce GTX 1080 Ti", "NVIDIA GeForce GTX 1060 6GB", "NVIDIA TITAN X (Pascal)"),
    ],
)
def test_run_needs_turing(gpu: str) -> None:
    assert f"needs a GPU of Turing (RTX 20, T4) or newer, found {gpu}" in str(why_no_run(gpu))


@pytest.mark.parametrize(
    "gpu",
    [
        *("AMD EPYC 9654 with RTX 4090", "Intel NUC, GeForce 5090", "Arch Linux box"),
        *("NVIDIA TITAN RTX", "Quadro RTX 8000", "NVIDIA GeForce GTX 1650", "NVIDIA A30"),
    ],
)
def test_a_name_that_says_nothing_against_run(gpu: str) -> None:
    assert why_no_run(gpu) is None


def test_a_card_before_turing_is_called_so() -> None:
    for typed in ("titan x", "gtx1080ti", "1080 Ti", "tesla p40 24gb"):
        with pytest.raises(ProfileError, match=r"lists.*[.?] `offplan run` needs .* CUDA 12"):
            parse_name(typed).find_file()


def test_run_is_for_nvidia() -> None:
    assert why_no_run("AMD MI300X") is not None
    shipped = {name: why_no_run(load_profile(name).name) for name in shipped_profiles()}
    assert {name for name, why in shipped.items() if why} == {"v100-pcie3", "v100-32gb-pcie3"}

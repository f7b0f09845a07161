"""Figures of the host's cores, measured on the CPU."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config

from offplan.checkpoint.open import open_model
from offplan.errors import OffplanError
from offplan.held.held import hold
from offplan.hostmem.busy import Watch
from offplan.library.machines import measure_here
from offplan.machine.profile import MachineProfile, dump_profile, load_profile, parse_profile
from offplan.runtime.measuring import cores
from tests.hostcores.cores import require_cores
from tests.runtime.quantise import save_stored
from tests.tiers import first_quick

require_cores()

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "LEAST_BYTES", 1 << 20)
    monkeypatch.setattr(cores, "DEFAULT_SHAPE", (256, 128, 4))
    monkeypatch.setattr(Watch, "why", None)  # whoever runs tests has other work, too


def as_profile(figures: Mapping[str, object]) -> MachineProfile:
    return MachineProfile.model_validate(load_profile("h100-pcie5").model_dump() | dict(figures))


def check(profile: MachineProfile, of: str) -> None:
    assert profile.cores is not None
    assert profile.cores.basis == "measured"
    assert of in profile.cores.source
    assert (profile.cores.samples, profile.cores.value > 1e6) == (cores.NUM_RATE_SAMPLES, True)
    assert profile.cores_rate is profile.cores
    assert profile.host_threads is not None
    assert profile.host_threads.value == 1
    # what only a GPU shows is left out, and assumed where plans need it
    assert (profile.cores_beside_copies, profile.host_reads) == (None, None)
    assert profile.cores_trip.basis == "estimated"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "form"),
    first_quick([("qwen3_moe", "fp8_block"), ("gpt_oss", "mxfp4"), ("qwen3", "nvfp4")]),
)
def test_a_models_own_products_are_timed(family: str, form: str, tmp_path: Path) -> None:
    folder = save_stored(family, form, tmp_path, dtype=torch.bfloat16)[0]
    made = cores.measure_cores(hold(open_model(str(folder))), CPU, 1)
    check(as_profile(made), f"products of {family} as stored")


def test_a_model_without_such_products_is_refused(tmp_path: Path) -> None:
    """Weights of its linear layers are transposed."""
    config = GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=64, dtype="bfloat16")
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(tmp_path)
    with pytest.raises(OffplanError, match="no matrices that the host's cores can multiply"):
        cores.measure_cores(hold(open_model(str(tmp_path / "config.json"))), CPU, 1)


def test_without_a_model_experts_of_bf16_are() -> None:
    profile = as_profile(cores.measure_cores(None, CPU, 1))
    check(profile, "4 bf16 experts of 192 KiB, threads: 1")
    assert parse_profile(dump_profile(profile), "x") == profile


def test_figures_measured_beside_busy_processes_are_estimates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Watch, "why", "measured while other processes took 1.6 of 2 cores")
    profile = as_profile(cores.measure_cores(None, CPU, 1))
    assert profile.cores is not None
    assert profile.cores.basis == "estimated"
    assert profile.cores.source.startswith("measured while other processes took 1.6 of 2 cores: 4")
    assert profile.host_threads is not None
    assert profile.host_threads.basis == "measured"


def test_other_systems_are_refused_before_anything_is_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> None:
        raise OffplanError("needs Linux")

    monkeypatch.setattr(cores.cores, "load", refuse)
    monkeypatch.delattr("os.sched_getaffinity")
    with pytest.raises(OffplanError, match="needs Linux"):
        cores.measure_cores(None, CPU, 1)


def test_what_a_machine_has_not_leaves_no_trace() -> None:
    shipped = load_profile("h200-pcie5")
    assert MachineProfile.model_validate(shipped.model_dump()).fingerprint == shipped.fingerprint


def test_experts_of_a_sample_are_others_than_before() -> None:
    for num in (1, 8, 60, 128, 256):
        step = cores._step(num)
        assert sorted(at * step % num for at in range(num)) == [*range(num)]


def test_more_threads_than_cores_are_refused_before_anything_is_measured() -> None:
    with pytest.raises(OffplanError, match=r"4096 threads are asked for: ask for .*host_threads"):
        measure_here(device="cpu", with_cores=True, host_threads=4096)

"""Measuring from the command line, where what is measured is made up."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch

import offplan.library.machines
import offplan.library.runnable
import offplan.machine.measure
import offplan.runtime.memory.gpu_memory
from offplan.checkpoint.model import Model
from offplan.checkpoint.open import open_model
from offplan.errors import CheckpointError, OffplanError
from offplan.held.held import hold
from offplan.held.packing import pack_everything
from offplan.hostmem import hardware
from offplan.library.machines import find_machine, measure_here
from offplan.machine import measure_cpu
from offplan.machine.profile import (
    InPlaceRead,
    LayerTime,
    MachineProfile,
    load_profile,
    parse_profile,
)
from offplan.plan import Goal, Workload, load_plan
from offplan.runtime.measuring import cores, layer_cache, layer_times
from tests.cli import CLI, TINY_MOE
from tests.held import is_packed

WORKLOAD = Workload(batch=1, prompt_tokens=32, output_tokens=96, context=256)


BESIDE = (
    "offplan: not measured: cores_beside_copies, host_reads, cores_round_trip: copies ended before "
    "the cores did\n"
)
"""What is told of a machine whose cores were not timed beside copies."""


class Machine:
    """Counts what is measured."""

    def __init__(self) -> None:
        self.gpu = SimpleNamespace(name="a GPU", total_memory=2**34, multi_processor_count=8)
        self.with_others: list[bool] = []
        self.bytes_of_others: list[int] = []
        self.num_layer_times = 0
        self.num_packed_times = 0

    def measure(
        self, on_progress: Any, *, with_others: bool = False, bytes_of_others: int = 0
    ) -> MachineProfile:
        self.with_others.append(with_others)
        self.bytes_of_others.append(bytes_of_others)
        return load_profile("h200-pcie5")

    def time_reads(self, products: Any, *_: Any, **__: Any) -> tuple[InPlaceRead, ...]:
        return tuple(InPlaceRead(shape=s, tokens=tokens, factor=3) for s, tokens in products)

    def time_cores(self, stage: Any, device: Any, num_threads: int | None) -> dict[str, Any]:
        figure = {"value": 1e11, "basis": "measured", "source": f"{num_threads} threads"}
        return {} if stage is None else {"cores": figure}

    def time_layers(self, model: Model, *_: Any) -> tuple[LayerTime, ...]:
        packs = any(is_packed(parameter) for parameter in model.layers[0].parameters)
        self.num_layer_times += not packs
        self.num_packed_times += packs
        time = LayerTime(layer="x", phase="decode", batch=1, tokens=1, context=256, seconds=0.1)
        return (time, time.model_copy(update={"layer": model.layers[0].key}))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    machine = Machine()
    monkeypatch.setattr(offplan.machine.measure, "measure_machine", machine.measure)
    monkeypatch.setattr(layer_times, "measure_layer_times", machine.time_layers)
    monkeypatch.setattr(layer_times, "measure_in_place_reads", machine.time_reads)
    monkeypatch.setattr(cores, "measure_cores", machine.time_cores)
    monkeypatch.setattr(offplan.runtime.memory.gpu_memory, "bytes_in_use", lambda device: 2**30)
    monkeypatch.setattr(offplan.library.machines, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: machine.gpu)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HOME", str(tmp_path / "home"))
    return machine


def test_layers_are_timed_once(machine: Machine) -> None:
    model = open_model(str(TINY_MOE))
    first, second = (measure_here(model, WORKLOAD, packing=True) for _ in range(2))
    assert first == second
    assert first.free_gpu_bytes == first.profile.gpu_memory.value - 2**30
    assert (machine.num_layer_times, machine.num_packed_times) == (1, 1)
    packed = hold(model, pack_everything(model)).layers[0].key
    assert [time.layer for time in first.profile.layer_times] == ["x", model.layers[0].key, packed]
    assert [time.estimate is not None for time in first.profile.layer_times] == [0, 1, 0]
    assert machine.with_others == [False, False]


@pytest.mark.parametrize("has_context", [None, False, True])
def test_what_others_hold_is_taken_off_once(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, has_context: bool | None
) -> None:
    """It is not free, and was overhead of each plan besides: twice a desktop's 1 to 2 GiB."""
    if has_context is not None:
        known = "_cuda_hasPrimaryContext"
        monkeypatch.setattr(torch._C, known, lambda index: has_context, raising=False)
    found = measure_here()
    assert found.free_gpu_bytes == found.profile.gpu_memory.value - 2**30
    assert machine.bytes_of_others == [2**30 if has_context is False else 0]


def test_what_cannot_run_is_planned_by_the_machines_figures(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offplan.library.runnable, "why_not_run", lambda *_: "it cannot")
    found = find_machine(None, open_model(str(TINY_MOE)), WORKLOAD)
    assert found is not None
    assert (machine.num_layer_times, found.profile.layer_times) == (0, ())
    with pytest.raises(CheckpointError, match="it cannot"):
        measure_here(open_model(str(TINY_MOE)), WORKLOAD)


def test_the_cores_are_measured_once_where_plans_may_have_them(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = []

    def time_cores(stage: Any, *_: Any) -> dict[str, Any]:
        timed.append(stage and stage.model.source)
        return {"cores": {"value": 9e10, "basis": "measured", "source": "a test"}}

    monkeypatch.setattr(cores, "measure_cores", time_cores)
    model = open_model(str(TINY_MOE))
    for goal, store in (
        (Goal(host_cores=False), "host"),
        (Goal(), "peer"),
        (Goal(engine="vllm"), "host"),
    ):
        find_machine(None, model, WORKLOAD, goal=goal, store=store)  # type: ignore[arg-type]
    assert timed == []
    for _ in range(2):
        found = find_machine(None, model, WORKLOAD)
        assert found is not None
        assert (found.profile.cores_rate.value, found.no_cores) == (9e10, None)
    assert timed == [str(TINY_MOE)]  # of its own weights, and kept
    machine.gpu.name = "another GPU"
    find_machine(None, model, WORKLOAD)
    monkeypatch.setattr(hardware, "core_quota", lambda: 2.0)
    find_machine(None, model, WORKLOAD)
    assert timed == [str(TINY_MOE)] * 3


def test_the_cores_are_measured_with_each_models_own_weights(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they read of one form says little of another: they decode it."""
    timed = []

    def time_cores(stage: Any, *_: Any) -> dict[str, Any]:
        timed.append(stage and stage.model.model_type)
        if stage is not None and stage.model.model_type == "mixtral":
            raise OffplanError("no kernel for these")
        return {"cores": {"value": 9e10, "basis": "measured", "source": "a test"}}

    monkeypatch.setattr(cores, "measure_cores", time_cores)
    monkeypatch.setattr(
        offplan.machine.measure, "measure_machine", lambda *_, **__: load_profile("rtx4090")
    )
    room = 2**40
    monkeypatch.setattr(cores, "least_room", lambda: (room, "a test"))
    published = TINY_MOE.parents[1] / "benchmarks" / "models"
    for name in ("gpt-oss-20b", "qwen3-30b-a3b-fp8", "gpt-oss-20b", *["mixtral-8x7b"] * 2):
        found = find_machine(None, open_model(str(published / name / "config.json")), WORKLOAD)
        assert found is not None
        assert found.no_cores is None
    # bf16 experts stand in for what the cores cannot multiply, and for layers of many GiB
    assert timed == ["gpt_oss", "qwen3_moe", "mixtral", None]
    large = open_model(str(published / "deepseek-v3-8-layers" / "config.json"))
    find_machine(None, large, WORKLOAD)
    room = 2**30
    find_machine(None, open_model(str(published / "gpt-oss-120b" / "config.json")), WORKLOAD)
    assert len(timed) == 4


def test_figures_of_busy_cores_are_used_and_not_kept(
    cli: CLI, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = []

    def time_cores(*_: Any) -> dict[str, Any]:
        timed.append(0)
        source = "measured while other processes took 3.2 of 16 cores: a test"
        return {"cores": {"value": 5e10, "basis": "estimated", "source": source}}

    monkeypatch.setattr(cores, "measure_cores", time_cores)
    monkeypatch.setattr(
        offplan.machine.measure, "measure_machine", lambda *_, **__: load_profile("rtx4090")
    )
    monkeypatch.setattr(layer_times, "measure_layer_times", lambda *_: ())
    config = TINY_MOE.parents[1] / "benchmarks" / "models" / "gpt-oss-20b" / "config.json"
    for _ in range(2):
        code, out, err = cli("analyze", config, "--gpu-memory", "6GiB")
        assert code == 0, err
        told = "read 50 GB/s with as many threads as suit (estimated: measured while other "
        assert f"{told}processes took 3.2 of 16 cores" in " ".join(out.split())
    assert len(timed) == 2


def test_cores_that_cannot_multiply_are_told_of(
    cli: CLI, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OffplanError("no compiler")

    def measure(*_: Any, **__: Any) -> MachineProfile:
        return load_profile("rtx4090")

    monkeypatch.setattr(cores, "measure_cores", refuse)
    monkeypatch.setattr(offplan.machine.measure, "measure_machine", measure)
    found = find_machine(None, open_model(str(TINY_MOE)), WORKLOAD)
    assert found is not None
    assert found.no_cores == "no compiler"
    config = TINY_MOE.parents[1] / "benchmarks" / "models" / "qwen3-8b-fp8" / "config.json"
    code, out, err = cli("analyze", config, "--gpu-memory", "6GiB")
    assert code == 0, err
    assert "The host's cores multiply nothing: no compiler." in " ".join(out.split())


def test_a_system_without_kernels_has_no_cores(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows has not even a list of a process's cores, by which figures are kept."""
    monkeypatch.setattr("sys.platform", "win32")
    monkeypatch.setattr("ctypes.CDLL", lambda name: name)
    monkeypatch.delattr("os.sched_getaffinity")
    found = find_machine(None, open_model(str(TINY_MOE)), WORKLOAD)
    assert found is not None
    assert "found win32 on" in str(found.no_cores)
    assert "without" not in str(found.no_cores)  # which it is


@pytest.mark.parametrize("change", [{"batch": 2}, {"context": 512}, {"prompt_tokens": 16}])
def test_another_workload_is_timed(machine: Machine, change: dict[str, int]) -> None:
    model = open_model(str(TINY_MOE))
    measure_here(model, WORKLOAD)
    measure_here(model, Workload(**(WORKLOAD.model_dump() | change)))
    assert machine.num_layer_times == 2


def test_another_gpu_torch_or_runtime_is_timed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = open_model(str(TINY_MOE))
    measure_here(model, WORKLOAD)
    machine.gpu.name = "another GPU"
    measure_here(model, WORKLOAD)
    monkeypatch.setattr(torch, "__version__", "0")
    measure_here(model, WORKLOAD)
    monkeypatch.setattr(layer_cache, "read_text", lambda _: "another driver")
    measure_here(model, WORKLOAD)
    monkeypatch.setattr(layer_cache, "_sha256", lambda content: str(len(content)))
    measure_here(model, WORKLOAD)
    assert machine.num_layer_times == 5


def test_the_sources_that_layer_times_depend_on() -> None:
    names = {path.name for path in layer_cache.timed_sources()}
    assert {"session.py", "runner.py", "attention.py", "skeleton.py", "layer_times.py"} <= names
    assert "kernel_sizes.py" in names
    assert all(path.is_file() for path in layer_cache.timed_sources())
    assert not {"bench.py", "versus.py", "accelerated.py", "timed_link.py"} & names
    assert not {"generate.py", "prompts.py", "texts.py"} & names


def test_measure_times_layers_afresh_and_keeps_them(
    cli: CLI, machine: Machine, tmp_path: Path
) -> None:
    path = tmp_path / "here.yaml"
    workload = ("--prompt-tokens", 32, "--output-tokens", 96, "--context", 256)
    for _ in range(2):
        code, out, err = cli("measure", TINY_MOE, *workload, "--packing", "-o", path, "--force")
        assert (code, err) == (0, f"{BESIDE}offplan: wrote {path}\n")
        assert "NVIDIA H200, PCIe 5 x16" in out
        assert "55.4 GB/s" in out
    kept = parse_profile(path.read_text(), "here")
    assert len(kept.layer_times) == 3
    assert kept.cores_rate.value == 1e11
    assert (machine.num_layer_times, machine.with_others) == (2, [True, True])
    measure_here(open_model(str(TINY_MOE)), WORKLOAD)
    assert machine.num_layer_times == 2


def test_measure_prints_a_profile_or_json(cli: CLI, machine: Machine) -> None:
    code, out, err = cli("measure")
    assert (code, err) == (0, BESIDE.replace("measured: ", "measured: cores, "))
    assert parse_profile(out, "stdout") == load_profile("h200-pcie5")
    payload = json.loads(cli("measure", "--json").out)["machine"]
    assert payload["h2d"]["value"] == 55.4e9
    assert payload["uva_rereads"] is None
    assert payload["fingerprint"] == load_profile("h200-pcie5").fingerprint
    assert machine.num_layer_times == 0


def test_a_shared_profile_has_figures_and_versions_alone(
    cli: CLI, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a file of ``machine/profiles`` as it is: the tests of GPUs' order then read it."""
    figure = {"value": 2**36, "basis": "measured", "source": "a test"}
    here = load_profile("h200-pcie5").model_copy(update={"host_memory": figure})
    here = MachineProfile.model_validate(dict(here))
    monkeypatch.setattr(offplan.machine.measure, "measure_machine", lambda *_, **__: here)
    whole, shared = (cli("measure", TINY_MOE, *more).out for more in ((), ("--share",)))
    own, others = (parse_profile(text, "shared") for text in (whole, shared))
    assert own.layer_times
    assert own.host_memory is not None
    left = {"host_memory": None, "layer_times": (), "in_place_reads": None}
    assert others == own.model_copy(update=left)
    payload = json.loads(cli("measure", TINY_MOE, "--share", "--json").out)["machine"]
    assert not payload["layer_times"]


@pytest.mark.slow
def test_a_cpu_is_measured_as_one_that_plays_gpu(
    cli: CLI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure_cpu, "_LARGE_BYTES", 2**20)
    # no longer than the prompt and its output: there is no room for more steps than are timed
    workload = ("--prompt-tokens", 8, "--output-tokens", 2, "--context", 10)
    profile, path = tmp_path / "cpu.yaml", tmp_path / "plan.yaml"
    assert cli("measure", TINY_MOE, *workload, "--device", "CPU", "-o", profile).code == 0
    measured = load_profile(str(profile))
    assert measured.host_memory is not None
    assert (measured.name, measured.basis, len(measured.layer_times)) == ("CPU", "measured", 6)
    budget = ("--machine", profile, "--gpu-memory", "768KiB")
    assert cli("plan", TINY_MOE, *workload, *budget, "-o", path).code == 0
    assert load_plan(path).prediction.basis == "measured"


@pytest.mark.parametrize("has_cores", [True, False])
def test_what_is_not_measured_of_the_cores_is_named(
    cli: CLI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_cores: bool
) -> None:
    def measure(*_: Any) -> dict[str, Any]:
        if not has_cores:
            raise OffplanError("`decode: host` has no kernel for this")
        return {"cores": {"value": 1e11, "basis": "measured", "source": "a test"}}

    monkeypatch.setattr(measure_cpu, "_LARGE_BYTES", 2**20)
    monkeypatch.setattr(cores, "measure_cores", measure)
    code, out, err = cli("measure", "--device", "cpu")
    assert (code, parse_profile(out, "stdout").cores is not None) == (0, has_cores)
    beside = "cores_beside_copies, host_reads, cores_round_trip: that takes a GPU"
    told = beside if has_cores else "the host's cores: `decode: host` has no kernel for this"
    assert f"offplan: not measured: {told}\n" in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_measure_without_a_gpu_says_so(cli: CLI) -> None:
    code, out, err = cli("measure")
    assert (code, out) == (1, "")
    assert "no CUDA device to measure here" in err
    assert cli("measure", "plans/tiny-moe").code == 1

"""Whatever goes wrong ends in a clear error, with every page unlocked."""

import gc
import json
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from offplan.capabilities.stock import STOCK
from offplan.checkpoint.model import Model
from offplan.checkpoint.open import open_model
from offplan.errors import CheckpointError, MemoryLimitError, Topic
from offplan.hostmem import limits
from offplan.hostmem.block import HostBlock
from offplan.hostmem.limits import host_room
from offplan.runtime import session
from offplan.runtime.device import let_go
from offplan.runtime.faults import memory_limits
from offplan.runtime.generate import Measured, generate
from offplan.runtime.loading import loaded
from offplan.runtime.memory import store
from offplan.runtime.passes import runner
from offplan.runtime.session import Session
from offplan.runtime.stock.runner import StockRunner
from tests.runtime.conftest import save_tiny
from tests.runtime.plans import CONTEXT, group, offload
from tests.tiers import each_value_once

DECISION = offload(group(2, 1))
PROMPT = torch.tensor([[3, 14, 15, 9, 26]])
OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class Driver:
    """Stands in for the CUDA runtime: counts what is page-locked."""

    def __init__(self) -> None:
        self.locked: set[int] = set()
        self.calls = 0
        self.fails_at = 0
        """The call that fails; 0 for none."""

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.calls += 1
        if self.calls == self.fails_at:
            return 2
        self.locked.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.locked.remove(address)
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Has every slab page-locked, by a driver that is not there."""
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(store, "reads_over_link", lambda device: True)
    return driver


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny("qwen3", tmp_path / "checkpoint")


def load(folder: Path, model: Model | None = None, **options: Any) -> Session:
    model = model or open_model(str(folder))
    return Session(model, DECISION, context=CONTEXT, device="cpu", folder=folder, **options)


def shard_of(folder: Path, number: int = 1) -> Path:
    return sorted(folder.glob("*.safetensors"))[number]


@pytest.mark.slow
def test_a_session_gives_back_what_it_locks(driver: Driver, folder: Path) -> None:
    with load(folder):
        assert len(driver.locked) == 2
    assert not driver.locked


@pytest.mark.parametrize("fails_at", [1, 2])
def test_out_of_pinned_memory(driver: Driver, folder: Path, fails_at: int) -> None:
    driver.fails_at = fails_at
    with pytest.raises(MemoryLimitError, match=r"could not page-lock .* `ulimit -l` \(now "):
        load(folder)
    assert driver.calls == fails_at
    assert not driver.locked


def test_out_of_address_space(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("offplan.hostmem.block.mmap.mmap", refuse)
    with pytest.raises(MemoryLimitError, match=r"the host has no room for .* `host_memory`"):
        load(folder)


def test_more_than_the_container_has(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setattr(limits, "host_room", lambda *_: iter([(1000, "the cgroup /x")]))
    with pytest.raises(MemoryLimitError, match=r"the cgroup /x has 1000 B left"):
        load(folder)
    assert not driver.calls


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/a/b", {"machine": 300, "/a": 50, "/a/b": 70}),  # unlimited groups are left out
        ("/", {"machine": 300}),
        ("/elsewhere", {"machine": 300}),
    ],
)
def test_room_in_a_cgroup(tmp_path: Path, path: str, expected: dict[str, int]) -> None:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(f"0::{path}\n")
    (proc / "meminfo").write_text("MemTotal: 900 kB\nMemAvailable: 290 kB\nSwapFree: 10 kB\n")
    for name, limit, used in (("a", 100, 80), ("a/b", 90, 50), (".", None, 700)):
        group = cgroup / name
        group.mkdir(parents=True, exist_ok=True)
        limit_bytes = "max" if limit is None else limit * 1024
        (group / "memory.max").write_text(f"{limit_bytes}\n")
        (group / "memory.current").write_text(f"{used * 1024}\n")
        (group / "memory.stat").write_text(f"anon 1\nactive_file {15 * 1024}\ninactive_file 5120\n")
    room = {name: num_bytes // 1024 for num_bytes, name in host_room(proc, cgroup)}
    names = {f"the cgroup {cgroup}{group}": kib for group, kib in expected.items()}
    names["this machine"] = names.pop(f"the cgroup {cgroup}machine")
    assert room == names


def test_room_in_an_old_cgroup(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("5:cpu:/x\n4:memory:/\n")
    memory = tmp_path / "memory"
    memory.mkdir()
    (memory / "memory.limit_in_bytes").write_text("1000")
    (memory / "memory.usage_in_bytes").write_text("900")
    (memory / "memory.stat").write_text("active_file 1\ntotal_active_file 30\n")
    assert list(host_room(tmp_path, tmp_path)) == [(130, f"the cgroup {memory}")]


def test_nothing_known_about_the_host(tmp_path: Path) -> None:
    assert list(host_room(tmp_path, tmp_path)) == []


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
                "139.80 GiB of which 1.20 GiB is free. Including non-PyTorch memory, ..."
            ),
            " (CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
            "139.80 GiB of which 1.20 GiB is free)",
        ),
        (
            RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"),
            " (CUDA error: out of memory Search for `cudaErrorMemoryAllocation')",
        ),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
            " (CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`)",
        ),
        (MemoryError(), ""),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1"),
            " (DefaultCPUAllocator: can't allocate memory: you tried to allocate 1)",
        ),
    ],
    ids=["torch", "driver", "cublas", "host", "torch on the host"],
)
def test_out_of_memory_says_what_to_do(error: Exception, told: str) -> None:
    with pytest.raises(MemoryLimitError) as raised, memory_limits("testing"):
        raise error
    assert str(raised.value) == (
        f"memory ran out while testing{told}. Close what else uses it, or plan again with a "
        "smaller `gpu_memory`, `batch` or `context`"
    )
    is_of_gpu = "CUDA" in told
    assert raised.value.topic == (Topic.GPU_MEMORY if is_of_gpu else Topic.HOST_MEMORY)


def test_out_of_memory_behind_another_error() -> None:
    def fail_behind() -> None:
        try:
            raise OUT_OF_MEMORY
        except torch.OutOfMemoryError:  # no cause is named, as where a capture fails
            raise RuntimeError("operation failed due to an error during capture")  # noqa: B904

    with pytest.raises(MemoryLimitError), memory_limits("testing"):
        fail_behind()


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="shapes"), memory_limits("testing"):
        raise RuntimeError("shapes do not match")


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_gpu_out_of_memory_while_running(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, folder: Path, phase: str
) -> None:
    doing = {"prefill": "reading the prompt", "decode": "making a token"}[phase]
    with load(folder) as running:
        if phase == "decode":
            running.prefill(PROMPT)
        monkeypatch.setattr(running.loaded.module.model.layers[3], "forward", fail(OUT_OF_MEMORY))
        with pytest.raises(MemoryLimitError, match=doing):
            running.prefill(PROMPT) if phase == "prefill" else running.decode(PROMPT[:, :1])
        assert driver.locked
    assert not driver.locked


@pytest.mark.parametrize(
    ("error", "expected", "said"),
    [
        (KeyError("rope"), CheckpointError, r"transformers' own passes fail \(KeyError: 'rope'\)"),
        (OUT_OF_MEMORY, MemoryLimitError, "memory ran out while loading"),
    ],
)
def test_a_pass_of_transformers_that_fails_before_any_text(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    error: Exception,
    expected: type[Exception],
    said: str,
) -> None:
    monkeypatch.setattr(StockRunner, "_begin", fail(error))
    with pytest.raises(expected, match=said):
        load(folder, way=STOCK)


def fail(error: BaseException) -> Callable[..., None]:
    def call(*_: object, **__: object) -> None:
        raise error

    return call


PLACES: dict[str, tuple[object, str]] = {
    "filling": (loaded, "load_weights"),
    "checking": (loaded.LoadedModel, "_check"),
    "viewing": (HostBlock, "device_view"),
    "link": (session, "CpuLink"),
    "taking layers over": (runner, "Executor"),
    "keeping latents": (runner, "keep_latents"),
}


ERRORS: dict[str, tuple[BaseException, type[BaseException]]] = {
    "interrupt": (KeyboardInterrupt(), KeyboardInterrupt),
    "memory": (OUT_OF_MEMORY, MemoryLimitError),
    "other": (ValueError("anything"), ValueError),
}


@pytest.mark.slow
@pytest.mark.parametrize(("place", "kind"), each_value_once(product(PLACES, ERRORS)))
def test_whatever_fails_half_way(
    driver: Driver,
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    place: str,
    kind: str,
) -> None:
    error, expected = ERRORS[kind]
    monkeypatch.setattr(*PLACES[place], fail(error))
    with pytest.raises(expected):
        load(folder)
    assert bool(driver.calls) == (place != "filling")  # nothing is locked before it begins
    error.__traceback__ = error.__context__ = None
    gc.collect()
    assert not driver.locked


def test_an_interrupt_while_generating(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    def interrupt(running: Session) -> None:
        with running:
            for _ in generate(running, PROMPT, 9, Measured()):
                layer = running.loaded.module.model.layers[2]
                monkeypatch.setattr(layer, "forward", fail(KeyboardInterrupt()))

    with pytest.raises(KeyboardInterrupt):
        interrupt(load(folder))
    assert not driver.locked


def test_a_device_beyond_repair_still_lets_go(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    monkeypatch.setattr(torch.cuda, "synchronize", fail(error))
    let_go(torch.device("cuda"))


def test_a_truncated_shard(driver: Driver, folder: Path) -> None:
    model = open_model(str(folder))
    shard = shard_of(folder)
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size - 100)
    with pytest.raises(CheckpointError, match="damaged or cut short"):
        load(folder, model)
    assert not driver.locked


def test_a_missing_shard(driver: Driver, folder: Path) -> None:
    model = open_model(str(folder))
    shard_of(folder).unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        load(folder, model)
    assert not driver.locked


def test_files_that_changed_after_their_headers_were_read(driver: Driver, folder: Path) -> None:
    model = open_model(str(folder))
    shard = shard_of(folder)
    tensors = load_file(shard)
    save_file({name: tensor.half() for name, tensor in tensors.items()}, shard)
    with pytest.raises(CheckpointError, match="has changed since its header was read"):
        load(folder, model)
    assert not driver.locked


def test_weights_of_another_shape(driver: Driver, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["intermediate_size"] //= 2
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"the model wants|another model"):
        load(folder)
    assert not driver.calls


def test_weights_of_another_type(driver: Driver, folder: Path) -> None:
    shard = shard_of(folder)
    tensors = load_file(shard)
    save_file({name: tensor.to(torch.int32) for name, tensor in tensors.items()}, shard)
    with pytest.raises(CheckpointError, match="as codes that its config does not explain"):
        load(folder)
    assert not driver.calls


def test_the_wrong_folder(driver: Driver, folder: Path, tmp_path: Path) -> None:
    model = open_model(str(folder))
    other = save_tiny("qwen3_moe_tied", tmp_path / "other")
    shutil.copy(folder / "config.json", other / "config.json")
    with pytest.raises(CheckpointError):
        load(other, model)
    assert not driver.locked

"""Time loading against plain reads of the same bytes, and print both as JSON.

    python benchmarks/load.py FOLDER [--device cuda] [--group-size 2 --num-in-group 1]
    python benchmarks/load.py FOLDER --synthesize CONFIG_JSON

FOLDER is a checkpoint; ``--synthesize`` first writes one there, of random bytes in the shapes of a
config. With ``--packing`` weights are packed on their way. Files are read once beforehand, so that
all times are with a warm page cache. Each figure is the best of ``--repeats``, in a process of its
own, since memory once touched is quicker to fill.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from offplan.checkpoint.open import open_model
from offplan.checkpoint.tensors import TensorInfo
from offplan.held.held import hold
from offplan.held.packing import pack_everything
from offplan.hostmem.block import HostBlock
from offplan.plan import Backend, Offload, Rule
from offplan.runtime.executors import EXECUTORS
from offplan.runtime.loading import loaded as runtime_loaded
from offplan.runtime.loading.loaded import LoadedModel
from offplan.runtime.loading.loader import NUM_THREADS, load_weights
from offplan.runtime.loading.prepared import prepare
from offplan.runtime.loading.staging import EXTENT_BYTES

SHARD_BYTES = 4 * 10**9
NUM_VALUES = 8_388_593
"""A prime, so that no two rows of a matrix are of the same values."""


def synthesize(config: Path, folder: Path, deviation: float = 1.0) -> None:
    """Write a checkpoint of random bfloat16 values whose shapes are those of ``config``.

    Matrices are of normal values with a standard ``deviation``, vectors (norms) of ones.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(config, folder / "config.json")
    model = open_model(str(config))
    tensors = [tensor for parameter in hold(model).parameters for tensor in parameter.stored]
    shards: list[list[TensorInfo]] = [[]]
    for tensor in tensors:
        if sum(t.nbytes for t in shards[-1]) + tensor.nbytes > SHARD_BYTES:
            shards.append([])
        shards[-1].append(tensor)
    noise = memoryview(to_bytes(torch.randn(NUM_VALUES) * deviation))
    # each weight goes on in the noise where the one before it ended
    begins, begun = {}, 0
    for tensor in tensors:
        begins[tensor.name] = begun
        if not is_vector(tensor):
            begun = (begun + tensor.nbytes) % len(noise)

    def write(number: int, shard: list[TensorInfo]) -> dict[str, str]:
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        header, end = {}, 0
        for t in shard:
            offsets = [end, end + t.nbytes]
            header[t.name] = {"dtype": t.dtype, "shape": t.shape, "data_offsets": offsets}
            end += t.nbytes
        text = json.dumps(header).encode()
        with (folder / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for t in shard:
                if is_vector(t):
                    file.write(to_bytes(torch.ones(t.nbytes // 2)))
                    continue
                begun = begins[t.name]
                file.write(noise[begun : begun + t.nbytes])
                for start in range(len(noise) - begun, t.nbytes, len(noise)):
                    file.write(noise[: t.nbytes - start])
        return dict.fromkeys(header, name)

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        written = [*pool.map(write, range(1, len(shards) + 1), shards)]
    index = {tensor: name for each in written for tensor, name in each.items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def is_vector(tensor: TensorInfo) -> bool:
    return tensor.dtype == "BF16" and len(tensor.shape) < 2


def to_bytes(values: torch.Tensor) -> bytes:
    return values.to(torch.bfloat16).view(torch.uint8).numpy().tobytes()


def read_plainly(files: list[Path], threads: int) -> float:
    """Read whole files into one block of fresh memory, in parts; return seconds."""
    began = time.perf_counter()
    block = HostBlock(sum(file.stat().st_size for file in files), pin=False)
    jobs = []
    start = 0
    for file in files:
        size = file.stat().st_size
        handle = os.open(file, os.O_RDONLY)
        for offset in range(0, size, EXTENT_BYTES):
            part = block.tensor[start + offset : start + min(offset + EXTENT_BYTES, size)]
            jobs.append((handle, part.numpy().data, offset))
        start += size
    with ThreadPoolExecutor(threads) as pool:
        read = pool.map(lambda job: os.preadv(job[0], [job[1]], job[2]), jobs)
        assert sum(read) == block.nbytes
    return time.perf_counter() - began


def load(
    folder: Path, device: str, group_size: int, num_in_group: int, *, packing: bool
) -> dict[str, float]:
    """Load by a plan that offloads whole layers; return seconds and bytes.

    ``seconds`` is bringing the weights; ``seconds_in_all`` has the model's classes and the
    page-locking of its host memory too.
    """
    before = memory_bytes("VmRSS")
    model = open_model(str(folder))
    both = Backend.PREFETCH
    rule = Rule(group_size=group_size, num_in_group=num_in_group, prefill=both, decode=both)
    decision = Offload(
        prefetch_step=2,
        prefill_chunk=1024,
        packing=pack_everything(model) if packing else None,
        rules=(rule,) if num_in_group else (),
    )
    reading: list[float] = []

    def timed(*arguments: Any) -> None:
        began = time.perf_counter()
        load_weights(*arguments)
        reading.append(time.perf_counter() - began)

    vars(runtime_loaded)["load_weights"] = timed
    began = time.perf_counter()
    loaded = LoadedModel(prepare(model, decision, torch.device(device), EXECUTORS), folder)
    seconds = time.perf_counter() - began
    on_host = loaded.placement.offloaded_bytes
    if device == "cpu":  # the arena and the ring are host memory then
        on_host += loaded.placement.resident_bytes + loaded.placement.ring_bytes
    return {
        "seconds": reading[0],
        "seconds_in_all": seconds,
        "host_bytes": on_host,
        "peak_host_bytes": memory_bytes("VmHWM") - before,
    }


def memory_bytes(name: str) -> int:
    """A figure of this process's memory; unlike getrusage's, its peak is not its parent's too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def run_alone(arguments: argparse.Namespace, task: str) -> dict[str, float]:
    command = [sys.executable, __file__, str(arguments.folder), "--task", task]
    for name in ("device", "group_size", "num_in_group"):
        command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    command += ["--packing"] if arguments.packing else []
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def report(arguments: argparse.Namespace, files: list[Path]) -> dict[str, object]:
    num_bytes = sum(file.stat().st_size for file in files)
    read_plainly(files, NUM_THREADS)
    runs: dict[str, list[dict[str, float]]] = {}
    for _ in range(arguments.repeats):  # in turn, so that a busy moment does not strike one alone
        for task in ("plain-1", f"plain-{NUM_THREADS}", "load"):
            runs.setdefault(task, []).append(run_alone(arguments, task))
    best = {task: min(found, key=lambda run: run["seconds"]) for task, found in runs.items()}
    plain = min(best["plain-1"]["seconds"], best[f"plain-{NUM_THREADS}"]["seconds"])
    return {
        "machine": describe_machine(arguments.device),
        "device": arguments.device,
        "rule": [arguments.group_size, arguments.num_in_group],
        "packing": arguments.packing,
        "file_bytes": num_bytes,
        "bytes_per_s": {task: num_bytes / run["seconds"] for task, run in best.items()},
        "share_of_plain_reads": plain / best["load"]["seconds"],
        "host_bytes": best["load"]["host_bytes"],
        "peak_host_bytes_above_start": best["load"]["peak_host_bytes"],
        "runs": runs,
    }


def describe_machine(device: str) -> dict[str, object]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(": ")[1] for line in lines if line.startswith("model name")), "")
    return {
        "cpu": cpu or platform.machine(),
        "num_cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--synthesize", type=Path, metavar="CONFIG_JSON")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--group-size", type=int, default=2)
    parser.add_argument("--num-in-group", type=int, default=1)
    parser.add_argument("--packing", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.synthesize is not None:
        synthesize(arguments.synthesize, arguments.folder)
    files = sorted(arguments.folder.glob("*.safetensors"))
    if arguments.task == "load":
        every = arguments.group_size, arguments.num_in_group
        done = load(arguments.folder, arguments.device, *every, packing=arguments.packing)
        print(json.dumps(done))
    elif arguments.task is not None:
        threads = int(arguments.task.removeprefix("plain-"))
        print(json.dumps({"seconds": read_plainly(files, threads)}))
    else:
        json.dump(report(arguments, files), sys.stdout, indent=2)
        print()


if __name__ == "__main__":
    main()

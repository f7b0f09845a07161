"""llama.cpp beside a plan: its own ``llama-bench``, in the plan's GPU memory."""

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from offplan.checkpoint.gguf.places import find_file, is_gguf
from offplan.checkpoint.gguf.read import (
    Header,
    describe_gguf,
    is_counted,
    num_layers,
    of_architecture,
    read_header,
)
from offplan.checkpoint.gguf.split import NOTHING, Split, choose_split
from offplan.checkpoint.model import Model
from offplan.errors import InputError, OffplanError
from offplan.files import StrPath
from offplan.plan import Plan
from offplan.progress import Stages
from offplan.records import Record
from offplan.runtime.measuring.bench import Bench, Measurement, PhaseCost, Spread
from offplan.runtime.memory.gpu_memory import bytes_in_use, return_memory

if TYPE_CHECKING:
    import torch

NAME = "llama.cpp"
"""The name of this way to run a workload."""
_PROGRAM = "llama-bench"
_OVERHEAD_BYTES = 1536 * 2**20
"""GPU memory beside weights and cache in the first short run, which measures it. Source: chosen, of
the 0.5 to 1.1 GiB seen of a context and buffers of computing."""
_PART_TOKENS = 512, 2048
"""Tokens of a prompt that llama.cpp reads at once: its default (``-ub``), and the most without
another option (``-b``)."""
_MOST_RUNS = 3
"""Runs in which the budget may be exceeded before the last one is taken as it is."""
_TOLERANCE = 0.02
"""Share of the layers' weights by which the file may differ from the plan's model."""
_POLL_S = 0.1


class _Row(Record):
    """One test of ``llama-bench -o json``. What is not needed here is passed over."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    build_commit: str
    build_number: int
    backends: str
    n_threads: int
    n_prompt: int
    n_gen: int
    n_depth: int
    samples_ns: tuple[float, ...] = Field(min_length=1)

    def spread(self) -> Spread:
        """Return the times of the prompt, or of a step."""
        return Spread.of([each * 1e-9 / max(1, self.n_gen) for each in self.samples_ns])


_ROWS = TypeAdapter(tuple[_Row, ...])


class _Run(NamedTuple):
    """What one run of ``llama-bench`` took."""

    row: _Row
    gpu_bytes: int | None
    command: str


@dataclass(frozen=True)
class LlamaBench:
    """A ``llama-bench`` and a GGUF file of a plan's model."""

    program: str
    file: Path
    """The file, or its first shard."""
    header: Header
    """The header of all shards."""
    budget_bytes: int
    """GPU memory that it may take."""
    cache_bytes: tuple[int, ...]
    """Bytes of each layer's keys and values in the plan's context."""
    part_tokens: int
    """Tokens of a prompt that it reads at once."""

    def measure(self, setup: Bench, on_stage: Stages) -> Measurement:
        """Measure the plan's prompt, and steps behind it.

        On a GPU a short run first measures what is taken beside weights and cache. Raises
        OffplanError where the program fails or prints what is not understood.
        """
        return_memory(setup.device)
        on_stage("measuring")(0, 1)
        split, steps = self._place(setup)
        # a run of both would read the prompt behind itself, too
        prompt = self._run(setup, split, setup.num_repeats)
        taken = [each.gpu_bytes for each in (prompt, steps) if each.gpu_bytes is not None]
        row = steps.row
        return Measurement(
            PhaseCost(prompt.row.spread(), None, None),
            PhaseCost(row.spread(), None, None),
            gpu_bytes=max(taken, default=None),
            told=f"build {row.build_number} ({row.build_commit}), {row.backends}, "
            f"{row.n_threads} threads: `{prompt.command}`, `{steps.command}`",
        )

    def _place(self, setup: Bench) -> tuple[Split, _Run]:
        """Find the split that the budget has room for; return it, and the steps that it took."""
        if setup.device.type != "cuda":
            return NOTHING, self._run(setup, NOTHING, setup.num_repeats, setup.num_steps)
        room = self.budget_bytes - _OVERHEAD_BYTES - self._logits_bytes()
        split = choose_split(self.header, self.cache_bytes, room)
        steps = self._run(setup, split, 1, setup.num_steps)
        # of the plan's context, which these runs do not fill
        unused = 1 - min(1.0, (setup.prompt.shape[-1] + setup.num_steps) / setup.context)
        for _ in range(_MOST_RUNS):
            taken = (steps.gpu_bytes or 0) + round(unused * split.cache_bytes)
            room = self.budget_bytes - max(0, taken - split.gpu_bytes)
            split = choose_split(self.header, self.cache_bytes, room)
            steps = self._run(setup, split, setup.num_repeats, setup.num_steps)
            if (steps.gpu_bytes or 0) + unused * split.cache_bytes <= self.budget_bytes:
                break
        return split, steps

    def _logits_bytes(self) -> int:
        """Return the bytes of a part's logits beyond those of the shortest: one of each token."""
        shapes = {tensor.name: tensor.shape for tensor in self.header.tensors}
        rows = max(shapes.get("token_embd.weight", (0,)))
        return (self.part_tokens - _PART_TOKENS[0]) * rows * 4  # float32

    def _run(self, setup: Bench, split: Split, num_repeats: int, num_steps: int = 0) -> _Run:
        """Run steps behind the prompt, or without any the prompt alone."""
        length = setup.prompt.shape[-1]
        num_prompt, depth = (0, length) if num_steps else (length, 0)
        threads = () if setup.host_threads is None else ("-t", str(setup.host_threads))
        command = (
            *(self.program, "-m", str(self.file), "-o", "json", "-r", str(num_repeats)),
            *(*split.options, "-ub", str(self.part_tokens), "-fa", "1", *threads),
            *("-p", str(num_prompt), "-n", str(num_steps), "-d", str(depth)),
        )
        text, gpu_bytes = _run_watched(command, setup.device)
        try:
            rows = {(r.n_prompt, r.n_gen, r.n_depth): r for r in _ROWS.validate_json(text)}
            row = rows[num_prompt, num_steps, depth]
        except (ValidationError, KeyError) as error:
            why = "no such test" if isinstance(error, KeyError) else error.errors()[0]["msg"]
            wanted = f"{num_steps} steps behind {depth}" if num_steps else f"a prompt of {length}"
            raise OffplanError(
                f"{self.program}: expected JSON with {wanted} tokens, found "
                f"{text.strip()[:60]!r} ({why}); take a llama-bench of 2025 or later"
            ) from None
        return _Run(row, gpu_bytes, shlex.join(command))


def find_llama_bench(
    plan: Plan, model: Model, gguf: StrPath | None, program: StrPath | None
) -> LlamaBench:
    """Find the program, and check that a GGUF file is of the plan's model.

    ``program`` is its path, None for that of PATH. Raises InputError for a plan of several
    sequences, a program or a file that is missing, and a file of another model.
    """
    if plan.workload.batch > 1:
        raise InputError(
            f"the plan's batch is {plan.workload.batch}, and llama-bench measures one sequence: "
            "compare a plan of one"
        )
    if gguf is None:
        raise InputError("name a GGUF file of the plan's model for llama.cpp: `gguf=FILE`")
    found = shutil.which(str(program or _PROGRAM))
    if found is None:
        named = f"{program}: found no such program" if program else f"no {_PROGRAM} is on PATH"
        raise InputError(
            f"{named}: install llama.cpp (its releases have it), and name the program where it is "
            "not on PATH: `llama_bench=FILE`"
        )
    path = Path(gguf)
    if not is_gguf(path):
        told = "another kind of file" if path.exists() else "no such file"
        raise InputError(f"{path}: found {told}, expected a GGUF file of {plan.model.source}")
    files = find_file(path).files
    headers = [read_header(file, str(file)) for file in files]
    header = Header(headers[0].metadata, tuple(t for each in headers for t in each.tensors))
    _check_model(path, header, model)
    context = plan.workload.context
    cache = tuple(layer.kv_cache.as_computed.nbytes(1, context) for layer in model.layers)
    # long parts read weights of the host less often, and take memory for every token's logits
    least, most = _PART_TOKENS
    part = max(least, min(plan.offload.prefill_chunk, most))
    return LlamaBench(found, files[0], header, plan.budget.gpu_memory, cache, part)


def _check_model(path: Path, header: Header, model: Model) -> None:
    """Raise InputError if a file has other layers than a model."""
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    last = num_layers(header.metadata)
    in_file = sum(
        tensor.num_elements
        for tensor in header.tensors
        if tensor.name.startswith("blk.") and is_counted(tensor.name, last, shapes)
    )
    expected = sum(p.num_weights for layer in model.layers for p in layer.parameters)
    width = of_architecture(header.metadata).get("embedding_length")
    widths = {model.config.get("hidden_size"), None, width}
    is_same = last == len(model.layers) and len(widths - {None}) < 2
    if not is_same or abs(in_file - expected) > _TOLERANCE * expected:
        raise InputError(
            f"{path}: found {describe_gguf(header, ()).facts}, expected {model.source}, "
            f"{model.model_type} of {len(model.layers)} layers with {expected:,} parameters in "
            "them; name a GGUF file of that model"
        )


def _run_watched(command: Sequence[str], device: "torch.device") -> tuple[str, int | None]:
    """Run a program on one GPU alone; return its output and the most that it took of the card."""
    import torch

    is_gpu, environment = device.type == "cuda", dict(os.environ)
    uuid = torch.cuda.get_device_properties(device).uuid if is_gpu else ""
    environment["CUDA_VISIBLE_DEVICES"] = f"GPU-{uuid}" if is_gpu else ""
    before = peak = bytes_in_use(device)
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise OffplanError(f"{command[0]}: cannot be started ({error.strerror})") from None
    with process:
        try:
            while True:
                try:
                    out, err = process.communicate(timeout=_POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    peak = max(peak, bytes_in_use(device))
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        last = " ".join(err.split()[-40:]) or "it printed nothing"
        raise OffplanError(f"`{shlex.join(command)}` ended with {process.returncode}: {last}")
    return out, peak - before if is_gpu else None

"""Faults as users see them: one line on stderr, the right exit code, no traceback."""

import errno
import gc
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import pytest
import torch

from offplan.cli import main
from offplan.cli.lines import Line, Results
from offplan.errors import OffplanError
from offplan.library import benchmark, sessions
from offplan.runtime.loading import loaded
from offplan.runtime.passes.runner import ModelRunner
from offplan.serve.requests import CompletionRequest
from tests.cli import CLI, ROOT, TINY_MOE
from tests.tiers import first_quick

PLAN = ROOT / "plans" / "tiny-moe.yaml"


def expect(cli: CLI, command: str, model: Path, code: int, message: str) -> None:
    found, out, err = cli(command, PLAN, "--model", model, "--device", "cpu")
    assert (found, out) == (code, "")
    assert message in err
    assert err.startswith("offplan: ")
    assert err.count("\n") == 1


COMMANDS = pytest.mark.parametrize("command", ["run", "bench"])


@COMMANDS
def test_a_truncated_shard(cli: CLI, copy: Path, command: str) -> None:
    shard = copy / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-7])
    expect(cli, command, copy, 2, "damaged or cut short")


@COMMANDS
def test_a_missing_shard(cli: CLI, copy: Path, command: str) -> None:
    (copy / "model-00002-of-00003.safetensors").unlink()
    expect(cli, command, copy, 2, "1 of 3 shards are missing")


@COMMANDS
def test_a_checkpoint_that_is_not_the_plans(cli: CLI, command: str) -> None:
    expect(cli, command, ROOT / "tests/models/qwen3-8b/config.json", 4, "plan it again")


@pytest.mark.slow
@COMMANDS
def test_files_exchanged_while_starting(
    cli: CLI, monkeypatch: pytest.MonkeyPatch, copy: Path, command: str
) -> None:
    def exchange(*_: object) -> Path:
        first, second = sorted(copy.glob("*.safetensors"))[:2]
        shutil.copy(first, second)
        return copy

    for module in (sessions, benchmark):
        monkeypatch.setattr(module, "find_weights", exchange)
    expect(cli, command, copy, 2, "has changed since its header was read")


@pytest.mark.slow
@COMMANDS
@pytest.mark.parametrize("method", first_quick(["__init__", "_allocate"]))
def test_gpu_out_of_memory(
    cli: CLI, monkeypatch: pytest.MonkeyPatch, command: str, method: str
) -> None:
    def run_out(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(ModelRunner, method, run_out)
    expect(cli, command, TINY_MOE, 1, "--gpu-memory")


@pytest.mark.slow
@COMMANDS
def test_an_interrupt(cli: CLI, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(loaded, "load_weights", interrupt)
    expect(cli, command, TINY_MOE, 130, "interrupted")


def test_memory_is_left_to_the_system_where_nobody_calls_that_a_leak(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frozen = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append("triton" in sys.modules))
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    main._leave_garbage()
    monkeypatch.delitem(sys.modules, "triton")
    main._leave_garbage()
    assert frozen == [False]


@pytest.mark.slow
def test_ctrl_c_while_generating() -> None:
    """A real signal to a real process, while it prints what it generates."""
    # a shell has what it runs in the background ignore the signal, and so have its children
    command = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from offplan.cli.main import main; main()"
    )
    arguments = [
        "run",
        str(PLAN),
        "--model",
        str(TINY_MOE),
        "--device",
        "cpu",
        "--prompt",
        "Weights",
    ]
    process = subprocess.Popen(
        [sys.executable, "-c", command, *arguments, "--prompt", "Weights"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    assert process.stdout.read(len("Weights that")) == "Weights that"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert err.endswith("offplan: interrupted\n")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("why", "code", "advice"), [(errno.ENOSPC, 1, "make room"), (errno.EROFS, 2, "another folder")]
)
def test_an_output_that_cannot_be_is_named_before_the_work(
    cli: CLI, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, why: int, code: int, advice: str
) -> None:
    def refuse(**_: object) -> None:
        raise OSError(why, os.strerror(why))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    path = tmp_path / "p.yaml"
    got = cli("analyze", TINY_MOE, "--machine", "cpu", "-o", path)
    assert (got.code, got.out) == (code, "")
    assert f"{path} cannot be written ({os.strerror(why)})" in got.err
    assert advice in got.err


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system of the kernel's")
def test_an_output_among_processes(cli: CLI) -> None:
    got = cli("analyze", TINY_MOE, "--machine", "cpu", "-o", "/proc/x.yaml")
    assert got.code == 2
    assert "/proc/x.yaml cannot be written (" in got.err


class FullDisk(io.StringIO):
    def flush(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_results_on_a_disk_that_gets_full(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    line = Line(1, {"prompt": "a"}, CompletionRequest(prompt=["a"]))
    results = Results(path, [line], "", force=False)
    with results:
        pass
    results._file = FullDisk()
    with pytest.raises(OffplanError, match=rf"{path} cannot be written \(No space left"):
        results.write(line, {})


@pytest.mark.slow
def test_a_full_standard_output() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "offplan", "show", str(PLAN)]
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, cwd=ROOT
        )
    assert done.returncode == 1
    assert "standard output cannot be written (No space left on device)" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_python_without_docstrings() -> None:
    command = [sys.executable, "-OO", "-m", "offplan", "machines"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 2
    assert "unset PYTHONOPTIMIZE" in done.stderr
    assert done.stderr.count("\n") == 1

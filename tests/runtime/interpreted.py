"""Tests of kernels, run by Triton's interpreter where there is no GPU."""

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton interprets: how ``run_interpreted`` starts a file again."""
HAS_GPU = torch.cuda.is_available()
runs_kernels = pytest.mark.skipif(
    not HAS_GPU and not INTERPRETED, reason="no CUDA device here; test_interpreted.py runs it"
)


def patch_once() -> None:
    """Have the interpreter patch Triton's language once for each module, and leave it so.

    It would look through the whole language at each call of a device function, of which a program
    makes dozens: a third of the time that the kernels take.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    scopes: dict[int, Any] = {}

    def find_patched(function: Any) -> Any:
        module = id(function.__globals__)
        if module not in scopes:
            scopes[module] = patch(function)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = find_patched


if INTERPRETED:
    patch_once()


def need_triton() -> None:
    """Skip a test where Triton is not installed; in CI, which installs it, the test fails."""
    if os.environ.get("CI"):
        importlib.import_module("triton")
    pytest.importorskip("triton")


TARGETS = [80, 89, 90, 120]
"""Compute capabilities of GPUs that kernels are compiled for where there is none."""


def compile_kernel(
    kernel: Any,
    target: int,
    kinds: Mapping[str, Any],
    constants: Mapping[Any, Any],
    options: dict[str, int] | None = None,
    aligned: Collection[str | tuple[int, int]] = (),
) -> Any:
    """Compile a kernel for a compute capability, and return what Triton made; Triton is there.

    ``kinds`` are types of arguments by name, those left out are numbers of 32 bits. ``constants``
    are values by name, or by the places of an argument and of a field in it. ``aligned`` arguments,
    named likewise, are multiples of 16.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    named = [name for name in constants if isinstance(name, str)]
    signature = {name: kinds.get(name, "i32") for name in kernel.arg_names}
    signature |= dict.fromkeys(named, "constexpr")
    places = [(kernel.arg_names.index(at),) if isinstance(at, str) else at for at in aligned]
    by_16 = {place: [["tt.divisibility", 16]] for place in places}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=by_16)
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)


def spilled_bytes(made: Any, target: int, folder: Path) -> int:
    """Bytes of registers that ptxas has each thread store in memory."""
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    path = folder / "kernel.ptx"
    path.write_text(made.asm["ptx"])
    named = ["--gpu-name", sm_arch_from_capability(target), str(path), "-o", str(folder / "cubin")]
    command = [get_ptxas(target).path, "-v", "--regAllocOptLevel=2", *named]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"(\d+) bytes spill stores", done.stderr)
    assert found, done.stderr
    return int(found[1])


def compile_ptx(*arguments: Any, **others: Any) -> str:
    """Return the PTX of what ``compile_kernel`` makes."""
    return str(compile_kernel(*arguments, **others).asm["ptx"])


def run_interpreted(path: str, tier: str = "not sweep") -> str:
    """Run a file's tests with kernels interpreted; return what pytest prints, no test failing.

    ``tier`` is which of them, as ``-m`` takes it.

    Triton decides at its import whether it interprets, so that takes another process: one without
    workers of its own, for few tests.
    """
    need_triton()
    # --noconftest: that has the command line imported, and a dozen families
    options = ["--noconftest", "-p", "no:cacheprovider", "-n", "0", "-m", tier]
    command = [sys.executable, "-m", "pytest", *options, path]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout

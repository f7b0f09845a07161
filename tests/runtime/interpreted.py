"""Tests of kernels, run by Triton's interpreter where there is no GPU."""

import importlib
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton interprets: how ``run_interpreted`` starts a file again."""
HAS_GPU = torch.cuda.is_available()
runs_kernels = pytest.mark.skipif(not HAS_GPU and not INTERPRETED, reason="no CUDA device here")
runs_itself = pytest.mark.skipif(
    HAS_GPU or INTERPRETED, reason="the file's other tests run themselves"
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


def run_interpreted(path: str, named: str = "", tier: str = "not sweep") -> str:
    """Run a file's tests with kernels interpreted, all or those ``named`` so, as ``-k`` takes it.

    Returns what pytest prints, no test failing. ``tier`` is which of them, as ``-m`` takes it.

    Triton decides at its import whether it interprets, so that takes another process: one without
    workers of its own, for few tests.
    """
    need_triton()
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-n",
        "0",
        path,
        "-k",
        named,
        "-m",
        tier,
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout

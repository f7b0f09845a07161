"""Tests of kernels, run by Triton's interpreter where there is no GPU."""

import importlib
import os
import subprocess
import sys

import pytest


def need_triton() -> None:
    """Skip a test where Triton is not installed; in CI, which installs it, the test fails."""
    if os.environ.get("CI"):
        importlib.import_module("triton")
    pytest.importorskip("triton")


def run_interpreted(path: str, named: str = "") -> str:
    """Run a file's tests with kernels interpreted, all or those ``named`` so, as ``-k`` takes it.

    Returns what pytest prints, no test failing.

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
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout

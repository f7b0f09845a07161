"""Threads of the CPU where other processes are busy."""

import os
from pathlib import Path

import pytest
import torch

from offplan.cli import main, threads
from tests.cli import CLI, ROOT
from tests.hostcores.cores import require_cores

RUN = ("run", ROOT / "plans" / "tiny-moe.yaml", "--prompt", "Weights", "--device", "cpu")


@pytest.mark.parametrize(
    ("load", "cores", "set_to", "expected"),
    [
        (0.2, 8, None, 8),
        (3.4, 8, None, 5),
        (7.9, 8, None, 1),
        (40.0, 8, None, 1),
        (40.0, 8, "8", 8),
    ],
)
def test_threads_are_as_many_as_idle_cores(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    load: float,
    cores: int,
    set_to: str | None,
    expected: int,
) -> None:
    chosen = [8]
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(threads, "count_cores", lambda: cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if set_to is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", set_to)
    threads.settle_threads("cpu")
    assert chosen[-1] == expected
    told = f"busy on this machine's {cores} cores: computing with {expected} of 8 threads"
    assert (told in capsys.readouterr().err) == (expected < 8)
    threads.settle_threads("cuda:0")
    assert chosen[-1] == expected


@pytest.mark.slow
def test_a_run_beside_other_work_says_so(cli: CLI, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(threads, "find_idle_cores", lambda: 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    code, _, err = cli(*RUN)
    assert (code, chosen) == (0, [1])
    assert "computing with 1 of 4 threads" in err


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "1000"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "active"}, None),
    ],
)
def test_threads_that_wait_sleep_soon_unless_told(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: str | None
) -> None:
    monkeypatch.setattr(os, "environ", environment := dict(given))
    main._let_waiting_threads_sleep()
    assert environment.get("GOMP_SPINCOUNT") == expected


@pytest.mark.slow
def test_threads_of_a_plan_are_of_this_hosts_cores(cli: CLI) -> None:
    require_cores()
    config = ROOT / "benchmarks" / "models" / "gpt-oss-20b" / "config.json"
    code, out, err = cli("plan", config, "--host-cores", "--host-threads", 1 << 20)
    assert (code, out) == (1, "")
    assert "1048576 threads are asked for: ask for" in err
    there = ("--machine", "rtx4090", "--gpu-memory", "8GiB", "--host-threads", 64)
    code, out, err = cli("analyze", config, "--no-host-cores", *there)
    assert (code, out) == (2, "")
    assert "--host-threads 64 with --no-host-cores" in err
    code, out, err = cli("analyze", config, *there)
    assert code == 0
    assert "host's cores read 60 GB/s with 64 threads (estimated: " in " ".join(out.split())


@pytest.mark.slow
def test_a_plan_is_made_again_without_the_hosts_cores(cli: CLI, tmp_path: Path) -> None:
    config = ROOT / "benchmarks" / "models" / "gpt-oss-20b" / "config.json"
    there = ("--machine", "rtx4090", "--gpu-memory", "8GiB")
    cores, without = tmp_path / "cores.yaml", tmp_path / "without.yaml"
    asked = ("--host-cores", "--host-threads", 4)
    assert cli("plan", config, *there, *asked, "-o", cores).code == 0
    assert cli("plan", config, *there, "--no-host-cores", "-o", without).code == 0
    assert "decode: host" in cores.read_text()
    code, out, _ = cli("replan", cores)
    assert (code, out) == (0, cores.read_text())
    code, out, _ = cli("replan", cores, "--no-host-cores")
    assert (code, out) == (0, without.read_text())
    code, out, _ = cli("replan", without)
    assert (code, out) == (0, without.read_text())  # what was asked for stays
    code, out, _ = cli("replan", without, "--host-cores")
    assert code == 0
    assert "decode: host" in out

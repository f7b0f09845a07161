"""``offplan serve`` as a process: it starts, drains and ends."""

import os
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from offplan.cli.serve import _name_model
from tests.cli import CLI, RULES, TINY_MOE, write_plan
from tests.warm import COMMAND, Process, Warm

TIMEOUT_S = 60.0


def test_what_is_refused_before_loading(cli: CLI, tmp_path: Path) -> None:
    plan = write_plan(tmp_path, RULES["resident"])
    code, _, err = cli("serve", plan, "--host", "0.0.0.0")
    assert (code, "--insecure" in err) == (2, True)
    code, _, err = cli("serve", plan, "--api-key", "clé")
    assert (code, "printable" in err) == (2, True)
    code, _, err = cli("serve", plan, "--host", "256.1.1.1", "--api-key", "key")
    assert (code, "cannot listen on 256.1.1.1" in err) == (1, True)


def test_the_name_of_a_model_is_no_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    for source, name in (
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        (str(TINY_MOE), "tiny-moe"),
        (str(TINY_MOE / "config.json"), "tiny-moe"),
        ("./here", "here"),
        ("here", "here"),
        (".", tmp_path.name),
        ("/", "model"),
    ):
        assert _name_model(source) == name


@contextmanager
def serving(warm: Warm, plan: Path) -> Iterator[Process]:
    """Serve a plan on a free port, in a process whose notes come through a pipe."""
    with warm.open(COMMAND, "serve", plan, "--device", "cpu", "--port", "0") as process:
        yield process


@pytest.mark.slow
def test_a_process_whose_notes_nobody_reads_ends(warm: Warm, tmp_path: Path) -> None:
    plan = write_plan(tmp_path, RULES["mixed"])
    with serving(warm, plan) as process:
        find_url(process)
        assert process.stderr
        process.stderr.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_a_process_serves_until_a_signal(warm: Warm, tmp_path: Path, end: signal.Signals) -> None:
    plan = write_plan(tmp_path, RULES["mixed"])
    with serving(warm, plan) as process:
        url = find_url(process)
        with urllib.request.urlopen(f"{url}/health", timeout=TIMEOUT_S) as response:
            assert response.status == 200
        process.send_signal(end)
        code = process.wait(TIMEOUT_S)
        assert process.stderr
        assert (code, "no more requests are taken" in process.stderr.read()) == (0, True)


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_it_listens_before_it_loads_and_a_signal_ends_that(
    warm: Warm, cli: CLI, tmp_path: Path, end: signal.Signals
) -> None:
    plan, pipe = write_plan(tmp_path, RULES["resident"]), tmp_path / "pipe.yaml"
    os.mkfifo(pipe)  # nobody writes to it, and the plan is read for ever
    with serving(warm, pipe) as process:
        assert process.stderr
        found = re.search(r"listening at http://127.0.0.1:(\d+), which", process.stderr.readline())
        assert found
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"http://127.0.0.1:{found[1]}/health", timeout=TIMEOUT_S)
        with refused.value as response:
            assert (response.code, response.read()) == (503, b'{"status":"loading"}')
        code, _, err = cli("serve", plan, "--port", found[1])
        assert (code, "cannot listen on 127.0.0.1 port" in err) == (1, True)
        process.send_signal(end)
        assert (process.wait(TIMEOUT_S), process.stderr.read()) == (130, "offplan: interrupted\n")


def find_url(process: Process) -> str:
    """Read what a server says, until it says where it is."""
    assert process.stderr
    for line in process.stderr:
        if found := re.search(r"tiny-moe is served at (http://127\.0\.0\.1:\d+)/v1: 1 at a", line):
            return found[1]
    raise AssertionError("it ended before it was ready")

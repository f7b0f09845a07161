"""``run``, ``serve`` and ``chat`` of a model: planned here, asked about, downloaded and kept."""

import os
import pty
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.hub_server import COMMIT, REPO, Hub, start
from tests.cli import CLI, ROOT, TINY_MOE
from tests.serve import TEMPLATE
from tests.warm import COMMAND, TORCH, Warm

HERE = ("--device", "cpu", "--context", "64")
TEXT = "Weights that do not fit the GPU\n"
PROMPT = ("--prompt", "Weights", "--max-new-tokens", "24")
ASKS = "import offplan.library.model_plans as m; m.ASKED_BYTES = 1000; "
"""Has the tiny checkpoint asked about as others are."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub({path.name: path.read_bytes() for path in TINY_MOE.iterdir() if path.is_file()})
    hub.files["chat_template.jinja"] = TEMPLATE.encode()
    server = start(hub)
    yield hub
    hub.released.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def calls(hub: Hub, tmp_path: Path) -> Iterator[Any]:
    """Processes with a Hub and a home of their own."""
    environment = {key: v for key, v in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    environment |= {"NO_PROXY": "127.0.0.1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    with closing(Warm(TORCH, environment)) as warm:
        yield warm


@pytest.mark.slow
def test_a_model_of_the_hub_is_asked_about_once_planned_once_and_run(
    hub: Hub, calls: Warm, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.yaml"
    asked = ("run", REPO, *HERE, *PROMPT)
    refused = calls.run(ASKS + COMMAND, *asked)
    assert (refused.returncode, refused.stdout) == (2, "")
    # what it would be comes first, and then what it takes
    assert "tokens a second" in refused.stderr
    assert f"{REPO}: 877.5 KiB are to be downloaded to " in refused.stderr
    assert "no terminal to ask at: add --yes" in refused.stderr
    assert not list((tmp_path / "home").rglob("*.safetensors"))
    done = calls.run(ASKS + COMMAND, *asked, "--yes", "-o", plan)
    assert (done.returncode, done.stdout) == (0, TEXT), done.stderr
    assert f"revision: {COMMIT}" in plan.read_text()
    assert "planned before: " in done.stderr
    hub.requests.clear()
    again = calls.run(ASKS + COMMAND, *asked)
    assert (again.returncode, again.stdout) == (0, TEXT), again.stderr
    assert not hub.shard_gets()
    by_file = calls.run(COMMAND, "run", plan, "--device", "cpu", *PROMPT)
    assert (by_file.returncode, by_file.stdout) == (0, TEXT), by_file.stderr


@pytest.mark.slow
def test_chat_and_serve_take_a_model(hub: Hub, calls: Warm) -> None:
    talked = calls.run(COMMAND, "chat", REPO, *HERE, "--max-new-tokens", "2", given=b"hello\n")
    assert (talked.returncode, "made 2" in talked.stderr) == (0, True), talked.stderr
    for more, planned, rows in (
        ((), "planned before: ", "1 at a time"),
        (("--batch", "3"), "Runs on ", "3 at a time"),
    ):
        with calls.open(COMMAND, "serve", REPO, *HERE, *more, "--port", "0") as process:
            assert process.stderr is not None
            lines = []
            for line in process.stderr:
                lines.append(line)
                if f"{REPO} is served at http://" in line:
                    break
            assert any(planned in line for line in lines)
            assert rows in lines[-1]
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plans/tiny-moe.yaml", "--batch", 2), "--batch is for a model: plans/tiny-moe.yaml is a"),
        (("plans/tiny-moe", "--batch", 10**7), "contexts of 4096 tokens are more than"),
    ],
)
def test_a_batch_is_for_a_model_to_serve(
    cli: CLI, arguments: tuple[Any, ...], message: str
) -> None:
    code, _, err = cli("serve", *arguments, "--port", 0, "--device", "cpu")
    assert (code, message in err) == (2, True), err


@pytest.mark.slow
def test_offline_and_gated_models_say_what_to_do(hub: Hub, calls: Warm, tmp_path: Path) -> None:
    asked = ("run", REPO, *HERE, *PROMPT)
    hub.statuses, hub.error_code = {"config.json": [403]}, "GatedRepo"
    gated = calls.run(COMMAND, *asked)
    assert (gated.returncode, gated.stdout) == (2, "")
    assert "the model is gated, and no token is set; accept its terms at " in gated.stderr
    hub.statuses = {}
    assert calls.run(ASKS + COMMAND, *asked).returncode == 2
    unasked = "from huggingface_hub import constants; constants.HF_HUB_OFFLINE = True; "
    offline = calls.run(unasked + COMMAND, *asked)
    assert (offline.returncode, offline.stdout) == (2, "")
    assert "877.5 KiB of weights are not in " in offline.stderr
    assert "HF_HUB_OFFLINE is set: unset it to fetch them, or name a folder" in offline.stderr
    full = "import shutil; shutil.disk_usage = lambda _: shutil._ntuple_diskusage(1, 1, 0); "
    without_room = calls.run(full + COMMAND, *asked)
    assert without_room.returncode == 2
    assert "its disk has 0 B left: make room, or set HF_HOME" in without_room.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("typed", "code"), [("y\n", 0), ("n\n", 1)])
def test_a_terminal_is_asked(hub: Hub, calls: Warm, tmp_path: Path, typed: str, code: int) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    os.write(ours, typed.encode())
    asked = ("run", REPO, *HERE, *PROMPT)
    command = [sys.executable, "-c", ASKS + COMMAND, *asked]
    done = subprocess.Popen(
        command, env=environment, stdin=theirs, stdout=subprocess.PIPE, stderr=theirs
    )
    os.close(theirs)
    seen = b""
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # the terminal's other end is closed
            break
        seen += piece
    os.close(ours)
    text = done.communicate(timeout=120)[0].decode()
    assert (done.returncode, text) == (code, TEXT if code == 0 else "")
    shown = seen.decode()
    assert f"{REPO}: 877.5 KiB are to be downloaded to " in shown
    assert ". Go on? [Y/n] " in shown
    assert ("fetching weights, MiB [" in shown) == (code == 0)
    assert ("nothing was downloaded" in shown) == (code == 1)


@pytest.mark.slow
def test_a_folder_is_planned_and_the_plan_kept(
    cli: CLI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path))
    plan, asked = tmp_path / "plan.yaml", ("run", TINY_MOE, *HERE, "--gpu-memory", "1MiB", *PROMPT)
    first = cli(*asked, "-o", plan)
    assert (first.code, first.out) == (0, TEXT), first.err
    again = cli(*asked)
    assert (again.code, "planned before: " in again.err) == (0, True)
    # another question has another plan
    other = cli(*asked, "--gpu-memory", "2MiB")
    assert "planned before: " not in other.err
    # the file is as one of `plan`
    assert cli("run", plan, "--device", "cpu", *PROMPT).out == TEXT
    exists = cli(*asked, "-o", plan)
    assert (exists.code, f"{plan} exists; --force overwrites it" in exists.err) == (2, True)
    small = cli("run", TINY_MOE, *HERE, "--gpu-memory", "10KiB", *PROMPT)
    assert (small.code, small.out) == (3, "")
    assert "more are needed" in small.err


@pytest.mark.gpu
@pytest.mark.slow
def test_a_gpu_is_measured_once(cli: CLI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path))
    # within all of it: this process may have a context, and then counts what other workers hold
    asked = ("run", TINY_MOE, "--context", 64, *PROMPT)
    for told in ("Runs on ", "planned before: "):
        done = cli(*asked)
        assert (done.code, done.out, told in done.err) == (0, TEXT, True), done.err


def test_what_contradicts_itself_is_refused(
    cli: CLI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, config = ROOT / "plans" / "tiny-moe.yaml", tmp_path / "config.json"
    shutil.copy(TINY_MOE / "config.json", config)
    monkeypatch.setattr("offplan.library.model_plans.has_gpu", lambda: False)
    for asked, told in (
        ((plan, "--context", "64"), "--context is for a model: "),
        ((plan, "--machine", "cpu"), "--machine is for a model: "),
        ((TINY_MOE, "--model", TINY_MOE), "--model is for a plan: "),
        ((TINY_MOE,), "no NVIDIA GPU that CUDA can use was found here: --device cpu runs"),
        ((config, *HERE), "has no weights: name a folder with weights"),
        ((tmp_path / "no.yaml",), "No such file or directory"),
    ):
        done = cli("run", *asked, *PROMPT)
        assert (done.code, done.out) == (2, ""), asked
        assert told in done.err
    assert cli("chat", plan, "-o", tmp_path / "a.yaml").code == 2


def test_a_name_of_ollamas_library_is_the_hubs_model() -> None:
    from offplan.library.model_plans import find_id, names_model

    ids = {"gpt-oss:120b": "openai/gpt-oss-120b", "ollama run qwen3:8b": "Qwen/Qwen3-8B"}
    assert {name: find_id(name) for name in ids} == ids
    assert [find_id(name) for name in ("gpt2", "org/name", "my:1b")] == [
        "gpt2",
        "org/name",
        "my:1b",
    ]
    models = ("gpt-oss:120b", "org/name", TINY_MOE, TINY_MOE / "config.json", "hf.co/org/name")
    assert all(names_model(str(name)) for name in models)
    plans = ("plan.yaml", "-", ROOT / "plans", ROOT / "plans" / "tiny-moe.yaml", ROOT / "README.md")
    assert not any(names_model(str(name)) for name in plans)

"""Odd names, prompts, streams and locales: a line on stderr, never a traceback."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from offplan.cli import output
from offplan.runtime.session import Session
from tests.cli import CLI, ROOT, RULES, TINY_MOE, write_plan
from tests.rendering import show
from tests.warm import COMMAND, Warm

RUNS = "offplan: Runs on CPU: "
PROFILE = ROOT / "offplan" / "machine" / "profiles" / "cpu.yaml"
ODD = ["a\x1b[31mb", "a\udcffb", "a\u202eb"]


@pytest.mark.slow
def test_names_are_no_markup(cli: CLI, tmp_path: Path) -> None:
    machine = tmp_path / "machine.yaml"
    text = PROFILE.read_text("utf-8").replace("name: CPU", "name: 'CPU [/x] [red] :smile:'")
    machine.write_text(text, "utf-8")
    name = "me/[/x][b]"
    code, out, _ = cli("analyze", TINY_MOE, "--source", name, "--machine", machine)
    assert code == 0
    assert out.startswith("Runs on CPU [/x] [red] :smile:: ")
    assert f"{name}: deepseek_v2" in out
    assert "It fits CPU [/x] [red] :smile:: " in out


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("option", ["--source", "--revision", "--machine", ""])
def test_names_that_cannot_be_printed_are_refused(cli: CLI, option: str, name: str) -> None:
    arguments = [option, name] if option else []
    code, out, err = cli("plan", TINY_MOE if option else name, "--machine", "cpu", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err[:-1].isprintable()


@pytest.mark.parametrize("key", ["source: ", "dtype: ", "  name: ", "offplan: ", "goal: {"])
@pytest.mark.parametrize("odd", [r"\e[31m", r"\ud800", r"\u202e"])
def test_nothing_odd_of_a_plan_reaches_the_terminal(
    cli: CLI, tmp_path: Path, key: str, odd: str
) -> None:
    path = write_plan(tmp_path, "[]")
    after = ": 1, " if key.endswith("{") else " #"  # a key, or a value in another's place
    path.write_text(path.read_text("utf-8").replace(key, f'{key}"{odd}"{after}', 1), "utf-8")
    code, out, err = cli("run", path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "cannot be printed" in err
    assert err[:-1].isprintable()


@pytest.mark.parametrize("text", ODD)
def test_reports_and_notes_are_printable(capsys: pytest.CaptureFixture[str], text: str) -> None:
    output.print_note(text)
    shown = show(text) + capsys.readouterr().err
    assert shown.count("a\\") == 2
    assert shown.replace("\n", "").isprintable()


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", "[]"),
        ("tokenizer.json", '{"model": 7}'),
        ("tokenizer_config.json", '{"tokenizer_class": [1]}'),
        ("tokenizer_config.json", "[1]"),
        ("generation_config.json", '{"eos_token_id": "abc"}'),
        ("generation_config.json", '{"eos_token_id": [[1]]}'),
        ("generation_config.json", "[1]"),
        ("generation_config.json", '{"num_beams": 2}'),
        ("generation_config.json", '{"repetition_penalty": 1.1}'),
    ],
)
def test_files_of_odd_types(cli: CLI, copy: Path, tmp_path: Path, file: str, content: str) -> None:
    (copy / file).write_text(content, "utf-8")
    plan = write_plan(tmp_path, RULES["resident"])
    arguments = ("--prompt", "We", "--max-new-tokens", 1, "--device", "cpu")
    code, _, err = cli("run", plan, "--model", copy, *arguments)
    assert code in (0, 2)
    assert "Traceback" not in err
    if code:
        assert err.endswith("\n")
        assert file.split("_")[0].split(".")[0] in err


def test_tokens_past_the_vocabulary(cli: CLI, copy: Path) -> None:
    path = copy / "tokenizer.json"
    data = json.loads(path.read_text("utf-8"))
    vocabulary = data["model"]["vocab"]
    vocabulary["W"] = 10**6
    path.write_text(json.dumps(data), "utf-8")
    plan = ROOT / "plans" / "tiny-moe.yaml"
    code, _, err = cli("run", plan, "--model", copy, "--prompt", "W", "--device", "cpu")
    assert (code, "makes token 1000000 of the prompt, and the model has" in err) == (2, True)


@pytest.mark.slow
def test_a_prompt_in_any_locale(cli: CLI) -> None:
    plan = ROOT / "plans" / "tiny-moe.yaml"
    prompt = os.fsencode("né").decode("ascii", "surrogateescape")
    arguments = ("--max-new-tokens", 1, "--device", "cpu")
    code, _, err = cli("run", plan, "--prompt", prompt, *arguments)
    assert code == 0, err
    code, _, err = cli("run", plan, "--prompt", "\ud800", *arguments)
    assert (code, "is not a text: type it in UTF-8" in err) == (2, True)


def run(shell: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command line as ``"$@"`` in a shell."""
    command = ["bash", "-c", shell, "bash", sys.executable, "-c", COMMAND]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=120
    )


SHIPPED = ROOT / "plans" / "tiny-moe.yaml"
MAKE = f'"$@" plan {TINY_MOE} --machine cpu'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shell", "code"),
    [
        (f"{MAKE} | true; exit ${{PIPESTATUS[0]}}", 141),
        (f"{MAKE} | head -c1 > /dev/null; exit ${{PIPESTATUS[0]}}", 0),
        (f"{MAKE} <&- >&- 2>&-", 1),
        (f"{MAKE}x 2>&-", 2),
    ],
)
def test_streams_that_nobody_reads(shell: str, code: int) -> None:
    done = run(shell)
    assert done.returncode == code
    assert not done.stderr if "2>&-" in shell else done.stderr.startswith(RUNS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        f"plan {TINY_MOE} --machine cpu",
        f"analyze {TINY_MOE} --machine cpu --json",
        f"show {SHIPPED}",
        f"check {SHIPPED} --file-only",
        f"replan {SHIPPED}",
        f"report {SHIPPED} -o -",
        f"run {SHIPPED} --device cpu --prompt x",
        f"run {SHIPPED} --device cpu --prompt x --json",
        f"bench {SHIPPED} --device cpu",
        "measure --device cpu",
        "machines",
        "schema",
        "--version",
        "plan --help",
    ],
)
def test_a_result_for_a_closed_stdout(command: str) -> None:
    done = run(f'"$@" {command} >&-')
    assert done.returncode == 1
    *_, told = done.stderr.splitlines()
    assert told.startswith("offplan: standard output is closed, and the result would be printed")


@pytest.mark.slow
def test_a_closed_stdout_that_nothing_is_printed_to(tmp_path: Path) -> None:
    done = run(f"{MAKE} -o {tmp_path / 'plan.yaml'} >&-")
    assert (done.returncode, (tmp_path / "plan.yaml").is_file()) == (0, True), done.stderr


@pytest.mark.slow
def test_what_tokenizers_prints_is_no_part_of_the_result(warm: Warm, copy: Path) -> None:
    odd = {"__type": "AddedToken", "content": "<|end|>", "direction": "left"}
    config = copy / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text("utf-8")), "eos_token": odd}))
    plan = ROOT / "plans" / "tiny-moe.yaml"
    arguments = "--prompt We --max-new-tokens 1 --device cpu --json"
    done = warm.run(COMMAND, "run", plan, "--model", copy, *arguments.split())
    assert (done.returncode, json.loads(done.stdout)["text"]) == (0, "i")
    assert "unknown kwarg" in done.stderr
    closed = run(f'"$@" run {plan} --model {copy} {arguments} <&- >&- 2>&-')
    assert closed.returncode == 1


def test_help_that_nobody_reads() -> None:
    assert run('"$@" plan -h | true; exit ${PIPESTATUS[0]}').returncode in (0, 141)


def test_the_module_is_the_program() -> None:
    done = subprocess.run([sys.executable, "-m", "offplan", "--version"], capture_output=True)
    assert (done.returncode, done.stdout[:8]) == (0, b"offplan ")


@pytest.mark.slow
def test_a_full_disk_for_stdout() -> None:
    done = run(f"{MAKE} > /dev/full")
    assert done.returncode == 1
    told = "standard output cannot be written (No space left on device): make room where it leads"
    assert done.stderr.endswith(f"\noffplan: {told}\n")


@pytest.mark.slow
def test_the_c_locale() -> None:
    done = run(f"{MAKE} --source 'é'", LC_ALL="C", PYTHONUTF8="0")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    done = run(f'"$@" analyze {TINY_MOE} --machine cpu', LC_ALL="C", PYTHONUTF8="0")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        ("KeyboardInterrupt", 130, "interrupted\n"),
        ("MemoryError", 1, "out of memory: raise the limit"),
        ('RuntimeError("can\'t start new thread")', 1, "out of memory (can't start new thread): "),
        ('ImportError("advice\\n\\nno room\\n")', 1, "a module cannot be used (no room): "),
        ('SystemError("no exception")', 1, "a module cannot be used (no exception): "),
    ],
)
@pytest.mark.parametrize("module", ["typer", "pydantic"])
def test_faults_while_modules_are_imported(module: str, error: str, code: int, told: str) -> None:
    program = (
        "import sys\n"
        "class Fault:\n"
        "    def find_spec(self, name, path, target=None):\n"
        f"        if name == {module!r}:\n"
        "            try:\n"
        f"                raise {error}\n"
        "            except KeyboardInterrupt as stopped:\n"  # as transformers does
        "                raise ImportError from stopped\n"
        "sys.meta_path.insert(0, Fault())\n"
        f"sys.argv = ['offplan', 'plan', {str(TINY_MOE)!r}]\n{COMMAND}"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (code, 1)
    assert done.stderr.startswith(f"offplan: {told}")


@pytest.mark.slow
def test_generating_ends_where_nobody_reads(cli: CLI, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with suppress(BrokenPipeError), open(writer, "w", encoding="utf-8") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        steps: list[int] = []
        decode = Session.decode
        monkeypatch.setattr(Session, "decode", lambda *a: steps.append(1) or decode(*a))
        plan = ROOT / "plans" / "tiny-moe.yaml"
        code, _, err = cli("run", plan, "--prompt", "Weights that", "--device", "cpu")
        assert (code, err) == (141, "")
        assert not steps

"""Questions whose answers a change of the code alone leaves byte for byte. This renews them:

    python -m tests.golden

They cover each capability, pair of capabilities, stored form, engine and refusal.
"""

import contextlib
import hashlib
import io
import json
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from offplan.cli.main import main

HERE = Path(__file__).parent
MODELS: dict[str, Any] = yaml.safe_load((HERE / "models.yaml").read_bytes())


def questions(model: str) -> Iterator[str]:
    """List what a model is asked, as the command line takes it."""
    for group in yaml.safe_load((HERE / "questions.yaml").read_bytes())["asked"][model]:
        yield from group


def read_answers(model: str) -> dict[str, Any]:
    """Read the answers that a model's questions had, by question."""
    answers: dict[str, Any] = yaml.safe_load((HERE / f"{model}.yaml").read_bytes())
    return answers


def answer(model: str, question: str, folder: Path) -> dict[str, Any]:
    """Ask a question about a model, in an empty folder.

    Returns the plan as its file has it; what the command says where there is no plan; and SHA-256
    of the rest: the report for scripts, the plan's terms, and the engine's command. Whether the
    model runs is left out of the report: that depends on the transformers that is installed.
    """
    config = folder / model / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps(MODELS[model]))
    plan = folder / "plan.yaml"
    asked = shlex.split(question)
    with _in_folder(folder):
        code, out, err = _call("analyze", f"{model}/config.json", *asked, "--json", "-o", plan.name)
        found: dict[str, Any] = {"exit": code}
        if not plan.exists():
            return found | {"said": err.strip(), "json": _digest(_report(out))}
        found |= {"plan": plan.read_text("utf-8"), "json": _digest(_report(out))}
        found["explained"] = _digest(_call("explain", plan.name)[1])
        if "--for" in asked:
            engine = asked[asked.index("--for") + 1]
            said = map(str, _call("export", plan.name, "--engine", engine))
            found["exported"] = _digest(*(each.replace(str(folder), "") for each in said))
    return found


@contextlib.contextmanager
def _in_folder(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _call(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with (
        patch.object(sys, "argv", ["offplan", *arguments]),
        patch.dict(os.environ, COLUMNS="80"),
        patch("offplan.cli.query.import_less"),  # this process also runs models
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as stopped:
            return int(stopped.code or 0), out.getvalue(), err.getvalue()
    raise AssertionError("the command did not end")


def _report(text: str) -> str:
    return json.dumps({**json.loads(text), "run": None}) if text else ""


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]

"""``run`` and ``bench`` of plans whose passes check drafts: what was taken is printed."""

import json
from pathlib import Path

import pytest

from tests.cli import CLI, RULES, TINY_MOE, write_plan

WEIGHTS = (
    "Weights that do not fit the GPU wait in host memory and cross the link before their layer."
)
PROMPT = f"{WEIGHTS} {WEIGHTS[:30]}"
"""The tiny checkpoint goes on with the rest of the sentence."""


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CLI:
    monkeypatch.chdir(TINY_MOE.parents[1])
    return CLI(monkeypatch, capsys)


def write_drafted(folder: Path, draft: str = "{kind: ngram, tokens: 7}") -> Path:
    path = write_plan(folder, RULES["mixed"])
    path.write_text(path.read_text().replace("  rules: ", f"  draft: {draft}\n  rules: "))
    return path


@pytest.mark.slow
def test_run_and_bench_print_what_was_taken(cli: CLI, tmp_path: Path) -> None:
    plan = write_drafted(tmp_path)
    asked = "--prompt", PROMPT, "--device", "cpu", "--max-new-tokens", 40
    plain = cli("run", write_plan(tmp_path, RULES["mixed"]), *asked)
    code, out, err = cli("run", write_drafted(tmp_path), *asked)
    assert (code, out) == (0, plain.out)
    assert "drafts" in err
    assert "were taken, in" in err
    data = json.loads(cli("run", plan, *asked, "--json").out)["drafts"]
    assert 0 < sum(data["taken"]) <= data["drafted"]
    assert data["offered"][0] == data["num_passes"]
    data = json.loads(cli("run", plan, "--device", "cpu", "--json").out)
    assert data["drafts"].keys() >= {"offered", "taken", "drafted"}
    quick = ("--device", "cpu", "--steps", 4, "--repeats", 1)
    out = cli("bench", plan, *quick).out
    assert "\na token, with drafts " in out
    assert "\na step without drafts " in out
    assert json.loads(cli("bench", plan, *quick, "--json").out)["drafts"]["token_s"] > 0


@pytest.mark.parametrize(
    ("draft", "why"),
    [
        ("{kind: mtp, tokens: 1}", "stores no layers that predict further tokens"),
        ("{kind: ngram, tokens: 8}", "offload.draft.tokens: Input should be less than or equal"),
        ("{kind: ngram, tokens: 1, experts: host}", "prediction layers (mtp) alone have experts"),
        ("{kind: eagle, tokens: 1}", "offload.draft.kind: Input should be 'ngram' or 'mtp'"),
    ],
)
def test_refused_by_name(cli: CLI, tmp_path: Path, draft: str, why: str) -> None:
    code, out, err = cli("run", write_drafted(tmp_path, draft), "--prompt", "a", "--device", "cpu")
    assert (code, out) == (2, "")
    assert why in err

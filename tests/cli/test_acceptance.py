"""Drafts from a run's counts to a plan that checks them, by the commands."""

from pathlib import Path

import pytest

from offplan.drafts.acceptance import load_acceptance
from offplan.plan import load_plan
from tests.cli import CLI, ROOT
from tests.tiers import first_quick

TINY = ROOT / "plans" / "tiny-moe"
WORK = ("--prompt-tokens", "32", "--output-tokens", "96", "--context", "256")
QUESTION = ("--machine", "cpu", "--gpu-memory", "64MiB", "--no-packing", *WORK)
SENTENCE = (
    "Weights that do not fit the GPU wait in host memory and cross the link before their layer."
)
KNOWN = """offplan_acceptance: 1
model: {source: tiny, headers_sha256: HEADERS, dtype: bfloat16}
kind: ngram
tokens: 3
chances: [0.9, 0.9, 0.8]
offered: [100, 90, 80]
"""


@pytest.fixture
def known(tmp_path: Path) -> Path:
    """A profile of the tiny model, written by hand."""
    from offplan.checkpoint.open import open_model

    path = tmp_path / "acceptance.yaml"
    path.write_text(KNOWN.replace("HEADERS", open_model(str(TINY)).headers_sha256))
    return path


@pytest.mark.slow
def test_a_run_records_what_a_plan_is_made_by(cli: CLI, tmp_path: Path) -> None:
    plan, file = tmp_path / "plan.yaml", tmp_path / "acceptance.yaml"
    code, _, err = cli("plan", TINY, *QUESTION, "--draft", "ngram:7", "-o", plan)
    assert code == 0, err
    asked = "run", plan, "--prompt", f"{SENTENCE} {SENTENCE[:30]}", "--device", "cpu"
    code, _, err = cli(*asked, "--max-new-tokens", "50", "--record-drafts", file)
    assert code == 0, err
    assert "drafts taken by position, given those before: " in err
    profile = load_acceptance(file)
    assert profile.kind == "ngram"
    assert profile.steps > 0
    code, _, err = cli(*asked, "--record-drafts", file)
    assert (code, "exists" in err) == (2, True)
    code, _, err = cli("replan", plan, "--draft", "auto", "--acceptance", file)
    assert code == 0, err
    assert "goal.draft kind ngram, tokens 7 -> auto" in err


@pytest.mark.slow
def test_every_command_knows_the_profile(
    cli: CLI, known: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "plans" / "plan.yaml"
    path.parent.mkdir()
    asked = "plan", TINY, *QUESTION, "--draft", "ngram:3"
    assert cli(*asked, "--acceptance", known.name, "-o", path).code == 0
    plan = load_plan(path)
    assert plan.acceptance is not None
    assert plan.acceptance.file == "../acceptance.yaml"
    assert plan.prediction.draft is not None
    assert plan.prediction.draft.tokens > 1
    assert plan.prediction.decode.step_s > 0
    code, out, _ = cli("show", path)
    assert (code, "drafts are taken as ../acceptance.yaml has it" in out) == (0, True)
    assert "up to 3 drafted tokens a pass (ngram)" in out
    code, out, _ = cli("explain", path)
    assert (code, "draft.pass_4: " in out) == (0, True)
    assert f"acceptance profile {plan.acceptance.fingerprint[:12]}, by the rule of drafts" in out
    code, out, _ = cli("check", path)
    assert (code, "the acceptance in ../acceptance.yaml is unchanged" in out) == (0, True)
    code, _, err = cli("replan", path)
    assert (code, "nothing changes" in err) == (0, True)
    code, _, err = cli("replan", path, "--no-draft")
    assert (code, "goal.draft kind ngram, tokens 3 -> off" in err) == (0, True)
    known.write_text(known.read_text().replace("0.8]", "0.7]"))
    code, out, _ = cli("check", path)
    assert (code, "the plan was made from ../acceptance.yaml as" in " ".join(out.split())) == (
        4,
        True,
    )
    known.unlink()
    code, _, err = cli("replan", path)
    assert (code, "acceptance.yaml" in err) == (2, True)


MISTAKES = {
    "--draft ngram:8": "found 8 tokens, expected 1 to 7",
    "--draft eagle:2": "write a kind and how many tokens",
    "--draft mtp:2": "stores no layers that predict further tokens",
    "--draft ngram:2 --batch 2": "--draft ngram:2 with --batch 2",
    "--draft ngram:2 --for vllm": "--draft ngram:2 with --for vllm",
    "--draft ngram:2 --stock": "drafts need offplan's own",
    "--draft ngram:2 --objective throughput": "leave one of them out",
    "--draft ngram:2 --no-draft": "--no-draft with --draft",
    "--acceptance KNOWN --draft mtp:2": "is of ngram drafts, and --draft mtp:2 of mtp",
    "--acceptance KNOWN --batch 2": "--batch 2: a pass checks the drafts of one sequence",
    "--acceptance KNOWN --frontier": "leave --acceptance out",
    "--acceptance OTHER": "was recorded with tiny",
    "--acceptance WRONG": "chances.0",
    "--acceptance none.yaml": "cannot read acceptance profile none.yaml",
}


@pytest.mark.parametrize(("options", "why"), first_quick(MISTAKES.items()))
def test_mistakes_are_named(cli: CLI, known: Path, tmp_path: Path, options: str, why: str) -> None:
    other, wrong = tmp_path / "other.yaml", tmp_path / "wrong.yaml"
    other.write_text(KNOWN.replace("HEADERS", "a" * 64))
    wrong.write_text(known.read_text().replace("[0.9,", "[1.2,"))
    files = {"KNOWN": known, "OTHER": other, "WRONG": wrong}
    given = [files.get(word, word) for word in options.split()]
    code, _, err = cli("plan", TINY, *QUESTION, *given)
    assert (code, why in err) == (2, True), err


def test_a_profile_is_looked_at_before_the_model(cli: CLI, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(KNOWN.replace("[0.9,", "[1.2,"))
    asked = "plan", "no/such-model", *QUESTION
    code, _, err = cli(*asked, "--acceptance", wrong)
    assert (code, "chances.0" in err) == (2, True)


def test_a_plan_without_drafts_records_none(cli: CLI, tmp_path: Path) -> None:
    asked = "run", ROOT / "plans" / "tiny-moe.yaml", "--record-drafts", tmp_path / "file"
    code, _, err = cli(*asked)
    assert (code, "plans that check drafts, and this one checks none" in err) == (2, True)
    code, _, err = cli("run", ROOT / "plans" / "tiny-moe.yaml", "--record-drafts", "-")
    assert (code, "--record-drafts writes a file" in err) == (2, True)

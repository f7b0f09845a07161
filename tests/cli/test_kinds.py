"""A file of another kind than the command reads, and values in the forms that people write."""

import pytest

from offplan.checkpoint import hub
from offplan.checkpoint.open import open_model
from offplan.checkpoint.tensors import Stored
from offplan.errors import CheckpointError
from tests.cli import CLI, ROOT, TINY_MOE

PLAN, CONFIG = ROOT / "plans" / "tiny-moe.yaml", TINY_MOE / "config.json"
PROFILE = ROOT / "offplan" / "machine" / "profiles" / "cpu.yaml"
ON = ("--machine", "cpu", "--gpu-memory", "1MiB")


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (("show", CONFIG), "found a model's config.json, expected a plan; make a plan of it"),
        (("show", TINY_MOE), "found a folder with a model, expected a plan; make a plan of it"),
        (("show", ROOT / "docs"), "found a folder, expected a plan; name the plan's file"),
        (("show", PROFILE), "found a machine profile, expected a plan; make a plan: offplan plan"),
        (("show", "org/model"), "No such file or directory; to plan a model run offplan plan"),
        (("analyze", PLAN, *ON), "found a plan, expected a model; name the model, or print"),
        (("analyze", PROFILE, *ON), "found a machine profile, expected a model; name the profile"),
        (("machines", PLAN), "found a plan, expected a machine; name a machine that"),
        (("machines", CONFIG), "found a model's config.json, expected a machine; name a machine"),
        (("machines", ROOT), "found a folder, expected a machine; name a machine that"),
        (("analyze", CONFIG, *ON, "--context", "64q"), "as in 8192 or 8k, or max"),
        (("analyze", CONFIG, *ON, "--prompt-tokens", "k"), "--prompt-tokens 'k': write a number"),
        (("analyze", CONFIG, *ON, "--output-tokens", "0"), "--output-tokens '0': write a number"),
        (("analyze", CONFIG, "--machine", "cpu,rma=64GiB"), "there is no 'rma'; is ram meant?"),
        (("export", PLAN), "the plan names no engine: add --engine, one of vllm, vllm-worker"),
    ],
)
def test_what_was_found_and_what_was_expected(
    cli: CLI, command: tuple[object, ...], told: str
) -> None:
    code, out, err = cli(*command)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert told in err


def test_tokens_by_the_thousand(cli: CLI) -> None:
    asked = (CONFIG, "--machine", "cpu", "--prompt-tokens", "1K", "--output-tokens", 96)
    code, out, _ = cli("plan", *asked, "--context", "2k", "--dtype", "bf16")
    assert (code, "dtype: bfloat16" in out) == (0, True)
    assert "prompt_tokens: 1024, output_tokens: 96, context: 2048" in out


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("https://huggingface.co/Qwen/Qwen3-8B", ("Qwen/Qwen3-8B", None)),
        ("https://huggingface.co/Qwen/Qwen3-8B/", ("Qwen/Qwen3-8B", None)),
        ("hf.co/Qwen/Qwen3-8B?library=transformers", ("Qwen/Qwen3-8B", None)),
        ("https://huggingface.co/Qwen/Qwen3-8B/tree/v2", ("Qwen/Qwen3-8B", "v2")),
        ("https://hf.co/Qwen/Qwen3-8B/blob/main/config.json", ("Qwen/Qwen3-8B", "main")),
    ],
)
def test_the_address_of_a_page_on_the_hub(
    monkeypatch: pytest.MonkeyPatch, address: str, found: tuple[str, str | None]
) -> None:
    asked = []

    def read(repo: str, revision: str | None, _: object) -> Stored:
        asked.append((repo, revision))
        raise CheckpointError("read")

    monkeypatch.setattr(hub, "read_hub", read)
    with pytest.raises(CheckpointError, match="read"):
        open_model(address)
    assert asked == [found]


def test_other_addresses_are_no_models() -> None:
    for address in ("https://huggingface.co/datasets/a/b", "https://example.org/a/b"):
        with pytest.raises(CheckpointError, match="correct the name"):
            open_model(address)

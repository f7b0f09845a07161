"""Bytes of weights that changed under an unchanged header are found by their SHA-256."""

import errno
import hashlib
import json
from pathlib import Path

import pytest

from tests.cli import CLI, ROOT
from tests.tiers import first_quick

TEXT = (ROOT / "plans" / "tiny-moe.yaml").read_text("utf-8")


@pytest.fixture
def plan(tmp_path: Path, copy: Path) -> Path:
    """A plan of the checkpoint in the folder ``model`` beside it."""
    path = tmp_path / "plan.yaml"
    path.write_text(TEXT.replace("source: tiny-moe", "source: model"), "utf-8")
    return path


def shards(plan: Path) -> list[Path]:
    return sorted((plan.parent / "model").glob("*.safetensors"))


def flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def check(cli: CLI, plan: Path, *options: str) -> tuple[int, str]:
    code, out, _ = cli("check", plan, "--file-only", *options)
    return code, " ".join(out.split())


@pytest.mark.slow
def test_digests_beside_the_plan(cli: CLI, plan: Path) -> None:
    code, out = check(cli, plan, "--weights")
    assert (code, "not told weights no digest is known of model-00001-of" in out) == (0, True)
    assert check(cli, plan, "--weights", "--strict")[0] == 1
    assert check(cli, plan, "--record-weights")[0] == 0
    listed = plan.with_suffix(".weights.sha256").read_text("utf-8")
    wanted = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\n" for p in shards(plan)]
    assert listed == "".join(wanted)
    code, out = check(cli, plan, "--weights", "--strict")
    assert (code, "ok weights 3 files have the SHA-256 expected" in out) == (0, True)
    flip_last_byte(shards(plan)[1])
    assert check(cli, plan)[0] == 0  # headers are as they were
    code, out = check(cli, plan, "--weights")
    assert (code, "DRIFT weights" in out, shards(plan)[1].name in out) == (4, True, True)
    assert check(cli, plan, "--record-weights")[0] == 4
    assert plan.with_suffix(".weights.sha256").read_text("utf-8") == listed


@pytest.mark.parametrize("option", first_quick(["--weights", "--record-weights"]))
@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"no digest\n", "expected a SHA-256, two spaces and the name"),
        (b"\xff\xfe", "is no list of digests, which is text in UTF-8"),
    ],
)
def test_a_list_that_is_not_valid(
    cli: CLI, plan: Path, option: str, content: bytes, told: str
) -> None:
    plan.with_suffix(".weights.sha256").write_bytes(content)
    code, _, err = cli("check", plan, "--file-only", option)
    assert (code, told in err) == (2, True), err


def test_a_list_that_cannot_be_written(
    cli: CLI, plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("offplan.upkeep.weights.write_whole", refuse)
    code, _, err = cli("check", plan, "--file-only", "--record-weights")
    assert (code, "sha256 cannot be written (No space left on device): make room" in err) == (
        1,
        True,
    ), err


@pytest.mark.slow
def test_digests_that_the_hub_gave_a_folder(cli: CLI, plan: Path) -> None:
    folder = plan.parent / "model" / ".cache" / "huggingface" / "download"
    folder.mkdir(parents=True)
    for path in shards(plan):
        etag = hashlib.sha256(path.read_bytes()).hexdigest()
        (folder / f"{path.name}.metadata").write_text(f"{'0' * 40}\n{etag}\n1.5\n", "utf-8")
    assert check(cli, plan, "--weights", "--strict")[0] == 0
    flip_last_byte(shards(plan)[0])
    code, out = check(cli, plan, "--weights")
    assert (code, "(the Hub's): fetch the file again" in out) == (4, True)
    assert check(cli, plan, "--record-weights")[0] == 4
    assert not plan.with_suffix(".weights.sha256").exists()


@pytest.mark.slow
def test_digests_that_name_files_of_the_hubs_cache(cli: CLI, plan: Path) -> None:
    for path in shards(plan):
        blob = plan.parent / hashlib.sha256(path.read_bytes()).hexdigest()
        path.rename(blob)
        path.symlink_to(blob)
    assert check(cli, plan, "--weights", "--strict")[0] == 0
    flip_last_byte(shards(plan)[2].resolve())
    assert check(cli, plan, "--weights")[0] == 4


def test_weights_that_are_not_here(cli: CLI, plan: Path) -> None:
    text = plan.read_text("utf-8")
    plan.write_text(text.replace("source: model", "source: model/config.json"), "utf-8")
    code, out, _ = cli("check", plan, "--file-only", "--weights", "--json")
    findings = {each["subject"]: each for each in json.loads(out)["plans"][0]["findings"]}
    assert findings["weights"]["verdict"] == "unknown"
    assert code in (0, 4)

"""Answers kept on disk: believed for their own key alone, whatever has happened to their files."""

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from huggingface_hub import constants

from offplan import disk_cache
from offplan.capabilities.cached_experts import MissRates
from offplan.capabilities.stock import STOCK
from offplan.checkpoint import ranges
from offplan.checkpoint.assemble import assemble
from offplan.checkpoint.config_only import SIZED, sized_key
from offplan.checkpoint.model import Model
from offplan.checkpoint.ranges import ShardStart
from offplan.checkpoint.tensors import Stored, TensorInfo
from offplan.disk_cache import KeptAnswers, installed_versions
from offplan.held import stock
from offplan.held.counted import CountedPasses
from offplan.library import alternatives, model_plans, runnable
from offplan.machine.profile import LayerTime
from offplan.plan import Plan, parse_plan
from offplan.records import load_yaml
from offplan.runtime.cached_experts.rates import RATES
from offplan.runtime.measuring.cores_cache import HOST_CORES
from offplan.runtime.measuring.layer_cache import LAYER_TIMES
from tests.cli import CLI, ROOT


class Kind(NamedTuple):
    """A kind of answers, and two answers to two questions of it."""

    answers: KeptAnswers[Any]
    keys: tuple[dict[str, Any], dict[str, Any]]
    given: tuple[Any, Any]


def sized(size: int, num_experts: int = 2) -> Model:
    """A model of one layer, sized from a config that has an infinity."""
    sizes = {"hidden_size": 8, "num_attention_heads": 1, "num_experts_per_tok": 1}
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 1, "num_experts": num_experts}
    experts = "model.layers.0.mlp.experts"
    return assemble(
        "config.json",
        Stored(
            config | sizes | {"time_step_limit": [0.0, float("inf")]},
            (
                *(
                    TensorInfo(f"{experts}.{index}.{name}_proj.weight", dtype, shape)
                    for index in range(num_experts)
                    for name, dtype, shape in (
                        ("up", "BF16", (size, 8)),
                        # the last is another's form
                        ("down", "F32" if index == num_experts - 1 else "BF16", (8, size)),
                    )
                ),
                TensorInfo("model.layers.0.self_attn.k_proj.weight", "BF16", (8, 8)),
                TensorInfo("model.norm.weight", "F32", (8,)),
            ),
        ),
    )


def start(size: int) -> ShardStart:
    entry = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    header = json.dumps({"x": entry}).encode()
    return ShardStart(len(header).to_bytes(8, "little") + header, 8 + len(header) + size)


def times(seconds: float) -> tuple[LayerTime, ...]:
    decode = LayerTime(layer="x", phase="decode", batch=1, tokens=1, context=64, seconds=seconds)
    return (decode, decode.model_copy(update={"phase": "prefill", "tokens": 8}))


def passes(called: list[int]) -> CountedPasses | str:
    """What transformers' own passes of a model take, as it comes out of JSON."""
    calls = {"prefill": called, "decode": called}
    sizes = {"prompt_bytes": [1.0, 2.0, 0.5], "step_bytes": [3.0, 4.0], "caches": [[8, None, 0]]}
    facts = {"is_estimated": False, "pinned": ["x"], "borrowed": [0], "calls": calls}
    facts |= {"operators": calls, "prompt_moved": [[1.0, 2.0, 0.5]], "step_moved": [[3.0, 4.0]]}
    return stock._decode(json.dumps(sizes | facts).encode())


SHARD = {"repo": "org/name", "commit": "0" * 40, "shard": "model.safetensors"}


def plan(gib: int) -> Plan:
    """Read a plan that is of no file."""
    text = (ROOT / "plans" / f"qwen3-8b-h200-{gib}gib.yaml").read_text("utf-8")
    return parse_plan(load_yaml(text), "a plan")


TIMED = {"gpu": ["a", 1], "torch": "2", "layers": ["x", "y"], "batch": 1}
OTHERS = (alternatives.Alternative(8, 2**33, 42.5, 0.1, 0),)
ASKED = {"model": ["org/name", "0", "1"], "held": ["x", "y"]}
KINDS = [
    Kind(alternatives._KEPT, ({"model": "a"}, {"model": "b"}), (OTHERS, ())),
    Kind(
        SIZED,
        (sized_key({"intermediate_size": 14336}, None), sized_key({"hidden_size": 8}, "float32")),
        (sized(14336), sized(7168, num_experts=12)),
    ),
    Kind(alternatives._LONGEST, (ASKED, {**ASKED, "held": ["x"]}), (98_304, 0)),
    Kind(ranges._HEADERS, (SHARD, {**SHARD, "shard": "other"}), (start(3), start(300))),
    Kind(LAYER_TIMES, (TIMED, {**TIMED, "torch": "3"}), (times(0.1 + 0.2), times(1e-5))),
    Kind(HOST_CORES, (TIMED, {**TIMED, "torch": "3"}), ({"cores": 9e10}, {"cores": 1.5e10})),
    Kind(
        RATES,
        (TIMED, {**TIMED, "torch": "3"}),
        (MissRates(1e-5, 1.5e-4, 2.7e-4), MissRates(0.0, 0.1 + 0.2, 1e-9)),
    ),
    Kind(model_plans._PLANS, (ASKED, {**ASKED, "held": ["x"]}), (plan(8), plan(12))),
    Kind(stock._PASSES, (ASKED, {**ASKED, "held": ["x"]}), (passes([0, 1]), "it fails")),
    Kind(runnable._NEEDED, (ASKED, {**ASKED, "held": ["x"]}), (STOCK, STOCK)),
    Kind(runnable._RUNNABLE, (ASKED, {**ASKED, "held": ["x"]}), ("runs", "runs")),
    Kind(runnable._OBSTACLES, (ASKED, {**ASKED, "held": ["x"]}), ("no class", "no kernel")),
]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=[kind.answers.kind for kind in KINDS])


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home of the Hub without any file."""
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def entry(home: Path, kind: Kind, index: int = 0) -> Path:
    """Keep one of a kind's answers, and return its file."""
    before = {*home.rglob("*")}
    assert kind.answers.keep(kind.keys[index], kind.given[index])
    (path,) = (path for path in {*home.rglob("*")} - before if path.is_file())
    return path


def sign(content: bytes) -> bytes:
    return hashlib.sha256(content).digest() + content


def test_every_kind_is_tried_here() -> None:
    texts = [path.read_text("utf-8") for path in (ROOT / "offplan").rglob("*.py")]
    found = sorted(re.findall(r'KeptAnswers\(\s*"([\w-]+)"', "".join(texts)))
    assert found == sorted(kind.answers.kind for kind in KINDS)
    writers = [text for text in texts if "constants.HF_HOME" in text]
    assert len(writers) == 1


@every_kind
def test_answers_come_back_as_they_were(home: Path, kind: Kind) -> None:
    answers, (key, other), (given, another) = kind
    assert answers.find(key) is None
    path = entry(home, kind)
    assert path.parent == home / "offplan" / answers.kind
    assert answers.find(dict(reversed(key.items()))) == given
    assert answers.find(other) is None
    assert answers.keep(other, another)
    assert (answers.find(key), answers.find(other)) == (given, another)


@every_kind
def test_any_change_of_a_key_is_another_question(kind: Kind) -> None:
    answers, (key, _), (given, _) = kind
    answers.keep(key, given)
    for name in key:
        assert answers.find({**key, name: "other"}) is None
        assert answers.find({k: v for k, v in key.items() if k != name}) is None


@every_kind
def test_an_answer_of_another_key_under_this_name(home: Path, kind: Kind) -> None:
    path, other = entry(home, kind), entry(home, kind, 1)
    path.write_bytes(other.read_bytes())
    assert kind.answers.find(kind.keys[0]) is None


@every_kind
def test_an_answer_of_another_kind_or_format(
    home: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = kind.keys[0]
    whole = entry(home, kind).read_bytes()
    (home / "offplan" / "other").mkdir()
    other = KeptAnswers("other", 2**20, kind.answers.encode, kind.answers.decode)
    other.keep(key, kind.given[0], "name")
    (home / "offplan" / "other" / "name").write_bytes(whole)
    assert other.find(key, "name") is None
    kind.answers.keep(key, kind.given[0], "name")
    assert kind.answers.find(key, "name") == kind.given[0]
    monkeypatch.setattr(disk_cache, "FORMAT", disk_cache.FORMAT + 1)
    assert kind.answers.find(key, "name") is None


@pytest.mark.slow
@every_kind
def test_a_flipped_bit_or_a_lost_end(home: Path, kind: Kind) -> None:
    path = entry(home, kind)
    whole = path.read_bytes()
    for position in range(len(whole)):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << position % 8
        path.write_bytes(flipped)
        assert kind.answers.find(kind.keys[0]) is None
    for size in range(len(whole)):
        for shorter in (whole[:size], sign(whole[32:size])):
            path.write_bytes(shorter)
            assert kind.answers.find(kind.keys[0]) is None
    assert kind.answers.keep(kind.keys[0], kind.given[0])
    assert path.read_bytes() == whole
    assert kind.answers.find(kind.keys[0]) == kind.given[0]


FORGED = (
    *("", "{", "null", "true", "0", "NaN", '"runs', "[]", "{}", "[[]]", "[{}]", "[1]", "[[1]]"),
    *("[" * 10**5, "\ud800", '{"x": 1}', "run", "runs "),
    *(
        SIZED.encode(sized(8)).decode().replace('["model.norm.weight","F32",[8]', forged)
        for forged in (
            *(f'["a","F32",[{size}]' for size in ('"x"', -1, 1.5, "true")),
            *('["a","F32",8', '["a","NONE",[8]', '["a",["F32"],[8]', '[1,"F32",[8]'),
            *('["a\\u001b","F32",[8]', '["a"'),
        )
    ),
    *(
        json.dumps([{**times(1)[0].model_dump(), **change}])
        for change in ({"seconds": -1}, {"seconds": float("nan")}, {"phase": "x"}, {"more": 1})
    ),
)


@every_kind
@pytest.mark.parametrize("index", range(len(FORGED)), ids=lambda at: FORGED[at][:40])
def test_what_was_forged_under_a_true_key_and_checksum(home: Path, kind: Kind, index: int) -> None:
    path = entry(home, kind)
    whole = path.read_bytes()[32:]
    key = whole[: len(whole) - len(kind.answers.encode(kind.given[0]))]
    path.write_bytes(sign(key + FORGED[index].encode("utf-8", "surrogatepass")))
    assert kind.answers.find(kind.keys[0]) is None


@every_kind
def test_too_long_an_answer_is_not_read(home: Path, kind: Kind) -> None:
    small = KeptAnswers(kind.answers.kind, 1, kind.answers.encode, kind.answers.decode)
    entry(home, kind)
    assert small.find(kind.keys[0]) is None


def put_pipe(path: Path) -> None:
    os.mkfifo(path)


def put_link_to_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def put_folder(path: Path) -> None:
    path.mkdir()


def put_endless_link(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize("put", [put_pipe, put_link_to_device, put_folder, put_endless_link])
@every_kind
def test_what_is_no_file_is_not_opened(home: Path, kind: Kind, put: Callable[[Path], None]) -> None:
    path = entry(home, kind)
    path.unlink()
    put(path)
    assert kind.answers.find(kind.keys[0]) is None


@every_kind
def test_a_disk_that_refuses_is_no_error(home: Path, kind: Kind) -> None:
    home.write_text("a file where the folder should be")
    assert not kind.answers.keep(kind.keys[0], kind.given[0])
    assert kind.answers.find(kind.keys[0]) is None


def test_experts_that_are_alike_are_kept_by_the_first_and_the_last() -> None:
    content = SIZED.encode(sized(8, num_experts=12)).decode()
    assert "experts.5.up_proj" not in content
    assert "experts.5.down_proj" in content


def test_versions_name_another_build_of_one_version(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = installed_versions()
    assert {*versions} == {"offplan", "torch", "transformers"}
    installed = disk_cache.distribution

    def without_files(name: str) -> object:
        package = installed(name)
        read = package.read_text
        monkeypatch.setattr(package, "read_text", lambda of: "" if of == "RECORD" else read(of))
        return package

    monkeypatch.setattr(disk_cache, "distribution", without_files)
    other = installed_versions.__wrapped__()
    assert [name for name in versions if versions[name] != other[name]] == ["torch", "transformers"]


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 224,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "vocab_size": 256,
    "dtype": "bfloat16",
}


@pytest.mark.slow
def test_a_plan_never_rests_on_another_models_entry(cli: CLI, home: Path, tmp_path: Path) -> None:
    plans: dict[int, str] = {}
    files: dict[int, dict[str, Path]] = {}
    for size in (224, 112):
        (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "intermediate_size": size}))
        before = {*home.rglob("*")}
        code, plans[size], err = cli("plan", tmp_path / "config.json", "--machine", "cpu")
        assert code == 0, err
        new = [path for path in {*home.rglob("*")} - before if path.is_file()]
        files[size] = {path.parent.name: path for path in new}
    assert files[224].keys() == files[112].keys() == {"sized", "runnable"}
    for kind, path in files[112].items():
        path.write_bytes(files[224][kind].read_bytes())
    assert cli("plan", tmp_path / "config.json", "--machine", "cpu").out == plans[112]
    for path in files[112].values():
        path.write_bytes(sign(b"{"))
    assert cli("plan", tmp_path / "config.json", "--machine", "cpu").out == plans[112]

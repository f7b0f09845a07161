"""GGUF files: what they are, the shape that is planned, where they lie, and damaged ones."""

import builtins
import json
import shlex
import struct
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

gguf = pytest.importorskip("gguf")

from offplan.checkpoint.config_only import read_config_only  # noqa: E402
from offplan.checkpoint.gguf import hub as gguf_hub  # noqa: E402
from offplan.checkpoint.gguf import reader  # noqa: E402
from offplan.checkpoint.gguf.hub import Repository, choose  # noqa: E402
from offplan.checkpoint.gguf.places import (  # noqa: E402
    find_in_folder,
    find_named,
    parse_hub,
    parse_ollama,
)
from offplan.checkpoint.gguf.read import (  # noqa: E402
    ARCHITECTURES,
    COMMON,
    describe_gguf,
    find_config,
    read_header,
)
from offplan.checkpoint.open import open_model  # noqa: E402
from offplan.errors import CheckpointError  # noqa: E402
from offplan.forms.form import Kind  # noqa: E402
from offplan.kinds import describe_kind  # noqa: E402
from tests.checkpoint.gguf_files import BASE, VOCABULARY, WIDTH, write, write_llama  # noqa: E402
from tests.checkpoint.hub_server import COMMIT, REPO, Hub, open_from, start  # noqa: E402

TYPES = gguf.GGMLQuantizationType
DIGEST = "0" * 64


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("gguf") / "tiny-Q4_K_M.gguf")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    return tmp_path


def refused(source: object) -> str:
    with pytest.raises(CheckpointError) as refusal:
        open_model(str(source))
    assert refusal.value.exit_code == 2
    assert str(refusal.value).isprintable()
    return str(refusal.value)


def config_of(architecture: str, values: dict[str, Any], *tensors: str) -> dict[str, Any]:
    metadata = {f"{architecture}.{key}": value for key, value in values.items()}
    metadata["general.architecture"] = architecture
    shapes = {"token_embd.weight": (WIDTH, VOCABULARY), **dict.fromkeys(tensors, (1,))}
    return find_config(metadata, shapes, set())


def test_a_file_is_described_and_its_shape_is_a_checkpoint_of_as_many_bits(llama: Path) -> None:
    model = open_model(str(llama))
    assert model.gguf is not None
    assert model.gguf.facts == (
        "GGUF, llama, 2 layers, 1,443,072 parameters, 797 KiB in Q4_K_M (4.5 bits a weight)"
    )
    assert f"`llama-cli -m {llama}` runs this file" in model.gguf.remedy
    assert model.gguf.bases == (BASE,)
    assert (model.model_type, len(model.layers), model.num_parameters) == ("llama", 2, 1443072)
    forms = {p.form.kind for layer in model.layers for p in layer.parameters if not p.form.is_raw}
    assert forms == {Kind.W4A16}


@pytest.mark.slow
def test_the_shape_is_that_of_transformers_config(llama: Path, tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "num_hidden_layers": 2,
        "hidden_size": WIDTH,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = open_model(str(tmp_path / "config.json"))
    found = open_model(str(llama), dtype="bfloat16")
    assert found.headers_sha256 == expected.headers_sha256
    assert [layer.kv_cache for layer in found.layers] == [one.kv_cache for one in expected.layers]
    assert read_config_only(tmp_path / "config.json", lambda *_: None).gguf is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "planned_in", "total_bytes"),
    [
        ({"num_experts": 4}, "4 bits (in groups)", 2356224),
        ({"stored": TYPES.Q8_0, "file_type": 7}, "FP8 (blocks of 128 x 128)", 1706784),
        ({"stored": None, "file_type": 0}, "bfloat16", 2886144),
        ({"head": False}, "4 bits (in groups)", 873184),
    ],
)
def test_other_files(
    tmp_path: Path, options: dict[str, Any], planned_in: str, total_bytes: int
) -> None:
    model = open_model(str(write_llama(tmp_path / "model.gguf", **options)))
    assert model.gguf is not None
    assert (model.gguf.planned_in, model.total_bytes) == (planned_in, total_bytes)
    assert (model.experts is not None) == ("num_experts" in options)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_keys_are_those_of_transformers_configs(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    entry = ARCHITECTURES[name]
    config = transformers.CONFIG_MAPPING[entry["model_type"]]()
    known = {*config.to_dict(), *config.attribute_map}
    # which configs make `layer_types`, `rope_parameters` and layers' sizes of, or do without
    known |= {"full_attention_interval", "rope_theta", "sliding_window", "rms_norm_eps"}
    known |= {"head_dim", "global_head_dim"}
    keys = {**COMMON, **entry.get("keys", {})}.values()
    assert {*filter(None, keys), *entry.get("values", {})} <= known


def test_what_architectures_have_of_their_own() -> None:
    latent = {
        "block_count": 3,
        "attention.head_count": 4,
        "attention.head_count_kv": 1,
        "attention.key_length": 576,
        "attention.key_length_mla": 192,
        "attention.value_length_mla": 128,
        "attention.kv_lora_rank": 512,
        "rope.dimension_count": 64,
    }
    config = config_of("deepseek2", latent)
    told = {key: config[key] for key in ("q_lora_rank", "qk_nope_head_dim", "num_key_value_heads")}
    assert (config["model_type"], config["v_head_dim"]) == ("deepseek_v2", 128)
    assert told == {"q_lora_rank": None, "qk_nope_head_dim": 128, "num_key_value_heads": 4}
    biased = config_of(
        "deepseek2", {**latent, "attention.q_lora_rank": 96}, "blk.1.exp_probs_b.bias"
    )
    assert (biased["model_type"], biased["q_lora_rank"]) == ("deepseek_v3", 96)
    with_prediction = {"block_count": 5, "nextn_predict_layers": 1}
    assert config_of("glm4moe", with_prediction)["num_hidden_layers"] == 4
    linear = {"block_count": 4, "ssm.time_step_rank": 8, "ssm.inner_size": 1024}
    assert config_of("qwen35moe", linear)["linear_value_head_dim"] == 128
    windows = {
        "block_count": 2,
        "attention.sliding_window_pattern": [True, False],
        "attention.head_count_kv": [8, 2],
        "attention.key_length": 512,
        "attention.key_length_swa": 256,
    }
    config = config_of("gemma4", windows)
    assert config["layer_types"] == ["sliding_attention", "full_attention"]
    assert (config["head_dim"], config["global_head_dim"]) == (256, 512)
    assert (config["num_key_value_heads"], config["num_global_key_value_heads"]) == (8, 2)
    metadata = {"general.architecture": "gpt-oss"}
    shapes = {"token_embd.weight": (WIDTH, VOCABULARY)}
    assert (
        find_config(metadata, shapes, {"MXFP4"})["quantization_config"]["quant_method"] == "mxfp4"
    )


def test_what_cannot_be_planned_is_named_with_what_it_is(tmp_path: Path) -> None:
    told = refused(write(tmp_path / "a.gguf", "rwkv7", {"block_count": 1}, {"x.weight": (WIDTH,)}))
    assert "GGUF, rwkv7, 1 layer, 262,656 parameters" in told
    assert "offplan does not know its architecture's shape" in told
    assert f"`llama-cli -m {tmp_path / 'a.gguf'}` runs this file" in told
    differs = {"block_count": 2, "feed_forward_length": [256, 512]}
    told = refused(write(tmp_path / "b.gguf", "llama", differs, {"x.weight": (WIDTH,)}))
    assert "its 'feed_forward_length' differs by layer" in told
    told = refused(write(tmp_path / "c.gguf", "clip", {}, {}))
    assert "(mmproj), expected the model's own GGUF file" in told


@pytest.mark.slow
def test_metadata_of_another_size_than_the_weights_are_refused(tmp_path: Path) -> None:
    values = {"block_count": 1, "embedding_length": WIDTH, "attention.head_count": 4}
    values |= {"feed_forward_length": 1024, "attention.head_count_kv": 4}
    told = refused(write(tmp_path / "a.gguf", "llama", values, {"ffn_up.weight": (256, WIDTH)}))
    assert "its metadata describe 1,311,488 parameters, not those it has" in told


@pytest.mark.slow
def test_a_name_that_counts_no_shards_is_a_file_of_its_own(tmp_path: Path) -> None:
    write_llama(path := tmp_path / "model-00001-of-00000.gguf")
    assert open_model(str(path)).num_parameters == 1443072


def test_a_folder_has_one_model_with_its_shards_and_what_lies_beside(tmp_path: Path) -> None:
    write_llama(tmp_path / "model.gguf", num_shards=3)
    write(tmp_path / "mmproj-F16.gguf", "clip", {}, {})
    first, second = "model-00001-of-00003.gguf", "model-00002-of-00003.gguf"
    whole = open_model(str(tmp_path))
    assert whole.num_parameters == 1443072
    assert open_model(str(tmp_path / second)).headers_sha256 == whole.headers_sha256
    assert whole.gguf is not None
    assert whole.gguf.runs_with == (f"llama-cli -m {tmp_path / first}",)
    write_llama(tmp_path / "other.gguf")
    assert "found 2 GGUF models" in refused(tmp_path)
    (tmp_path / second).unlink()
    assert f"1 of 3 shards are missing, the first is '{second}'" in refused(tmp_path / first)
    (tmp_path / "model.safetensors").touch()
    assert find_in_folder(tmp_path) is None


def test_endings_in_capitals_and_names_that_a_shell_would_split(tmp_path: Path) -> None:
    path = tmp_path / "a folder" / "of 'mine'" / "Model.GGUF"
    path.parent.mkdir(parents=True)
    path.write_bytes(header() + b'profile:\n{"model_type": "llama"}')
    command = f"llama-cli -m {shlex.quote(str(path))}"
    for folder in (path.parent, path.parent.parent):
        assert find_in_folder(folder) == ((path,), (command,))
    told = describe_kind(path, "a plan")
    assert told is not None
    assert told.startswith("found a GGUF file, expected a plan; ")
    assert f"`{command}` runs this file" in told


def write_manifest(store: Path, name: str, digest: object = f"sha256:{DIGEST}") -> Path:
    layers = [
        {"mediaType": "application/vnd.ollama.image.license", "digest": f"sha256:{'1' * 64}"},
        {"mediaType": "application/vnd.ollama.image.model", "digest": digest},
    ]
    manifest = store / "manifests" / name
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    return manifest


@pytest.mark.slow
def test_names_of_ollama(llama: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = home / ".ollama" / "models"
    write_manifest(store, "registry.ollama.ai/library/llama3.2/3b")
    write_manifest(store, "registry.ollama.ai/library/llama3.2/latest")
    write_manifest(store, "registry.ollama.ai/someone/tiny/latest")
    write_manifest(store, "hf.co/bartowski/Tiny-GGUF/Q4_K_M")
    assert "its manifest names sha256:000000000000..., which" in refused("llama3.2:3b")
    (store / "blobs").mkdir()
    (store / "blobs" / f"sha256-{DIGEST}").write_bytes(llama.read_bytes())
    for name in ("llama3.2:3b", "llama3.2", "someone/tiny", "hf.co/bartowski/Tiny-GGUF:Q4_K_M"):
        model = open_model(name)
        assert model.gguf is not None
        assert (model.source, model.gguf.runs_with) == (name, (f"ollama run {name}",))
    assert open_model("ollama run llama3.2:3b").num_parameters == 1443072
    told = refused("qwen3:8b")
    assert f"Found no Ollama model of this name that can be read in {store}" in told
    assert "`ollama pull qwen3:8b` fetches it" in told
    monkeypatch.setenv("OLLAMA_MODELS", str(home / "elsewhere"))
    assert f"in {home / 'elsewhere'}; `ollama pull llama3.2:3b`" in refused("llama3.2:3b")


@pytest.mark.parametrize(
    ("name", "repo"),
    [
        ("gpt-oss:120b", "openai/gpt-oss-120b"),
        ("gpt-oss", "openai/gpt-oss-20b"),
        ("ollama run qwen3:latest", "Qwen/Qwen3-8B"),
        ("library/llama3.1:70b-instruct-q4_K_M", "meta-llama/Llama-3.1-70B-Instruct"),
        ("gpt-oss:120b-cloud", "openai/gpt-oss-120b"),
    ],
)
def test_ollamas_name_of_a_model_on_the_hub(name: str, repo: str, home: Path) -> None:
    assert f"name {repo}, the same model on the Hub" in refused(name)


@pytest.mark.parametrize("name", ["qwen3:30b", "qwen2.5:7b-base", "someone/gpt-oss:20b", "x:1b"])
def test_ollamas_name_of_some_model(name: str, home: Path) -> None:
    assert "name the Hub id that the model's maker gave it, such as" in refused(name)


def test_manifests_that_name_no_file_of_the_store(home: Path) -> None:
    store = home / ".ollama" / "models"
    for digest in ("sha256:../../secret", "sha256:0", 7):
        manifest = write_manifest(store, "registry.ollama.ai/library/x/latest", digest)
        assert "found no GGUF file in this manifest" in refused("x:latest")
    manifest.write_text("[")
    assert "not valid JSON" in refused("x:latest")
    manifest.write_text('{"layers": 3}')
    assert "found no GGUF file in this manifest" in refused("x:latest")


@pytest.mark.slow
@pytest.mark.parametrize("store", [".lmstudio/models", ".cache/lm-studio/models"])
def test_names_of_lm_studio(llama: Path, home: Path, store: str) -> None:
    name = "lmstudio-community/Tiny-GGUF"
    folder = home / store / name
    folder.mkdir(parents=True)
    (folder / llama.name).write_bytes(llama.read_bytes())
    (folder / "mmproj-F16.gguf").write_bytes(b"GGUF")
    for source in (name, f"{name}/{llama.name}"):
        model = open_model(source)
        assert model.gguf is not None
        assert model.gguf.runs_with == (f"lms load {source}", f"llama-cli -m {folder / llama.name}")


def test_other_names_are_none_of_the_stores(home: Path) -> None:
    """Also where a store lets nobody in, as Ollama's own user may have it."""
    for name in ("gpt2", "Qwen/Qwen3-8B", "a" * 96, f"{'a' * 96}/{'b' * 300}"):
        parsed = parse_ollama(name)
        assert parsed is not None
        assert find_named(parsed) is None


def test_where_a_file_came_from(tmp_path: Path) -> None:
    names: dict[str, Any] = {
        "source.huggingface.repository": "Qwen/Qwen3-8B",
        "source.url": "example.com/x",
    }
    path = write(tmp_path / "a.gguf", "llama", {"block_count": 0}, {}, **names)
    described = describe_gguf(read_header(path, "a"), ("run",))
    assert described.bases == ("Qwen/Qwen3-8B", BASE)
    path = write(
        tmp_path / "b.gguf", "llama", {}, {}, base="https://hf.co/x/y-GGUF", file_type=None
    )
    described = describe_gguf(read_header(path, "b"), ("run",))
    assert (described.bases, described.file_type) == ((), "Q4_K")
    assert described.facts == "GGUF, llama, 262,400 parameters, 145 KiB in Q4_K (4.5 bits a weight)"


def test_names_are_read_as_their_programs_do() -> None:
    assert str(parse_ollama("ollama run llama3.2:3b")) == "llama3.2:3b"
    for name in ("../x", "a/../b:c", "a/b/c/d", "C:\\x", "x y", "", "a:", "/x"):
        assert parse_ollama(name) is None
    assert parse_hub("hf.co/a/b-GGUF:latest") == ("a/b-GGUF", None, None)
    assert parse_hub("a/b-GGUF:UD-Q4_K_XL") == ("a/b-GGUF", None, "UD-Q4_K_XL")
    assert parse_hub("ollama run hf.co/a/b:IQ2_M") == ("a/b", None, "IQ2_M")
    page = "https://huggingface.co/a/b/blob/v2/sub/x%20y-Q8_0.gguf?download=true"
    assert parse_hub(page) == ("a/b", "v2", "sub/x y-Q8_0.gguf")
    for name in ("someone/model:7b", "llama3.2:3b", "a/b"):
        assert parse_hub(name) is None


def test_one_of_a_repositorys_files_is_chosen() -> None:
    names = ["X-BF16.gguf", "X-Q4_K_M.gguf", "X-Q4_K_S.gguf", "mmproj-X-F16.gguf"]
    names += [f"Q8_0/X-Q8_0-0000{at}-of-00002.gguf" for at in (1, 2)]
    repository = Repository("a/b", COMMIT, sorted(names))
    assert choose(repository, None) == ["X-Q4_K_M.gguf"]
    assert choose(repository, "q8_0") == names[-2:]
    assert choose(repository, "X-BF16.gguf") == ["X-BF16.gguf"]
    with pytest.raises(CheckpointError, match="found no GGUF file of 'Q4_K' among 5"):
        choose(repository, "Q4_K")


@contextmanager
def serving(files: dict[str, bytes]) -> Any:
    hub = Hub(files)
    server = start(hub)
    try:
        yield hub
    finally:
        hub.released.set()
        server.shutdown()
        server.server_close()


@pytest.mark.slow
def test_a_repository_of_gguf_files_alone_is_read_by_its_headers(
    llama: Path, tmp_path: Path
) -> None:
    data = llama.read_bytes()
    with serving({"X-Q8_0.gguf": data[:99], llama.name: data, "README.md": b""}) as hub:
        hub.tails[llama.name] = 2**33
        got = open_from(hub.url, tmp_path)
        assert (got["revision"], got["sha"]) == (COMMIT, open_model(str(llama)).headers_sha256)
        assert got["gguf"]["runs_with"] == [f"llama-cli -hf {REPO}:Q4_K_M"]
        sent_bytes = hub.sent_bytes
        assert sent_bytes < 2**25
        again = open_from(hub.url, tmp_path)
        assert again == {**got, "heard": again["heard"]}
        assert hub.sent_bytes < sent_bytes + 10_000  # its list of files, and no header again
        (kept,) = tmp_path.rglob(f"{llama.name}.header")
        assert kept.stat().st_size < len(data)
        kept.write_bytes(kept.read_bytes()[:-9])
        again = open_from(hub.url, tmp_path)
        assert again == {**got, "heard": again["heard"]}
        named = open_from(hub.url, tmp_path, repo=f"{REPO}:Q4_K_M")
        assert named == {**got, "heard": named["heard"]}
        told = open_from(hub.url, tmp_path, repo=f"hf.co/{REPO}:Q8_0")["error"]
        assert f"{REPO}/X-Q8_0.gguf: found the start of a GGUF file" in told
        told = open_from(hub.url, tmp_path, repo=f"{REPO}:Q2_K")["error"]
        assert "found no GGUF file of 'Q2_K' among 2 ('X-Q8_0.gguf', 'tiny-Q4_K_M.gguf')" in told
        hub.lists_files = False
        assert "found no config.json" in open_from(hub.url, tmp_path)["error"]
    told = open_from("http://127.0.0.1:9", tmp_path, repo=f"{REPO}:Q4_K_M", HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in told["error"]


def test_a_vocabulary_is_stepped_over(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", "llama", {"block_count": 0}, {}, num_tokens=2_000)
    read = reader.HeaderReader(path)
    values = read.list_values()
    assert "tokenizer.ggml.tokens" not in values
    assert "tokenizer.ggml.token_type" not in values
    plain = gguf.GGUFReader(path)
    expected = {(t.name, t.n_bytes, t.data_offset + t.n_bytes) for t in plain.tensors}
    assert {(t.name, t.nbytes, t.end) for t in read.heads} == expected


def header(num_tensors: int = 0, num_keys: int = 0, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys) + rest


def key(name: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "cannot mmap an empty file"),
        (b"GGUF", "ends within its header"),
        (b"GGML" + bytes(100), "magic invalid"),
        (b"GGUF" + struct.pack("<IQQ", 99, 0, 0), "version 99"),
        (header(num_tensors=2**60), "it has 1152921504606846976 tensors"),
        (header(num_keys=2**60), "it has 1152921504606846976 keys"),
        (header(num_keys=1, rest=struct.pack("<Q", 2**60)), "takes more than 268435456 bytes"),
        (header(num_keys=1, rest=key("a", 9, struct.pack("<IQ", 8, 2**40))), "within its header"),
        (header(num_keys=1, rest=key("a", 9, struct.pack("<IQ", 0, 2**40))), "takes more than"),
        (header(num_keys=1, rest=key("a", 9, struct.pack("<IQ", 9, 1))), "arrays of arrays"),
        (header(num_keys=1, rest=key("a", 77, b"")), "77 is not a valid"),
        (header(num_keys=1, rest=struct.pack("<Q", 1) + b"\xff" + bytes(8)), "UnicodeDecodeError"),
        (header(1, 0, key("a", 2**30, b"")), "takes more than"),
        (header(1, 0, key("a", 9, bytes(72 + 12))), "it has 9 dimensions of a tensor"),
        (
            header(1, 0, key("a", 2, struct.pack("<QQIQ", 2**40, 2**40, 0, 0))),
            "elements of a tensor",
        ),
        (header(1, 0, key("a", 1, struct.pack("<QIQ", 1, 99, 0))), "99 is not a valid"),
        (header(1, 0, key("a", 1, struct.pack("<QIQ", 2**30, 0, 0))), "finish the download"),
        (header(), "does not know its architecture's shape"),
    ],
)
def test_damaged_and_hostile_files(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    assert told in refused(path)


def test_arrays_take_no_object_an_item(tmp_path: Path) -> None:
    arrays = [
        key(f"of {kind}", 9, struct.pack("<IQ", kind, 1000) + bytes(8000)) for kind in (8, 10)
    ]
    (tmp_path / "a.gguf").write_bytes(header(num_keys=2, rest=b"".join(arrays)))
    read = reader.HeaderReader(tmp_path / "a.gguf")
    assert [len(read.fields[name].parts) for name in ("of 8", "of 10")] == [5, 6]
    values = read.list_values()
    assert ("of 8" in values, values["of 10"]) == (False, [0] * 1000)


def test_no_more_is_read_of_the_hub_than_a_header_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, ends = key("a", 9, struct.pack("<IQ", 8, 60) + bytes(480)), list[int]()
    content = header(num_keys=1, rest=texts)

    def read_start(_: str, first: int, end: int) -> tuple[bytes, int]:
        ends.append(end)
        return content[first:end], len(content)

    monkeypatch.setattr(gguf_hub, "read_start", read_start)
    monkeypatch.setattr(gguf_hub, "_FIRST_READ_BYTES", 50)
    monkeypatch.setattr(reader, "MAX_HEADER_BYTES", 300)
    with pytest.raises(CheckpointError, match="it takes more than 300 bytes"):
        gguf_hub.read_repository(Repository("a/b", COMMIT, ["a.gguf"]), None, lambda *_: None)
    assert ends == [50, 200, 300]


def test_a_file_that_is_shorter_than_it_says(llama: Path, tmp_path: Path) -> None:
    data = llama.read_bytes()
    (tmp_path / "a.gguf").write_bytes(data[:-1])
    assert f"found {len(data) - 1} bytes, expected" in refused(tmp_path / "a.gguf")


def test_without_the_package_the_error_says_what_to_install(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name == "offplan.checkpoint.gguf" and rest[2] == ("reader",):
            raise ImportError("No module named 'gguf'")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    told = refused(llama)
    assert "pip install '.[gguf]'" in told
    assert "llama.cpp, Ollama or LM Studio" in told

import json
import os
import subprocess
import sys

import pytest

from offplan.checkpoint.folder import parse_index
from offplan.checkpoint.open import open_model
from offplan.errors import CheckpointError
from tests.checkpoint.files import (
    DENSE_CONFIG,
    dense_shapes,
    header_bytes,
    split_in_two,
    write_folder,
    write_sparse,
)

INDEX = "model.safetensors.index.json"
FIRST = "model-00001-of-00002.safetensors"
SECOND = "model-00002-of-00002.safetensors"


@pytest.fixture
def sharded(tmp_path):
    return write_folder(tmp_path / "model", DENSE_CONFIG, split_in_two(dense_shapes()))


def refusal(source) -> str:
    with pytest.raises(CheckpointError) as raised:
        open_model(str(source))
    text = str(raised.value)
    assert text.isprintable()
    assert len(text) < 700
    return text


def change_index(folder, change):
    path = folder / INDEX
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def test_one_file_and_shards_are_the_same_model(tmp_path, sharded):
    single = write_folder(tmp_path / "single", DENSE_CONFIG, {"model.safetensors": dense_shapes()})
    one, two = open_model(str(single)), open_model(str(sharded))
    assert one.headers_sha256 == two.headers_sha256
    assert one.total_bytes == two.total_bytes == 2 * (2 * 128 + 2 * (64 + 32 + 32 + 96))
    assert one.revision is None
    assert [layer.prefix for layer in one.layers] == ["model.layers.0", "model.layers.1"]
    assert {tensor.shard for tensor in two.outside} == {FIRST, SECOND}


def test_offsets_point_at_the_tensors(tmp_path):
    folder = write_folder(tmp_path, DENSE_CONFIG, {"model.safetensors": dense_shapes()})
    model = open_model(str(folder))
    tensors = [t for layer in model.layers for p in layer.parameters for t in p.tensors]
    tensors += model.outside
    first = min(tensor.offset for tensor in tensors)
    last = max(tensor.offset + tensor.nbytes for tensor in tensors)
    size = (folder / "model.safetensors").stat().st_size
    assert last == size
    assert last - first == model.total_bytes


def test_only_headers_are_read(tmp_path):
    # 4 TiB on paper, nothing on disk: reading any of it would not end.
    shapes = dense_shapes() | {"lm_head.weight": ("BF16", (2**20, 2**20))}
    folder = write_folder(tmp_path, DENSE_CONFIG, {})
    try:
        write_sparse(folder / "model.safetensors", shapes)
    except OSError:
        pytest.skip("this filesystem has no sparse files of 2 TiB")
    assert open_model(str(folder)).total_bytes > 2**41


def test_progress_counts_shards(sharded):
    heard = []
    open_model(str(sharded), on_progress=lambda done, total: heard.append((done, total)))
    assert heard == [(1, 2), (2, 2)]


def test_symbolic_links_are_followed(tmp_path, sharded):
    # The Hub's cache keeps shards as links to blobs outside the folder.
    os.rename(sharded / FIRST, tmp_path / "blob")
    (sharded / FIRST).symlink_to(tmp_path / "blob")
    assert open_model(str(sharded)).num_tensors == 10


def test_missing_shard(sharded):
    (sharded / SECOND).unlink()
    assert f"1 of 2 shards are missing, the first is '{SECOND}'" in refusal(sharded)


def test_shard_cut_short(sharded):
    data = (sharded / FIRST).read_bytes()
    (sharded / FIRST).write_bytes(data[:-1])
    assert "cut short" in refusal(sharded)


def test_tensor_in_the_index_that_no_shard_has(sharded):
    change_index(sharded, lambda weights: weights.update({"model.extra.weight": FIRST}))
    assert "tensor 'model.extra.weight' is absent from the shards" in refusal(sharded)


def test_tensor_that_the_index_does_not_list(sharded):
    change_index(sharded, lambda weights: weights.pop("lm_head.weight"))
    text = refusal(sharded)
    assert "'lm_head.weight' is in" in text
    assert "not in the index" in text


def test_tensor_in_another_shard_than_the_index_says(sharded):
    def swap(weights):
        weights["lm_head.weight"] = FIRST if weights["lm_head.weight"] == SECOND else SECOND

    change_index(sharded, swap)
    assert "as model.safetensors.index.json says" in refusal(sharded)


def test_tensor_in_two_shards(tmp_path):
    shards = split_in_two(dense_shapes())
    shards[SECOND] = {**shards[SECOND], "model.embed_tokens.weight": ("BF16", (16, 8))}
    folder = write_folder(tmp_path, DENSE_CONFIG, shards)
    assert "expected once" in refusal(folder)


HOSTILE = [
    "../secret.safetensors",
    "/etc/passwd",
    "a/../../b.safetensors",
    "..",
    "",
    ".",
    "a//b",
    "C:\\model.safetensors",
    "..\\model.safetensors",
    "a\0b",
    "a\x1b[31mred",
    "a\u202eb",
    "\ud800",
    "a" * 5000,
    7,
    None,
    ["model.safetensors"],
    {"a": "b"},
]


@pytest.mark.parametrize("shard", HOSTILE, ids=ascii)
def test_hostile_shard_names_are_refused(tmp_path, shard):
    index = {"weight_map": {"model.norm.weight": FIRST, "lm_head.weight": shard}}
    folder = write_folder(tmp_path, DENSE_CONFIG, {}, index)
    assert "do not trust this checkpoint" in refusal(folder)


@pytest.mark.parametrize(
    "index",
    [[], {}, {"weight_map": []}, {"weight_map": {}}, {"weight_map": "x"}, "text", 3],
    ids=json.dumps,
)
def test_index_that_is_none(tmp_path, index):
    folder = write_folder(tmp_path, DENSE_CONFIG, {}, index)
    assert "expected" in refusal(folder)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"nonsense",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"model_type": "a", "model_type": "b"}',
        b"{}",
        b'{"model_type": 3}',
        b'{"model_type": "a\\u001b[2Jb"}',
        b'{"model_type": "llama", "num_hidden_layers": 1000000}',
        b'{"model_type": "llama", "num_hidden_layers": "two"}',
        b'{"model_type": "llama", "num_hidden_layers": -2}',
        b'{"model_type": "llama", "num_hidden_layers": 1e400}',
        b'{"model_type": "llama", "num_hidden_layers": [2, 3]}',
        b'{"model_type": "llama", "num_hidden_layers": 99}',
        b'{"model_type": "llama", "num_hidden_layers": 2, "num_key_value_heads": {"a": 1}}',
        b'{"model_type": "llama", "num_hidden_layers": 2, "sliding_window": "wide"}',
        b'{"model_type": "t5", "num_hidden_layers": 2, "is_encoder_decoder": true}',
    ],
)
def test_config_that_is_none(tmp_path, text):
    shapes = {name: s for name, s in dense_shapes().items() if "k_proj" not in name}
    folder = write_folder(tmp_path, {}, {"model.safetensors": shapes})
    (folder / "config.json").write_bytes(text)
    refusal(folder)


def test_a_version_of_more_digits_than_python_converts(tmp_path):
    config = {**DENSE_CONFIG, "transformers_version": "9" * 5000}
    folder = write_folder(tmp_path, config, {"model.safetensors": dense_shapes()})
    assert not open_model(str(folder)).architecture.fused_experts


def test_values_nested_deeply(tmp_path):
    nested = "{" + '"of": {' * 700 + "}" * 700
    folder = write_folder(tmp_path, DENSE_CONFIG, {"model.safetensors": dense_shapes()})
    (folder / "generation_config.json").write_text(nested + "}")
    assert open_model(str(folder)).config_sha256
    (folder / "config.json").write_text(json.dumps(DENSE_CONFIG)[:-1] + ', "of": ' + nested + "}}")
    assert "nested more than 100 deep" in refusal(folder)


def test_folder_without_weights_says_what_it_found(tmp_path):
    folder = write_folder(tmp_path, DENSE_CONFIG, {})
    told = refusal(folder)
    assert f"{folder}: found no weights" in told
    assert f"plan from the config alone: name {folder / 'config.json'}" in told
    (folder / "pytorch_model.bin").touch()
    assert "convert the weights to safetensors" in refusal(folder)
    (folder / "model-00001-of-00002.safetensors").touch()
    assert "fetch the index too" in refusal(folder)


def test_folder_without_config(tmp_path):
    assert "found no config.json" in refusal(tmp_path)


def test_pipe_in_place_of_weights_does_not_block(tmp_path):
    folder = write_folder(tmp_path, DENSE_CONFIG, {})
    os.mkfifo(folder / "model.safetensors")
    assert "no model.safetensors.index.json" in refusal(folder)


def test_unreadable_shard(tmp_path, monkeypatch):
    folder = write_folder(tmp_path, DENSE_CONFIG, {"model.safetensors": dense_shapes()})

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.open", refuse)
    assert "Permission denied" in refusal(folder)


def test_header_without_tensors(tmp_path):
    folder = write_folder(tmp_path, DENSE_CONFIG, {})
    (folder / "model.safetensors").write_bytes(header_bytes({}))
    assert "found no tensors" in refusal(folder)


@pytest.mark.parametrize(
    "source",
    [
        "",
        "./nowhere",
        "model.safetensors",
        "config.json",
        "./no/where",
        "a/b/c",
        "../no-such-folder",
        "x\0y",
        "/" + "a" * 5000,
        "a b/c",
        "~",
    ],
)
def test_source_that_is_nothing(source):
    assert "expected a folder" in refusal(source)


def test_name_in_a_folder_that_is_there_is_a_path(tmp_path, monkeypatch):
    (tmp_path / "org").mkdir()
    monkeypatch.chdir(tmp_path)
    told = refusal("org/name")
    assert f"found nothing of this name in '{tmp_path}/org'" in told
    assert "name a `revision` if the Hub's model is meant" in told


def test_source_that_is_another_file(tmp_path):
    path = tmp_path / "model.safetensors"
    path.touch()
    assert "found a file" in refusal(path)


def test_revision_is_for_the_hub(tmp_path):
    with pytest.raises(CheckpointError, match="no revisions"):
        open_model(str(tmp_path), revision="main")


def test_a_folder_is_read_without_heavy_imports(sharded):
    script = (
        "import sys; from offplan.checkpoint.open import open_model; open_model(sys.argv[1]); "
        "print([m for m in ('torch', 'transformers', 'huggingface_hub') if m in sys.modules])"
    )
    command = [sys.executable, "-c", script, str(sharded)]
    assert subprocess.check_output(command, text=True).strip() == "[]"


def test_adapter_folder_is_called_one(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"found an adapter .* merge it into its base model"):
        open_model(str(tmp_path))


@pytest.mark.parametrize("part", ["lora_A", "lora_B", "base_layer"])
def test_adapter_that_is_not_merged_is_called_one(tmp_path, part):
    shapes = {**dense_shapes(), f"model.layers.0.self_attn.q_proj.{part}.weight": ("BF16", (2, 8))}
    write_folder(tmp_path, DENSE_CONFIG, {"model.safetensors": shapes})
    with pytest.raises(CheckpointError, match="found an adapter"):
        open_model(str(tmp_path))


def test_layers_without_any_element(tmp_path):
    shapes = {
        name: ("BF16", (0, 8)) if "layers" in name else shape
        for name, shape in dense_shapes().items()
    }
    write_folder(tmp_path, DENSE_CONFIG, {"model.safetensors": shapes})
    with pytest.raises(CheckpointError, match="tensors are all empty"):
        open_model(str(tmp_path))


@pytest.mark.parametrize("size", ["Infinity", "-Infinity", "NaN", "1e400", "1e308", "-5", "9" * 99])
def test_total_size_that_is_none_counts_as_absent(size):
    text = f'{{"weight_map": {{"a": "b"}}, "metadata": {{"total_size": {size}}}}}'
    assert parse_index(text.encode(), "x").total_size is None

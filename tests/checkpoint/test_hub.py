import gzip
import json
import os
import re
import shutil
import threading
from typing import Any

import pytest
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import LocalEntryNotFoundError

from offplan.checkpoint import answers
from offplan.checkpoint.config import GENERATION_NAME, NO_GENERATION, fingerprint_generation
from offplan.checkpoint.open import open_model
from offplan.held.held import hold
from tests.checkpoint.files import (
    DENSE_CONFIG,
    dense_shapes,
    entries,
    header_bytes,
    safetensors_bytes,
    split_in_two,
    write_folder,
)
from tests.checkpoint.hub_server import COMMIT, REPO, Hub, open_from, start
from tests.checkpoint.quantised import FORMATS, write_quantised

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FIRST = "model-00001-of-00002.safetensors"
SECOND = "model-00002-of-00002.safetensors"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same checkpoint in one file and in two."""
    root = tmp_path_factory.mktemp("hub")
    single = write_folder(root / "single", DENSE_CONFIG, {SINGLE: dense_shapes()})
    return single, write_folder(root / "sharded", DENSE_CONFIG, split_in_two(dense_shapes()))


@pytest.fixture
def serve():
    """A function that starts a hub; it ends with the test."""
    servers = []

    def serve_files(folder, **behaviour):
        hub = Hub({path.name: path.read_bytes() for path in folder.iterdir()}, **behaviour)
        servers.append(start(hub))
        return hub

    yield serve_files
    for server in servers:
        server.RequestHandlerClass.hub.released.set()
        server.shutdown()
        server.server_close()


@pytest.fixture
def single(serve, folders):
    return serve(folders[0])


@pytest.fixture
def sharded(serve, folders):
    return serve(folders[1])


def refusal(hub, home, exit_code=2, **options) -> str:
    got = open_from(hub.url, home, **options)
    text = got["error"]
    assert got["exit_code"] == exit_code
    assert text.isprintable()
    assert len(text) < 500
    return text


@pytest.mark.slow
def test_hub_and_folder_are_the_same_model(sharded, folders, tmp_path):
    got = open_from(sharded.url, tmp_path, revision="v1", HF_TOKEN="hf_secret")
    local = open_model(str(folders[1]))
    assert got["sha"] == local.headers_sha256
    assert got["num_tensors"] == local.num_tensors
    assert got["loaded_bytes"] == hold(local).loaded_bytes
    assert got["offsets"] == sorted(tensor.offset for tensor in local.outside)
    assert got["revision"] == COMMIT
    assert got["heard"] == [[1, 2], [2, 2]]
    assert sharded.tokens == {"Bearer hf_secret"}


@pytest.mark.slow
def test_with_a_revision_the_hub_is_meant_beside_a_folder_of_that_name(
    single, folders, tmp_path, monkeypatch
):
    """As where a plan made from the Hub runs beside a download; without one the folder is."""
    (tmp_path / REPO).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    got = open_from(single.url, tmp_path / "home", revision=COMMIT, files="config.json")
    assert got["sha"] == open_model(str(folders[0])).headers_sha256
    single.answers = {"config.json": lambda handler: handler.send_error(500)}
    text = refusal(single, tmp_path / "other", exit_code=1, revision="v1")
    assert "leave the revision out for what is on disk" in text
    asked = len(single.requests)
    assert "config.json" in refusal(single, tmp_path / "home")
    assert len(single.requests) == asked


@pytest.mark.slow
def test_what_modelopt_says_beside_a_config_that_is_silent_is_fetched(serve, tmp_path):
    format = FORMATS["modelopt fp8"]._replace(config=None)
    folder = write_quantised(tmp_path / "model", format)
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"bits": 8}}))
    hub = serve(folder)
    got = open_from(hub.url, tmp_path / "home")
    assert got["config_sha"] == open_model(str(folder)).config_sha256
    assert open_from(hub.url, tmp_path / "home", HF_HUB_OFFLINE="1") == got


@pytest.mark.slow
def test_the_generation_config_is_part_of_the_model(serve, folders, tmp_path):
    assert open_model(str(folders[0])).generation == NO_GENERATION
    hub = serve(folders[0])
    assert open_from(hub.url, tmp_path / "none")["generation"] == NO_GENERATION
    assert open_from(hub.url, tmp_path / "none", HF_HUB_OFFLINE="1")["generation"] == NO_GENERATION
    hub.files[GENERATION_NAME] = b'{"eos_token_id": 2}'
    got = open_from(hub.url, tmp_path / "home")
    assert got["generation"] == fingerprint_generation(b'{"eos_token_id": 2}')
    asked = len(hub.requests)
    assert open_from(hub.url, tmp_path / "home", HF_HUB_OFFLINE="1") == got
    assert open_from("http://127.0.0.1:9", tmp_path / "home") == got
    assert len(hub.requests) == asked
    for path in (tmp_path / "home" / "hub").rglob(GENERATION_NAME):
        path.unlink()  # as it is where another program brought the rest
    unknown = open_from(hub.url, tmp_path / "home", HF_HUB_OFFLINE="1")
    assert unknown == {**got, "generation": None}


@pytest.mark.slow
def test_name_without_an_organisation_and_files_elsewhere(single, folders, tmp_path):
    # The Hub sends on from an old name to its new one, and from a large file to where it lies.
    single.old_name, single.elsewhere = "tiny", True
    got = open_from(single.url, tmp_path, repo="tiny", HF_TOKEN="hf_secret")
    assert got["sha"] == open_model(str(folders[0])).headers_sha256
    assert got["revision"] == COMMIT
    assert single.tokens_elsewhere == {""}
    assert open_from(single.url, tmp_path, repo="tiny", HF_HUB_OFFLINE="1") == got


@pytest.mark.slow
def test_one_ranged_request_a_shard(sharded, tmp_path):
    open_from(sharded.url, tmp_path)
    look_for_one_file, *rest = sharded.shard_gets()
    assert look_for_one_file[1] == SINGLE
    assert sorted(name for _, name, _ in rest) == [FIRST, SECOND]
    assert all(asked.startswith("bytes=0-") and len(asked) <= 12 for _, _, asked in rest)


@pytest.mark.slow
def test_second_run_and_offline_need_no_shard(sharded, tmp_path):
    online = open_from(sharded.url, tmp_path)
    asked = len(sharded.shard_gets())
    assert open_from(sharded.url, tmp_path) == online
    assert len(sharded.shard_gets()) == asked
    assert open_from("http://127.0.0.1:9", tmp_path, HF_HUB_OFFLINE="1") == online
    # The network gone without a word: what the revision was last known as.
    assert open_from("http://127.0.0.1:9", tmp_path) == online


@pytest.mark.slow
def test_one_file_offline(single, tmp_path):
    online = open_from(single.url, tmp_path)
    assert [name for _, name, _ in single.shard_gets()] == [SINGLE]
    assert open_from(single.url, tmp_path, HF_HUB_OFFLINE="1") == online


@pytest.mark.slow
def test_offline_without_a_cache(single, tmp_path):
    text = refusal(single, tmp_path, HF_HUB_OFFLINE="1")
    assert (
        f"config.json is not in the cache {tmp_path / 'hub'} and HF_HUB_OFFLINE is set; unset"
        in text
    )
    assert not single.requests


def cut(cached):
    cached.write_bytes(cached.read_bytes()[:40])


def flip_a_name(cached):
    cached.write_bytes(cached.read_bytes().replace(b"layers.0", b"layers.2"))


def put_a_pipe(cached):
    cached.unlink()
    os.mkfifo(cached)


@pytest.mark.slow
@pytest.mark.parametrize("damage", [cut, flip_a_name, put_a_pipe])
def test_damaged_cache_is_read_again(single, tmp_path, damage):
    online = open_from(single.url, tmp_path)
    (cached,) = tmp_path.glob(f"offplan/headers/org--tiny/{COMMIT}/*")
    damage(cached)
    assert open_from(single.url, tmp_path) == online
    assert len(single.shard_gets()) == 2


@pytest.mark.slow
def test_weights_in_the_hubs_own_cache_are_used(sharded, folders, tmp_path):
    online = open_from(sharded.url, tmp_path)
    shutil.rmtree(tmp_path / "offplan")
    snapshot = tmp_path / "hub" / "models--org--tiny" / "snapshots" / COMMIT
    for shard in (FIRST, SECOND):
        shutil.copy(folders[1] / shard, snapshot)
    assert open_from(sharded.url, tmp_path, HF_HUB_OFFLINE="1") == online


@pytest.mark.slow
def test_header_longer_than_the_first_read(serve, folders, tmp_path):
    hub = serve(folders[0])
    header, size = entries(dense_shapes())
    padded = {"__metadata__": {"note": "x" * 200_000}, **header}
    hub.files[SINGLE] = header_bytes(padded) + bytes(size)
    got = open_from(hub.url, tmp_path)
    assert got["sha"] == open_model(str(folders[0])).headers_sha256
    asked = [asked for _, _, asked in hub.shard_gets()]
    assert asked[0] == "bytes=0-65535"
    assert asked[1].startswith("bytes=65536-")
    assert hub.sent_bytes < 210_000


@pytest.mark.slow
@pytest.mark.parametrize("metadata", ["x", "x" * 200_000])
def test_server_that_ignores_range_sends_little(serve, folders, tmp_path, metadata):
    hub = serve(folders[0], ignore_range=True)
    header, size = entries(dense_shapes())
    head = entries({"model.layers.0.big.weight": ("U8", (2**30,))})[0]
    head["model.layers.0.big.weight"]["data_offsets"] = [size, size + 2**30]
    hub.files[SINGLE] = header_bytes({"__metadata__": {"a": metadata}, **header, **head})
    hub.tails[SINGLE] = size + 2**30
    got = open_from(hub.url, tmp_path)
    assert got["num_tensors"] == 11
    # What sockets buffer, twice at most, and not the gigabyte.
    assert hub.sent_bytes < 2**25


def test_dropped_connections_and_busy_servers_are_tried_again(sharded, folders, tmp_path):
    sharded.drops = {FIRST: 2, SECOND: 1}
    sharded.statuses = {SECOND: [503, 429, 200]}
    got = open_from(sharded.url, tmp_path)
    assert got["sha"] == open_model(str(folders[1])).headers_sha256


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (401, "GatedRepo", "accept its terms"),
        (401, "", "HTTP 401: access without a token is refused; set HF_TOKEN"),
        (401, "RepoNotFound", "no such model"),
        (403, "", "HTTP 403: access without a token is refused; set HF_TOKEN"),
        (407, "", "HTTP 407: the proxy wants a login; write its name and password into"),
        (404, "EntryNotFound", "no model-00001-of-00002.safetensors"),
        (416, "", "HTTP 416: the file is empty"),
        (429, "", "wait five minutes, or set HF_TOKEN for a higher limit"),
        (500, "", "failed (HTTP 500), also when asked again; try again later"),
        (418, "", "HTTP 418: the server refused"),
    ],
)
def test_refused_shard(sharded, tmp_path, status, code, message):
    sharded.statuses, sharded.error_code = {FIRST: [status]}, code
    busy = status in (429, 500)
    assert message in refusal(sharded, tmp_path, exit_code=1 if busy else 2)
    tries = [name for _, name, _ in sharded.shard_gets() if name == FIRST]
    assert len(tries) == (4 if busy else 1)


@pytest.mark.slow
def test_server_that_fails_from_the_first_request(single, tmp_path):
    single.statuses = {"config.json": [503]}
    assert f"the server {single.url} failed (HTTP 503)" in refusal(single, tmp_path, exit_code=1)


@pytest.mark.slow
def test_connection_that_is_always_cut(sharded, tmp_path):
    sharded.drops = {FIRST: 99}
    assert f"{FIRST}: no valid answer from {sharded.url}" in refusal(sharded, tmp_path, exit_code=1)


@pytest.mark.slow
def test_server_that_stalls(sharded, tmp_path):
    sharded.stall = FIRST
    text = refusal(sharded, tmp_path, exit_code=1, HF_HUB_DOWNLOAD_TIMEOUT="1")
    assert f"{FIRST}: no valid answer from {sharded.url}" in text


@pytest.mark.slow
def test_server_that_drips(sharded, tmp_path):
    sharded.drip = FIRST
    assert "bytes came in time" in refusal(sharded, tmp_path, exit_code=1)


@pytest.mark.slow
def test_nothing_listens(tmp_path):
    got = open_from("http://127.0.0.1:9", tmp_path)
    text = got["error"]
    assert got["exit_code"] == 1
    assert "config.json: cannot reach http://127.0.0.1:9 (" in text
    assert "check the network and HF_ENDPOINT, or name a folder" in text


@pytest.mark.parametrize("has_answered", [False, True])
def test_a_hub_that_has_never_answered_is_asked_once(tmp_path, monkeypatch, has_answered):
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    monkeypatch.setattr(answers, "_HAS_ANSWERED", threading.Event())
    if has_answered:
        answers._HAS_ANSWERED.set()
    nowhere = {"endpoint": "http://127.0.0.1:9", "cache_dir": tmp_path}
    with answers.checked_session(), pytest.raises(LocalEntryNotFoundError):
        hf_hub_download(REPO, "config.json", **nowhere)
    assert bool(waits) is has_answered


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repo": "org/other"}, "org/other: found nothing of this name on disk and no such model"),
        ({"repo": "gpt9"}, "gpt9: found nothing of this name on disk and no such model"),
        ({"repo": "gpt9"}, "(most have their owner's name before them: Qwen/Qwen3-8B)"),
        ({"repo": "gpt-oss-20B"}, "check the name (is openai/gpt-oss-20b meant?)"),
        ({"repo": "qwen/Qwen-3-8b"}, "check the name (is Qwen/Qwen3-8B meant?)"),
        ({"revision": "v9"}, "org/tiny@v9: found no such revision"),
        ({"repo": "org/a--b"}, "not a Hub id"),
    ],
)
def test_model_that_is_not_there(single, tmp_path, options, message):
    assert message in refusal(single, tmp_path, **options)


@pytest.mark.slow
def test_repository_without_safetensors(serve, folders, tmp_path):
    hub = serve(folders[0])
    del hub.files[SINGLE]
    assert "found no weights among its files ('config.json'), expected" in refusal(hub, tmp_path)
    hub.lists_files = False
    assert f"found no {INDEX}" in refusal(hub, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pytorch_model.bin", "weights in pickled files, expected .* call save_pretrained"),
        ("model_index.json", "a pipeline of diffusers, expected .* name a language model"),
        ("consolidated.safetensors", "its maker's own layout, expected .* ends in -hf"),
        ("unet.safetensors", "safetensors that no model.safetensors.index.json lists"),
        ("model.onnx", "another program's format, expected .* name the same model"),
    ],
)
def test_what_a_repository_has_in_place_of_a_checkpoint(serve, folders, tmp_path, name, message):
    hub = serve(folders[0])
    hub.files = {"README.md": b"", name: b"x"}
    assert re.search(f"org/tiny: found '{name}', {message}", refusal(hub, tmp_path))


@pytest.mark.slow
def test_a_tag_of_a_repository_that_has_safetensors_alone(single, tmp_path):
    text = refusal(single, tmp_path, repo="org/tiny:Q4_K_M")
    assert (
        "found no GGUF file there, expected one of 'Q4_K_M'; for its safetensors name org" in text
    )


@pytest.mark.slow
def test_a_token_that_has_no_access_is_not_asked_for_again(single, tmp_path):
    single.statuses, single.error_code = {"config.json": [403]}, "GatedRepo"
    with_token = refusal(single, tmp_path, HF_TOKEN="hf_secret")
    assert "the token that is set has no access; accept its terms at" in with_token
    assert "and no token is set; accept its terms at" in refusal(single, tmp_path)
    single.error_code = ""
    assert "set another HF_TOKEN" in refusal(single, tmp_path, HF_TOKEN="hf_secret")
    single.statuses = {"config.json": [429]}
    busy = refusal(single, tmp_path, exit_code=1, HF_TOKEN="hf_secret")
    assert "wait five minutes" in busy
    assert "HF_TOKEN" not in busy


@pytest.mark.slow
@pytest.mark.parametrize("damaged", ["config.json", FIRST, INDEX])
def test_what_to_remove_where_the_cache_is_damaged(sharded, tmp_path, damaged):
    open_from(sharded.url, tmp_path, files="config.json")
    cached = next((tmp_path / "hub").rglob(f"snapshots/*/{damaged}")).resolve()
    cached.write_bytes(cached.read_bytes()[:50])
    text = refusal(sharded, tmp_path)
    assert f"remove {tmp_path / 'hub' / 'models--org--tiny'} and try again" in text


@pytest.mark.slow
def test_answers_that_are_no_hubs(single, tmp_path):
    def log_in(handler):
        handler.send_head(200, Content_Length="5")
        handler.wfile.write(b"Hello")

    single.everywhere = log_in
    assert "none of a Hub's: it may be the login page" in refusal(single, tmp_path, exit_code=1)
    secure = open_from(single.url.replace("http:", "https:"), tmp_path)["error"]
    assert "no trusted connection to" in secure
    assert "SSL_CERT_FILE" in secure
    assert "found 'hub.example' as HF_ENDPOINT" in open_from("hub.example", tmp_path)["error"]


@pytest.mark.slow
def test_a_proxy_is_named_by_its_variable_alone(tmp_path):
    proxy = "http://me:secret@127.0.0.1:9"
    text = open_from("http://hub.example", tmp_path, HTTP_PROXY=proxy, NO_PROXY="")["error"]
    assert "check the network, the proxy of HTTP_PROXY and HF_ENDPOINT" in text
    assert "secret" not in text


def test_hostile_index_is_refused_before_any_request(serve, folders, tmp_path):
    hub = serve(folders[1])
    hub.files[INDEX] = json.dumps({"weight_map": {"a": "../../evil.safetensors"}}).encode()
    assert "do not trust this checkpoint" in refusal(hub, tmp_path)
    assert [name for _, name, _ in hub.shard_gets()] == [SINGLE]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "HTTP 416"),
        (b"\x01", "found 1 bytes"),
        (b"<!doctype html><title>Sign in</title>", "not a safetensors file"),
        (safetensors_bytes(dense_shapes())[:-5], "cut short"),
    ],
)
def test_shard_that_is_none(serve, folders, tmp_path, content, message):
    hub = serve(folders[0])
    hub.files[SINGLE] = content
    text = refusal(hub, tmp_path)
    assert message in text
    assert text.startswith(REPO)
    assert not list(tmp_path.glob("offplan/headers/**/*.header"))


BODIES = {
    "binary": ({}, b"\xff\xfe\x00" * 40),
    "not what it is compressed as": ({"Content_Encoding": "gzip"}, b"<html>"),
    "list": ({"Content_Type": "application/json"}, b"[1, 2]"),
    "list of errors": ({}, b'{"errors": [1]}'),
    "number of seconds": ({"RateLimit": f'"api";r=0;t={"9" * 5000}'}, b""),
    "warning": ({"X_HF_Warning": "a; \x1b[2J"}, b""),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [FIRST, "config.json"])
@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize("status", [403, 429])
def test_body_of_an_error_is_not_read(sharded, tmp_path, name, kind, status):
    headers, body = BODIES[kind]

    def answer(handler):
        handler.send_head(status, **headers, Content_Length=str(len(body)))
        handler.wfile.write(body)

    sharded.answers = {name: answer}
    refusal(sharded, tmp_path, exit_code=2 if status == 403 else 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", [FIRST, "config.json"])
def test_endless_error(sharded, tmp_path, name):
    def answer(handler):
        if handler.command == "HEAD" and name == "config.json":
            return handler.send_head(200, X_Repo_Commit=COMMIT, ETag='"a"')
        handler.send_head(403)
        return handler.send_on(bytes(2**16))

    sharded.answers = {name: answer}
    assert "HTTP 403" in refusal(sharded, tmp_path)
    assert sharded.sent_bytes < 2**25


@pytest.mark.slow
def test_endless_config(single, tmp_path):
    def answer(handler):
        handler.send_head(200, X_Repo_Commit=COMMIT, ETag='"a"')
        if handler.command == "GET":
            handler.send_on(bytes(2**16))

    single.answers = {"config.json": answer}
    assert "config.json: found more than 1048576 bytes" in refusal(single, tmp_path)
    assert single.sent_bytes < 2**26


def endless(handler):
    handler.send_head(200, X_Repo_Commit=COMMIT, ETag='"a"')
    if handler.command == "GET":
        handler.send_on(b" " * 2**16)


def endless_slowly(handler):
    handler.send_head(200)
    handler.send_slowly(b" ")


def endless_redirect(handler):
    handler.send_head(302, Location=handler.path)
    if handler.command == "GET":
        handler.send_on(b" " * 2**16)


def unfolding(handler):
    nested = gzip.compress(gzip.compress(bytes(2**26)))
    encoding = {"Content_Encoding": "gzip, gzip", "Content_Length": str(len(nested))}
    handler.send_head(200, X_Repo_Commit=COMMIT, ETag='"a"', **encoding)
    if handler.command == "GET":
        handler.wfile.write(nested)


AGENTS = "/api/agent-harnesses"
"""What huggingface_hub 2 asks for before its first request, and reads whole."""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["everywhere", AGENTS])
@pytest.mark.parametrize("answer", [endless, endless_slowly, endless_redirect, unfolding])
def test_hostile_hub_takes_little_memory(single, folders, tmp_path, where, answer):
    options: dict[str, Any] = {"HF_HUB_DISABLE_TELEMETRY": "0", "patience_s": 2}
    if where == AGENTS:
        single.answers = {AGENTS: answer}
        assert open_from(single.url, tmp_path, **options)["revision"] == COMMIT
    else:
        single.everywhere = answer
        got = open_from(single.url, tmp_path, **options)
        assert "config.json: " in got["error"] or "not to be trusted" in got["error"]
        assert got["peak_bytes"] < 600 * 2**20
    if any(path == AGENTS for _, path, _ in single.requests):  # huggingface_hub 1 asks for none
        assert single.requests[0] == ("GET", AGENTS, "")
    assert single.sent_bytes < 2**25


@pytest.mark.slow
def test_checks_outlast_a_client_that_failed(single, tmp_path):
    """huggingface_hub makes another client where a connection fails, and tries again with it."""
    from huggingface_hub import close_session, get_session

    from offplan.checkpoint.answers import _check, checked_session

    with checked_session() as session:
        close_session()
        assert get_session() is not session
        assert _check in get_session().event_hooks["response"]
        assert get_session().follow_redirects


def slow_head(handler):
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    handler.send_slowly(b"a")


def slow_config(handler):
    handler.send_head(200, X_Repo_Commit=COMMIT, ETag='"a"', Content_Length="1000")
    if handler.command == "GET":
        handler.send_slowly(b"{")


def around(handler):
    handler.send_head(302, Location=handler.path, Content_Length="0")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("config.json", slow_head),
        ("config.json", slow_config),
        (INDEX, slow_config),
        (FIRST, slow_head),
    ],
)
def test_answer_that_never_ends_is_not_waited_for(sharded, tmp_path, name, answer):
    sharded.answers = {name: answer}
    text = refusal(sharded, tmp_path, exit_code=1, patience_s=1)
    assert "nothing more came in 1 s" in text
    assert name in text or "headers" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["config.json", FIRST])
def test_redirects_without_end(sharded, tmp_path, name):
    sharded.answers = {name: around}
    assert f"{name}: no valid answer" in refusal(sharded, tmp_path, exit_code=1)
    assert len(sharded.requests) < 200


@pytest.mark.slow
@pytest.mark.parametrize("seconds", ["100000", "9" * 5000, "\u00b2", "-1", "soon"])
@pytest.mark.parametrize("name", ["config.json", FIRST])
def test_wait_that_the_server_asks_for_is_short(sharded, tmp_path, seconds, name):
    def answer(handler):
        handler.send_head(429, Retry_After=seconds, Content_Length="0")

    sharded.answers = {name: answer}
    got = open_from(sharded.url, tmp_path)
    assert "too many requests" in got["error"]
    assert got["wait"] <= 15


@pytest.mark.slow
@pytest.mark.parametrize("digits", ["9" * 5000, "9" * 19, "-3", "\u00b2"])
def test_size_of_a_file_that_is_no_number(sharded, tmp_path, digits):
    def answer(handler):
        handler.send_head(206, Content_Range=f"bytes 0-999/{digits}", Content_Length="4")
        handler.wfile.write(b"none")

    sharded.answers = {FIRST: answer}
    refusal(sharded, tmp_path, exit_code=1)


@pytest.mark.slow
@pytest.mark.parametrize("header", ["X_Repo_Commit", "X_Linked_ETag", "ETag"])
@pytest.mark.parametrize(
    ("value", "status"),
    [("../../../../outside", 200), ("/etc/x", 404), ("..", 404), ("a\\b", 200), ("a" * 300, 200)],
)
def test_names_that_lead_out_of_the_cache(single, tmp_path, header, value, status):
    def answer(handler):
        headers = {"X_Repo_Commit": COMMIT, "ETag": '"a"', header: value}
        handler.send_head(status, **headers, X_Error_Code="EntryNotFound", Content_Length="2")
        if handler.command == "GET":
            handler.wfile.write(b"{}")

    single.answers = {"config.json": answer}
    home = tmp_path / "deep" / "down" / "home"
    assert "expected the plain name of a version" in refusal(single, home)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.slow
@pytest.mark.parametrize("revision", ["../../x", "/x", "a//b", "a\\b", "..", "a" * 300])
def test_revision_that_leads_out_of_the_cache(single, tmp_path, revision):
    text = refusal(single, tmp_path, revision=revision)
    assert "expected a branch, a tag or a commit" in text
    assert not single.requests


@pytest.mark.slow
@pytest.mark.parametrize("way", ["route", "link"])
@pytest.mark.parametrize(
    ("route", "home"),
    [
        ("{elsewhere}/token", {"THIS_IS_HOME": "1"}),
        ("http://127.0.0.1@localhost:1/", {"THIS_IS_HOME": "1"}),
        ("[", {"THIS_IS_HOME": "1"}),
        ("{here}/token", {}),
    ],
)
def test_xet_is_for_the_hub_itself_alone(serve, folders, tmp_path, way, route, home):
    hub = serve(folders[0])
    config, hub.files["token"] = hub.files["config.json"], b"{}"
    here = hub.url + "/elsewhere"
    route = route.format(here=here, elsewhere=here.replace("127.0.0.1", "localhost"))

    def answer(handler):
        named = {"X_Xet_Refresh_Route": route} if way == "route" else {}
        named |= {"Link": f'<{route}>; rel="xet-auth"'} if way == "link" else {}
        named |= {"X_Xet_Hash": "a" * 64, "Content_Length": str(len(config))}
        handler.send_head(200, X_Repo_Commit=COMMIT, ETag='"a"', **named)
        if handler.command == "GET":
            handler.wfile.write(config)

    hub.answers = {"config.json": answer}
    got = open_from(hub.url, tmp_path, HF_TOKEN="hf_secret", **home)
    assert hub.tokens_elsewhere == set()
    # It is fetched the plain way, or not at all.
    assert "no valid answer" in got["error"] if route == "[" else got["revision"] == COMMIT


@pytest.mark.slow
def test_weights_and_small_files_are_fetched(sharded, folders, tmp_path):
    sharded.files["tokenizer.json"] = b"{}"
    sharded.statuses = {SECOND: [200, 503, 429, 200]}
    got = open_from(sharded.url, tmp_path, files="tokenizer.json,merges.txt")
    sizes = {name: len(content) for name, content in sharded.files.items()}
    assert got["files"] == sizes
    asked = len(sharded.requests)
    assert open_from(sharded.url, tmp_path, files="tokenizer.json,merges.txt")["files"] == sizes
    # What the commit has, and lacks, is known: the config is asked for, by its branch, and no more.
    assert [name for _, name, _ in sharded.requests[asked:]] == ["config.json"]
    options: dict[str, Any] = {"files": "tokenizer.json,merges.txt", "HF_HUB_OFFLINE": "1"}
    assert open_from("http://127.0.0.1:9", tmp_path, **options)["files"] == sizes


@pytest.mark.slow
def test_small_files_that_are_not_known_offline_are_lacked(sharded, tmp_path):
    open_from(sharded.url, tmp_path, files="a.json")
    options: dict[str, Any] = {"files": "b.json", "HF_HUB_OFFLINE": "1"}
    assert "b.json" not in open_from("http://127.0.0.1:9", tmp_path, **options)["files"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "status", "exit_code"),
    [(SECOND, 500, 1), (SECOND, 403, 2), ("tokenizer.json", 500, 1)],
)
def test_download_that_fails(sharded, tmp_path, name, status, exit_code):
    open_from(sharded.url, tmp_path)
    sharded.statuses = {name: [status]}
    text = refusal(sharded, tmp_path, exit_code=exit_code, files="tokenizer.json")
    assert f"{name}: " in text
    assert str(status) in text


@pytest.mark.slow
def test_shard_that_is_longer_than_its_header_says(sharded, tmp_path):
    open_from(sharded.url, tmp_path)
    sharded.tails = {SECOND: 2**30}
    assert f"{SECOND}: found more than" in refusal(sharded, tmp_path, files="x")
    assert sharded.sent_bytes < 2**26


@pytest.mark.slow
def test_cache_that_cannot_be_written(single, tmp_path):
    (tmp_path / "hub").write_text("a file where the folder should be")
    text = refusal(single, tmp_path)
    assert f"config.json cannot be kept in {tmp_path}" in text
    assert "try again" not in text


@pytest.mark.slow
def test_adapter_is_called_one(serve, folders, tmp_path):
    hub = serve(folders[0])
    hub.files = {"adapter_config.json": b"{}", "adapter_model.safetensors": b""}
    assert "found an adapter" in refusal(hub, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["./x", "/x/y", "a/b/c", "x/", "../x/y", "~/x", "x/model.gguf"])
def test_paths_are_never_asked_of_the_hub(single, tmp_path, source):
    assert "found nothing o" in refusal(single, tmp_path, repo=source)  # on disk, or of this name
    assert not single.requests

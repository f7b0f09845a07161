"""Feed damaged and hostile checkpoints to the analyzer and print what came of it, as JSON.

    python benchmarks/fuzz_checkpoints.py [--seconds 300] [--seed 0] [--memory 1GiB]

Each input is a folder: one file of it (a shard, the index or ``config.json``) is damaged by bytes
or by meaning. It must be read, or refused in one printable line; anything else (another exception,
a slow input, too much memory) ends the run with that input in ``fuzz-failure/``. Headers are also
given to safetensors itself: what offplan reads, safetensors must read too.
"""

import argparse
import collections
import contextlib
import json
import platform
import random
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors

from offplan.checkpoint.open import open_model
from offplan.errors import CheckpointError
from offplan.units import parse_bytes

SLOW_S = 10.0
INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 3,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 8,
    "head_dim": 2,
    "sliding_window": 4,
    "layer_types": ["full_attention"] * 3,
    "torch_dtype": "bfloat16",
    "text_config": None,
}
ODD_VALUES: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**53, 2**64, -(2**70), 1.5, 1e308, "", "x" * 3000, "../../etc",
    "\x1b[31m", "\ud800", "\u202e", [], {}, [[]] * 50, {"a": {"a": {}}}, [0, 0], [2**63, 2],
    "F8_E4M3", "U8", "__metadata__", "model.layers.999999.mlp.experts.999999.up_proj.weight",
]  # fmt: skip
ODD_BYTES = [
    b"\x00" * 8, b"\xff" * 8, b"[" * 5000, b'{"a":' * 3000, b"9" * 6000, b"1e999", b"NaN",
    b"\\ud800", b"\xed\xa0\x80", b"\xef\xbb\xbf", b",", b"}", b'"', b" " * 4096, b"Infinity",
]  # fmt: skip


def make_parts() -> dict[str, Any]:
    """Return a valid checkpoint: config, index, and the header and data of two shards."""
    names = ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"]
    for layer in range(3):
        prefix = f"model.layers.{layer}"
        names += [f"{prefix}.self_attn.{part}_proj.weight" for part in "qkvo"]
        names += [
            f"{prefix}.mlp.experts.{e}.{p}_proj.weight" for e in range(4) for p in ("up", "down")
        ]
    parts: dict[str, Any] = {"config.json": CONFIG, INDEX: {"metadata": {}, "weight_map": {}}}
    for at, shard in enumerate(SHARDS):
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for number, name in enumerate(names[at::2]):
            offsets = [64 * number, 64 * number + 64]
            header[name] = {"dtype": "BF16", "shape": [4, 8], "data_offsets": offsets}
            parts[INDEX]["weight_map"][name] = shard
        parts[shard] = header
    return parts


def change_value(value: Any, rng: random.Random) -> Any:
    """Change one thing somewhere inside a JSON value; shares what it leaves alone."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        changed = dict(value)
        key = rng.choice(list(changed))
        choice = rng.random()
        if choice < 0.1:
            del changed[key]
        elif choice < 0.2:
            changed[str(rng.choice(ODD_VALUES))] = changed[key]
        elif choice < 0.3:
            changed[change_name(key, rng)] = changed.pop(key)
        else:
            changed[key] = change_value(changed[key], rng)
        return changed
    if isinstance(value, list) and value and rng.random() < 0.8:
        copy = list(value)
        at = rng.randrange(len(copy))
        copy[at : at + rng.randrange(2)] = [change_value(copy[at], rng)]
        return copy
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.6:
        return value + rng.choice([-64, -8, -1, 1, 2, 8, 64, 2**40])
    return rng.choice(ODD_VALUES)


def change_name(name: str, rng: random.Random) -> str:
    """Return another name of the same kind."""
    parts = name.split(".")
    at = rng.randrange(len(parts))
    parts[at] = rng.choice(["0", "1", "3", "01", "-1", "9999999", "experts", "", "mtp", "..", "\0"])
    return ".".join(parts)


def change_bytes(data: bytes, rng: random.Random) -> bytes:
    """Flip, cut, double or insert."""
    at = rng.randrange(len(data) + 1)
    choice = rng.randrange(5)
    if choice == 0:
        return data[:at]
    if choice == 1:
        return data[:at] + rng.choice(ODD_BYTES) + data[at:]
    if choice == 2:
        return data[:at] + data[at + rng.randrange(1, 50) :]
    if choice == 3:
        end = at + rng.randrange(1, 200)
        return data[:end] + data[at:end] + data[end:]
    return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]


def encode(name: str, value: Any, num_tensors: int) -> bytes:
    """Return a file's content; a shard has data for ``num_tensors``, whatever its header says."""
    data = json.dumps(value).encode("utf-8", "surrogatepass")
    if name not in SHARDS:
        return data
    return len(data).to_bytes(8, "little") + data + bytes(64 * num_tensors)


def damage(name: str, value: dict[str, Any], by: str, rng: random.Random) -> bytes:
    """Return the content of a file of which something is wrong."""
    num_tensors = len(value) - 1
    if by == "bytes":
        return change_bytes(encode(name, value, num_tensors), rng)
    for _ in range(rng.choice([1, 1, 2, 4])):
        value = change_value(value, rng)
    return encode(name, value, num_tensors)


def judge(folder: Path) -> str:
    """Open the checkpoint; return ``read`` or ``refused``; raises for what must not happen."""
    try:
        model = open_model(str(folder))
    except CheckpointError as error:
        text = str(error)
        if not (text.isprintable() and len(text) < 1500):
            raise AssertionError(f"not one short printable line: {text!r}") from error
        return "refused"
    assert sum(layer.nbytes for layer in model.layers) <= model.total_bytes
    assert all(layer.kv_cache.nbytes(1, 4096) >= 0 for layer in model.layers)
    for shard in SHARDS:
        data = (folder / shard).read_bytes()
        # Half a character in a key that nobody reads is no JSON to safetensors, and is to Python.
        if b"\\ud" not in data:
            safetensors.deserialize(data)
    return "read"


def fuzz(folder: Path, seconds: float, seed: int) -> dict[str, Any]:
    """Try inputs until the time is over; returns counts."""
    rng = random.Random(seed)
    whole = {name: encode(name, value, len(value) - 1) for name, value in make_parts().items()}
    parts = make_parts()
    counts: collections.Counter[str] = collections.Counter()
    slowest_s, ends_at = 0.0, time.monotonic() + seconds
    for name, content in whole.items():
        (folder / name).write_bytes(content)
    assert judge(folder) == "read"
    while time.monotonic() < ends_at:
        name, by = rng.choice([*parts, *SHARDS]), rng.choice(["meaning", "bytes"])
        (folder / name).write_bytes(damage(name, parts[name], by, rng))
        before = time.monotonic()
        verdict = judge(folder)
        took_s = time.monotonic() - before
        assert took_s < SLOW_S, f"{took_s} s for {name} by {by}"
        slowest_s = max(slowest_s, took_s)
        kind = "shard" if name in SHARDS else name
        counts[f"{kind}, by {by}: {verdict}"] += 1
        (folder / name).write_bytes(whole[name])
    return {
        "num_inputs": counts.total(),
        "slowest_s": slowest_s,
        "outcomes": dict(sorted(counts.items())),
    }


def bombs() -> dict[str, Callable[[], bytes]]:
    """Headers as long as the format allows, of what costs a reader most."""
    limit = 100_000_000 - 100
    entry = b'"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},'

    def fill(piece: bytes) -> Callable[[], bytes]:
        return lambda: b'{"a":[' + piece * (limit // len(piece)) + b"0]}"

    return {
        "lists": fill(b"[],"),
        "objects": fill(b"{},"),
        "numbers": fill(b"1e5,"),
        "tensors": lambda: b"{" + b"".join(entry % n for n in range(1_700_000)) + b'"a":0}',
        "tensors within the limit": lambda: (
            b"{" + b"".join(entry % n for n in range(280_000)) + b'"a":0}'
        ),
        "nesting": lambda: b'{"a":' + b"[" * limit,
        "one string": lambda: b'{"a":"' + b"x" * limit + b'"}',
        "escapes": lambda: b'{"a":"' + b"\\u0041" * (limit // 6) + b'"}',
        "one number": lambda: b'{"a":' + b"9" * limit + b"}",
        "spaces": lambda: b"{" + b" " * limit + b"}",
        "shape": lambda: (
            b'{"a":{"dtype":"U8","data_offsets":[0,0],"shape":[' + b"9," * 4_000_000 + b"9]}}"
        ),
    }


def drop_bombs(folder: Path) -> dict[str, float]:
    """Open each bomb; return the seconds it took."""
    took_s = {}
    for name, make in bombs().items():
        (folder / "config.json").write_text(json.dumps(CONFIG))
        header = make()
        (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        del header
        before = time.monotonic()
        with contextlib.suppress(CheckpointError):
            open_model(str(folder))
        took_s[name] = round(time.monotonic() - before, 3)
        assert took_s[name] < SLOW_S, f"{took_s[name]} s for a bomb of {name}"
    return took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memory", type=parse_bytes, default=parse_bytes("2GiB"))
    arguments = parser.parse_args()
    # Asking for more than this is a MemoryError here, and so a failure.
    resource.setrlimit(resource.RLIMIT_AS, (arguments.memory, arguments.memory))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        try:
            result = fuzz(folder, arguments.seconds, arguments.seed)
            for path in folder.iterdir():
                path.unlink()
            result["bombs_s"] = drop_bombs(folder)
        except BaseException:
            shutil.copytree(folder, "fuzz-failure", dirs_exist_ok=True)
            raise
    result["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    result |= {"seed": arguments.seed, "python": sys.version.split()[0], "cpu": platform.machine()}
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

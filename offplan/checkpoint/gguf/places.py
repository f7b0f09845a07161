"""The places of GGUF files: a path, a folder, or a name in Ollama, in LM Studio or on the Hub."""

import os
import re
import shlex
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from offplan.checkpoint.folder import is_file, read_small
from offplan.checkpoint.jsontext import load_object, quote
from offplan.errors import CheckpointError
from offplan.files import load_facts

SUFFIX = ".gguf"
_ANY = "*.[gG][gG][uU][fF]"
_MAGIC = b"GGUF"
SHARD = re.compile(r"-\d{5}-of-(?!0{5})(\d{5})\.gguf\Z", re.IGNORECASE)
"""Matches the end of a shard's name, which counts all shards."""
_BESIDE = ("mmproj", "imatrix")
"""Parts of the names of files beside a model: what reads images and sound, and statistics."""
_OLLAMA_MODELS = ("~/.ollama/models", "/usr/share/ollama/.ollama/models")
"""Source: Ollama's FAQ, "Where are models stored?"."""
_LM_STUDIO_MODELS = ("~/.lmstudio/models", "~/.cache/lm-studio/models")
"""Source: LM Studio's documentation, "Import models"; the second is the older one."""
_REGISTRY = "registry.ollama.ai"
_MODEL_LAYER = "application/vnd.ollama.image.model"
_PART = r"[A-Za-z0-9][\w.-]*"
_OLLAMA_NAME = re.compile(
    rf"(?:ollama (?:run|pull) )?((?:{_PART}/){{0,2}}{_PART})(:{_PART})?", re.A
)
_HUB_IDS = Path(__file__).with_name("ollama.yaml")
_SAME_WEIGHTS = re.compile(r"(-instruct|-it)?(-(cloud|fp16|bf16|mxfp4|q[2-8]\w*))?$", re.ASCII)
"""Matches what stands behind a size in tags of the same model: its form."""
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)
_HOST = r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/"
_HUB_FILE = re.compile(
    rf"{_HOST}({_PART}/{_PART})/(?:blob|resolve|raw)/([^/?#]+)/([^?#]+\.gguf)(?:[?#].*)?",
    re.A | re.I,
)
_HUB_TAG = re.compile(rf"({_HOST})?({_PART}/{_PART}):({_PART})", re.ASCII)
QUANTISATION = r"(?:UD-)?(?:I?Q\d\w*|TQ\d\w*|BF16|F16|F32|MXFP4\w*)"
"""Matches the quantisations that GGUF files and tags have in their names."""


class Found(NamedTuple):
    """The files of one GGUF model, and what runs it."""

    files: tuple[Path, ...]
    """All shards, the first one first."""
    runs_with: tuple[str, ...]
    """Commands, each of which runs it."""


class HubName(NamedTuple):
    """A GGUF model of a repository on the Hub."""

    repo: str
    revision: str | None
    wanted: str | None
    """A quantisation, or the path of a file; None for the usual one."""


class OllamaName(NamedTuple):
    """A name as ``ollama run`` takes it."""

    parts: tuple[str, ...]
    """Host, namespace and model, as many as were named."""
    tag: str | None
    is_command: bool

    def __str__(self) -> str:
        return "/".join(self.parts) + (f":{self.tag}" if self.tag else "")


def is_gguf(path: Path) -> bool:
    """Return True if a file is GGUF, by its first bytes or its name."""
    if not is_file(path):
        return False
    if path.suffix.lower() == SUFFIX:
        return True
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def list_shards(name: str) -> list[str]:
    """Name all shards of the model that a file is of, the first one first."""
    if (shard := SHARD.search(name)) is None:
        return [name]
    start, end = name[: shard.start()], name[-len(SUFFIX) :]
    return [f"{start}-{number:05}-of-{shard[1]}{end}" for number in range(1, int(shard[1]) + 1)]


def find_file(path: Path) -> Found:
    """Find all shards of a GGUF file; raises CheckpointError where some are missing."""
    files = tuple(path.with_name(name) for name in list_shards(path.name))
    missing = [file.name for file in files if not is_file(file)]
    if missing:
        raise CheckpointError(
            f"{path}: {len(missing)} of {len(files)} shards are missing, the first is "
            f"{quote(missing[0])}; finish the download"
        )
    return Found(files, (f"llama-cli -m {shlex.quote(str(files[0]))}",))


def find_in_folder(folder: Path) -> Found | None:
    """Find the one GGUF model of a folder; None where it has none, or has safetensors.

    Raises CheckpointError where there are several.
    """
    if any(folder.glob("*.safetensors")):
        return None
    found = (sorted(folder.glob(within + _ANY)) for within in ("", "*/"))
    files = next((each for each in found if each), [])
    names = leave_beside([str(file.relative_to(folder)) for file in files])
    models = {SHARD.sub("", name): name for name in reversed(names)}
    if len(models) > 1:
        few = ", ".join(map(quote, sorted(models.values())[:4]))
        raise CheckpointError(
            f"{folder}: found {len(models)} GGUF models ({few}{', ...' * (len(models) > 4)}), "
            "expected one; name the file"
        )
    return next((find_file(folder / name) for name in models.values()), None)


def leave_beside(names: list[str]) -> list[str]:
    """Leave out files that lie beside a model, unless there are no others."""
    return [n for n in names if not any(part in n.lower() for part in _BESIDE)] or names


def parse_ollama(name: str) -> OllamaName | None:
    """Read a name as Ollama does; None for what cannot be one."""
    if (found := _OLLAMA_NAME.fullmatch(name)) is None:
        return None
    tag = found[2] and found[2][1:]
    return OllamaName(tuple(found[1].split("/")), tag, name.startswith("ollama "))


def parse_hub(name: str) -> HubName | None:
    """Read the address of a GGUF file on the Hub, or a repository and a quantisation."""
    if (page := _HUB_FILE.fullmatch(name)) is not None:
        return HubName(page[1], page[2], unquote(page[3]))
    tagged = _HUB_TAG.fullmatch(name.removeprefix("ollama run "))
    if tagged is None or not (tagged[1] or re.fullmatch(QUANTISATION, tagged[3], re.IGNORECASE)):
        return None
    return HubName(tagged[2], None, None if tagged[3].lower() == "latest" else tagged[3])


def find_local(path: Path) -> Found | None:
    """Find the GGUF model that a path is or has; None for anything else."""
    if path.is_dir():
        return find_in_folder(path)
    return find_file(path) if is_gguf(path) else None


def find_named(name: OllamaName) -> Found | None:
    """Find a model by its name in the stores of LM Studio and Ollama; None where they lack it.

    Raises CheckpointError for a store that cannot be read.
    """
    if len(name.parts) > 1 and name.tag is None and not name.is_command:
        for store in map(Path, map(os.path.expanduser, _LM_STUDIO_MODELS)):
            path = store.joinpath(*name.parts)
            found = find_local(path) if os.path.exists(path) else None
            if found is not None:
                load = f"lms load {'/'.join(name.parts)}"
                return found._replace(runs_with=(load, *found.runs_with))
    for store in _ollama_stores():
        if (file := _find_in_ollama(store, name)) is not None:
            return Found((file,), (f"ollama run {name}",))
    return None


def find_hub_id(name: OllamaName) -> str | None:
    """Find the Hub's repository of a model in Ollama's library; None if it is not plain."""
    *owner, model = name.parts
    sizes = load_facts(_HUB_IDS).get(model.lower(), {}) if owner in ([], ["library"]) else {}
    tag = (name.tag or "latest").lower()
    size = next(iter(sizes), None) if tag == "latest" else _SAME_WEIGHTS.sub("", tag)
    return sizes.get(size)


def why_not_named(name: OllamaName) -> str:
    """Say that Ollama has no model of a name that is one of Ollama's."""
    stores = " or ".join(map(str, _ollama_stores()))
    meant = "the Hub id that the model's maker gave it, such as Qwen/Qwen3-8B of qwen3:8b"
    if (hub_id := find_hub_id(name)) is not None:
        meant = f"{hub_id}, the same model on the Hub"
    return (
        f"{name}: found a name of Ollama's, expected a model in safetensors: name {meant}. Found "
        f"no Ollama model of this name that can be read in {stores}; `ollama pull {name}` fetches "
        f"it and `ollama run {name}` runs it"
    )


def _ollama_stores() -> list[Path]:
    named = os.environ.get("OLLAMA_MODELS")
    return [Path(os.path.expanduser(store)) for store in ([named] if named else _OLLAMA_MODELS)]


def _find_in_ollama(store: Path, name: OllamaName) -> Path | None:
    """Find the file of weights that a manifest of Ollama's names."""
    *namespace, model = name.parts
    host_and_owner = (_REGISTRY, "library")[: 2 - len(namespace)] + tuple(namespace)
    manifest = store.joinpath("manifests", *host_and_owner, model, name.tag or "latest")
    # False also where the store lets nobody else in: most names are of the Hub
    if not os.path.isfile(manifest):
        return None
    layers = load_object(read_small(manifest), str(manifest)).get("layers")
    for layer in layers if isinstance(layers, list) else []:
        if not isinstance(layer, dict) or layer.get("mediaType") != _MODEL_LAYER:
            continue
        digest = layer.get("digest")
        if isinstance(digest, str) and _DIGEST.fullmatch(digest):
            blob = store / "blobs" / digest.replace(":", "-")
            if os.path.isfile(blob):
                return blob
            raise CheckpointError(
                f"{name}: its manifest names {digest[:19]}..., which {store} lacks; "
                f"`ollama pull {name}` fetches it"
            )
    raise CheckpointError(
        f"{manifest}: found no GGUF file in this manifest, expected one; `ollama run {name}` runs "
        "what it names, and offplan a safetensors checkpoint of that model"
    )

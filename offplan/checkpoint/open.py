"""The way in: a model from a folder, a ``config.json`` or the Hub."""

import os
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from offplan.checkpoint.assemble import assemble
from offplan.checkpoint.folder import read_folder
from offplan.checkpoint.gguf.places import (
    SUFFIX,
    Found,
    find_hub_id,
    find_local,
    find_named,
    parse_hub,
    parse_ollama,
    why_not_named,
)
from offplan.checkpoint.jsontext import quote
from offplan.checkpoint.model import Model
from offplan.checkpoint.own_code import fingerprint_code, names_code
from offplan.checkpoint.tensors import CONFIG_NAME, INDEX_NAME, SINGLE_NAME
from offplan.errors import CheckpointError, HubError, OffplanError
from offplan.files import StrPath
from offplan.kinds import describe_kind
from offplan.progress import Progress, silent

_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]{0,95}/)?[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
"""A Hub id has an organisation or, as the oldest models, none: ``gpt2``."""
_PAGE = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?!datasets/|spaces/|models/)"
    r"([\w.-]+/[\w.-]+)(?:/(?:tree|blob|resolve|raw)/([^/?#]+).*|[/?#].*)?",
    re.ASCII,
)
"""The address of a model's page on the Hub: its id and, of a branch or a file, its revision."""
_FILE = re.compile(r".*\.(json|safetensors|bin|gguf|pth?|ya?ml)", re.IGNORECASE)
"""Names of files, which a bare word of this kind is far more likely to mean than a model."""


def open_model(
    source: StrPath,
    *,
    revision: str | None = None,
    name: str | None = None,
    dtype: str | None = None,
    trust_remote_code: bool = False,
    on_progress: Progress | None = None,
) -> Model:
    """Read what a model is, without reading a weight.

    ``source`` is a folder with ``config.json`` and safetensors, or the path of a ``config.json``
    alone. Else it is a Hub id (``org/name``, or ``gpt2``), or the address of its page. offplan
    takes what exists on disk first. It does not ask the Hub for ``org/name`` if there is a folder
    ``org``, unless a ``revision`` is given. That is a branch, tag or commit, for the Hub only.
    ``name`` is what the model is called from here on, in plans too; it is ``source`` if left out.
    ``dtype`` is the type that the weights of a ``config.json`` alone are stored in, what it states
    if left out. With ``trust_remote_code`` transformers' own passes may run Python code of the
    checkpoint where transformers does not know its model type; none runs here. ``on_progress``
    hears (shards read, shards in all).

    Raises CheckpointError when the source cannot be found, read or understood, and HubError when
    the Hub does not answer.
    """
    source = os.fspath(source)
    page = None if source.lower().endswith(SUFFIX) else _PAGE.fullmatch(source)
    if page is not None and not os.path.exists(source):
        source, revision = page[1], revision or page[2]
    for text in (source, revision, name):
        if text is not None and not text.isprintable():
            raise CheckpointError(
                f"{quote(text)}: found characters that cannot be printed, expected a folder, a Hub "
                "id, a revision or a name without any; rename it"
            )
    model = _read(source, revision, dtype, on_progress or silent(""))
    if not any(layer.nbytes for layer in model.layers):
        raise CheckpointError(
            f"{source}: found layers whose tensors are all empty, expected a model's; fetch the "
            "checkpoint again"
        )
    if dtype is not None and model.dtype != dtype:
        raise CheckpointError(
            f"{source}: found weights of {model.dtype}, expected {dtype}; `dtype` is for a "
            "config.json alone that is not quantised: convert the checkpoint, or leave `dtype` out"
        )
    if trust_remote_code and names_code(model.config):
        model = replace(model, code=fingerprint_code(source, model.revision))
    return replace(model, source=source if name is None else name)


def _read(source: str, revision: str | None, dtype: str | None, on_progress: Progress) -> Model:
    path = Path(source)
    # Not of the path: pathlib takes an empty name for the working directory.
    is_folder, exists = os.path.isdir(source), os.path.exists(source)
    may_be_id = _HUB_ID.fullmatch(source) and not _FILE.fullmatch(source)
    if exists and revision is not None and not may_be_id:
        raise CheckpointError(
            f"{source}: found on disk, where there are no revisions, expected a Hub id with "
            f"`revision={revision}`; leave the revision out"
        )
    is_local = exists and revision is None
    if revision is None and (gguf := _find_gguf(source, path, exists)) is not None:
        from offplan.checkpoint.gguf.read import read_gguf

        return read_gguf(gguf, on_progress, dtype)
    if is_local and is_folder:
        return assemble(source, read_folder(path, on_progress))
    if is_local and path.suffix == ".json":
        # Imported here: it is of use only with torch at hand.
        from offplan.checkpoint.config_only import read_config_only

        return read_config_only(path, on_progress, dtype)
    if not exists and (named := parse_hub(source)) is not None:
        from offplan.checkpoint.gguf.hub import read_named

        return read_named(named, on_progress, dtype)
    is_path = not exists and revision is None and _looks_like_path(source)
    if not is_local and not is_path and may_be_id:
        try:
            return _read_hub(source, revision, on_progress, dtype)
        except HubError as error:
            if not exists:
                raise
            beside = "leave the revision out for what is on disk"
            raise HubError(f"{error} ({beside})", topic=error.topic) from None
    if exists and (kind := describe_kind(source, "a model")) is not None:
        raise CheckpointError(f"{quote(source)}: {kind}")
    found, help_ = "a file" if exists else "nothing on disk and no Hub id", "correct the name"
    if is_path:
        found = f"nothing of this name in {quote(os.path.dirname(os.path.abspath(source)))}"
    if is_path and may_be_id:
        help_ += ", or name a `revision` if the Hub's model is meant"
    if source.endswith("/") and _HUB_ID.fullmatch(source[:-1]):
        help_ += f", or write {source[:-1]} if the Hub's model is meant"
    raise CheckpointError(
        f"{quote(source)}: found {found}, expected a folder with {CONFIG_NAME} and safetensors, a "
        f"{CONFIG_NAME}, or a Hub id such as Qwen/Qwen3-8B; {help_}"
    )


def _read_hub(source: str, revision: str | None, on_progress: Progress, dtype: str | None) -> Model:
    """Read a checkpoint on the Hub, or what a repository without one has in GGUF files."""
    from offplan.checkpoint.failures import NoSuchFile, explain_contents
    from offplan.checkpoint.hub import read_hub

    try:
        return assemble(source, read_hub(source, revision, on_progress))
    except NoSuchFile:
        from offplan.checkpoint.gguf.hub import list_files, read_repository

        repository = None
        with suppress(OffplanError):  # that there is no checkpoint says more
            repository = list_files(source, revision)
        if repository is None:
            raise
        has_weights = {SINGLE_NAME, INDEX_NAME}.intersection(repository.others)
        if has_weights and CONFIG_NAME in repository.others:
            raise
        if not repository.files:
            raise explain_contents(source, repository.others) from None
        return read_repository(repository, None, on_progress, dtype)


def _find_gguf(source: str, path: Path, exists: bool) -> Found | None:
    """Find a GGUF model on disk; None where the source is anything else.

    Raises CheckpointError for a name that Ollama alone can have, and that is not in its store.
    """
    if exists:
        return find_local(path) if source else None
    name = parse_ollama(source)
    if name is None:
        return None
    found = find_named(name)
    is_ollamas = name.is_command or name.tag or find_hub_id(name)
    if found is None and is_ollamas and parse_hub(source) is None:
        raise CheckpointError(why_not_named(name))
    return found


def _looks_like_path(source: str) -> bool:
    """Return True if a name is meant as a path: it has the form of one, or its folder is there."""
    is_formed = source.startswith((".", "/", "~")) or source.endswith("/")
    return is_formed or os.path.isdir(os.path.dirname(source))

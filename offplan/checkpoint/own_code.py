"""A checkpoint's own Python code: its classes, where a caller lets it run, and missing packages."""

import hashlib
import re
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offplan.checkpoint.jsontext import describe, quote
from offplan.errors import CheckpointError

if TYPE_CHECKING:
    from offplan.checkpoint.model import Model


CONFIG_CLASS, MODEL_CLASS = "AutoConfig", "AutoModelForCausalLM"
"""Keys of a config's ``auto_map``; each names a module and a class in it."""


def names_code(config: Mapping[str, Any]) -> bool:
    """Return True if a config names code of the checkpoint's for the model and for its config."""
    named = config.get("auto_map")
    return isinstance(named, Mapping) and all(
        isinstance(named.get(key), str) for key in (CONFIG_CLASS, MODEL_CLASS)
    )


def fingerprint_code(source: str, revision: str | None) -> str:
    """Return a fingerprint of a checkpoint's Python files: the commit, or a hash of the folder's.

    Raises CheckpointError for files that cannot be read.
    """
    if revision is not None:
        return revision
    found = hashlib.sha256()
    try:
        for path in sorted(Path(source).rglob("*.py")):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            found.update(f"{path.relative_to(source)}\t{content}\n".encode())
    except OSError as error:
        raise CheckpointError(
            f"{source}: its code cannot be read ({error.strerror}); check the permissions"
        ) from None
    return found.hexdigest()


def load_own_class(model: "Model", key: str) -> Any:
    """Run a checkpoint's code and return the class that its config has for ``key``.

    The code is that of the model's folder, or of its commit on the Hub, fetched if need be. Raises
    CheckpointError where the caller has not let it run (``model.code`` is None), for code of
    another repository, and for whatever the code raises.
    """
    named: str = model.config["auto_map"][key]
    if model.code is None:
        raise CheckpointError(f"{model.source}: {refuse_code(model.config)}")
    if "--" in named:
        raise CheckpointError(
            f"{model.source}: its config names {quote(named)} for {key}, code of another "
            "repository, expected a module of its own; copy that code into the checkpoint's folder"
        )
    from offplan.checkpoint.answers import checked_session
    from offplan.transformers_private import get_class_from_dynamic_module

    try:
        with checked_session() if model.revision is not None else nullcontext():
            return get_class_from_dynamic_module(
                named,
                model.source,
                revision=model.revision,
                code_revision=model.revision,
                local_files_only=model.revision is None,
            )
    except Exception as error:  # it is anyone's code
        raise CheckpointError(
            f"{model.source}: its own code fails ({describe(error, 300)}); install what it needs, "
            "or ask its authors"
        ) from error


def refuse_code(config: Mapping[str, Any]) -> str:
    """Say what code a checkpoint would have to run, and how to let it."""
    return (
        f"its config names code of its own, {quote(config['auto_map'][MODEL_CLASS])}, "
        "which runs with all your rights: read that code, then let it run with "
        "`trust_remote_code=True`"
    )


_COMMAND = re.compile(r"`pip install ([^`]+)`")
_NEEDED = re.compile(r"requires the (\S+) library")


def name_packages(error: BaseException | None) -> str | None:
    """Say which packages an error, or what it came of, found missing, and how to install them.

    Returns None for an error of another kind. Source: transformers 5.23, ``requires_backends`` and
    ``check_imports``, whose texts have the command.
    """
    while error is not None and not isinstance(error, ImportError):
        error = error.__cause__
    if error is None:
        return None
    commands = " ".join(_COMMAND.findall(str(error))).split()
    named = _NEEDED.findall(str(error)) or filter(None, [error.name])
    found = " ".join(dict.fromkeys(commands or named))
    if not found or not found.isprintable():
        return None
    if commands:
        return f"it needs packages that are not installed: pip install {found}"
    return f"it needs the package {found}, which is not installed: install it"

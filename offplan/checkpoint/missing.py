"""Packages that a model's class asks for and that are not installed."""

import re

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

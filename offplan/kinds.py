"""The kinds of file that a path may hold where another kind was expected."""

import os
import re
import shlex
from pathlib import Path

_SNIFFED_BYTES = 2**16
_KINDS = {
    # first: whatever text a chat template within it has
    "a GGUF file": re.compile(r"\AGGUF"),
    "a plan": re.compile(r"^offplan: *[0-9]+ *$", re.MULTILINE),
    "a machine profile": re.compile(r"^(profile|matmul|hbm):", re.MULTILINE),
    "a model's config.json": re.compile(r'"(model_type|architectures)" *:'),
}
_NAME_A_MACHINE = "name a machine that `offplan machines` lists, or a profile's file"
_REMEDIES = {
    ("a plan", "a model"): "name the model, or print the plan with `offplan show {path}`",
    ("a plan", "a machine"): _NAME_A_MACHINE,
    ("a profile", "a plan"): "make a plan: offplan plan MODEL --machine {path} -o plan.yaml",
    ("a profile", "a model"): "name the profile as `machine`",
    ("a model", "a plan"): "make a plan of it: offplan plan {path} -o plan.yaml",
    ("a model", "a machine"): _NAME_A_MACHINE,
    ("a GGUF file", "a plan"): (
        "offplan runs safetensors, not GGUF: `llama-cli -m {path}` runs this file, and "
        "`offplan analyze {path}` prices a safetensors checkpoint of its shape"
    ),
    ("a GGUF file", "a machine"): _NAME_A_MACHINE,
    ("a folder", "a plan"): "name the plan's file",
    ("a folder", "a machine"): _NAME_A_MACHINE,
}
_SHORT = {
    "a machine profile": "a profile",
    "a model's config.json": "a model",
    "a folder with a model": "a model",
}


def describe_kind(path: str | os.PathLike[str], wanted: str) -> str | None:
    """Describe what lies at ``path`` where ``wanted`` does not: its kind, and what to do.

    ``wanted`` is ``a plan``, ``a model`` or ``a machine``. It is None for a file of no kind that
    offplan reads. The file's first 64 KiB are looked at, and no more.
    """
    kind = find_kind(Path(path)) or ""
    remedy = _REMEDIES.get((_SHORT.get(kind, kind), wanted))
    if remedy is None:
        return None
    return f"found {kind}, expected {wanted}; {remedy.format(path=shlex.quote(str(path)))}"


def find_plans(folder: Path) -> list[Path]:
    """Find the plan files that a folder has itself, by name."""
    named = sorted(path for path in folder.iterdir() if path.suffix in (".yaml", ".yml"))
    return [path for path in named if find_kind(path) == "a plan"]


def find_kind(path: Path) -> str | None:
    """Return the kind of what lies at a path: ``a plan``; None for no kind that offplan reads."""
    try:
        if path.is_dir():
            return "a folder with a model" if (path / "config.json").exists() else "a folder"
        if not path.is_file():
            return None
        with path.open("rb") as file:
            text = file.read(_SNIFFED_BYTES).decode("utf-8", "replace")
    except OSError:
        return None
    return next((kind for kind, sign in _KINDS.items() if sign.search(text)), None)

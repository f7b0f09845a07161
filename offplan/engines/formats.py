"""An export as text: a command, a config file, variables, or a container's command."""

import json
import shlex
from pathlib import Path

import yaml

from offplan.choices import ExportFormat
from offplan.engines.engine import format_version, join_flags
from offplan.engines.export import Export

CACHE = "/root/.cache/huggingface"
"""Folder in which the engines' images keep what they load from the Hub."""


_WORKERS_PLAN = "additional-config"
"""The option that names the plan to a worker."""


def render_export(export: Export, form: ExportFormat) -> str:
    """Write an export in one of the forms; each ends with a line break."""
    return {"command": _command, "yaml": _yaml, "env": _env, "docker": _docker}[form](export)


def _command(export: Export) -> str:
    """Write what a shell runs, an option a line."""
    environment = export.demand.environment
    variables = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    start = [*variables, *map(shlex.quote, (*export.engine.command, export.source))]
    return _lines(" ".join(start), export)


def _docker(export: Export) -> str:
    """Write what a shell runs to start the engine in a container of its own image."""
    engine, source = export.engine, Path(export.source)
    if engine.is_worker and _WORKERS_PLAN in export.options:
        return _dockerfile(export)
    mount = f'"$HOME/.cache/huggingface:{CACHE}"'
    served = export.source
    if source.exists():
        served = "/model"
        mount = shlex.quote(f"{source.resolve()}:{served}:ro")
    first, *rest = engine.command
    variables = [
        f"-e {name}={shlex.quote(value)}" for name, value in export.demand.environment.items()
    ]
    # page-locked memory counts as locked, and workers share memory
    lines = [
        "docker run --gpus all --ipc=host --ulimit memlock=-1",
        f"-p {engine.port}:{engine.port} -v {mount}",
        *variables,
        f"--entrypoint {first} {engine.image}:v{format_version(export.version)}",
        shlex.join([*rest, served]),
    ]
    hosted = join_flags({"host": ("0.0.0.0",), "port": (str(engine.port),)})
    return _lines(" \\\n  ".join(lines), export, shlex.join(hosted))


def _dockerfile(export: Export) -> str:
    """Write what builds an image with a worker and its plan: the engine's own has no offplan.

    The packages of the engine's image keep their versions, and offplan comes from a clone of it.
    """
    ((given,),) = [export.options[_WORKERS_PLAN]]
    plan = Path(json.loads(given)["offplan"])
    source = Path(export.source)
    # a build's context is a folder, and so is what is mounted
    served, mount = export.source, f'"$HOME/.cache/huggingface:{CACHE}"'
    if source.exists():
        served, mount = "/model", shlex.quote(f"{source.resolve()}:/model:ro")
    inside = f"/offplan/{plan.name}"
    options = {**export.options, _WORKERS_PLAN: (json.dumps({"offplan": inside}),)}
    port = str(export.engine.port)
    hosted = {"host": ("0.0.0.0",), "port": (port,)}
    command = [*export.engine.command, served, *join_flags(options), *join_flags(hosted)]
    variables = [
        f"ENV {name}={json.dumps(value)}" for name, value in export.demand.environment.items()
    ]
    lines = [
        "# docker build --build-context offplan=CLONE_OF_OFFPLAN -t offplan-worker \\",
        f"#   -f DOCKERFILE {shlex.quote(str(plan.parent))}",
        "# docker run --gpus all --ipc=host --ulimit memlock=-1 \\",
        f"#   -p {port}:{port} -v {mount} offplan-worker",
        f"FROM {export.engine.image}:v{format_version(export.version)}",
        "RUN --mount=type=bind,from=offplan,target=/tmp/offplan,rw \\",
        "    pip list --format=freeze > /tmp/held.txt && \\",
        "    pip install --no-cache-dir -c /tmp/held.txt /tmp/offplan && rm /tmp/held.txt",
        f"COPY {json.dumps([plan.name, inside])}",
        *variables,
        f"ENTRYPOINT {json.dumps(command)}",
    ]
    return "\n".join(lines) + "\n"


def _lines(start: str, export: Export, *last: str) -> str:
    options = [shlex.join(join_flags({name: each})) for name, each in export.options.items()]
    return " \\\n  ".join((start, *options, *last)) + "\n"


def _yaml(export: Export) -> str:
    """Write a file for the engine's ``--config``."""
    variables = [f"# needs {name}={value}\n" for name, value in export.demand.environment.items()]
    model = "model" if export.engine.family == "vllm" else "model-path"
    entries: dict[str, object] = {model: export.source}
    for name, values in export.options.items():
        # what is JSON stays a word
        each = [value if value[:1] == "{" else yaml.safe_load(value) for value in values]
        entries[name] = True if not each else each[0] if len(each) == 1 else each
    # vLLM reads a list where an option takes several values, also of one
    for name in ("offload-params", "cpu-offload-params"):
        if name in entries:
            entries[name] = list(export.options[name])
    title = f"# {export.engine.title} {format_version(export.version)}\n"
    return title + "".join(variables) + yaml.safe_dump(entries, sort_keys=False)


def _env(export: Export) -> str:
    """Write variables, one a line: those the engine reads, the model, and its options as one."""
    variables = {
        **export.demand.environment,
        "MODEL": export.source,
        f"{export.engine.family.upper()}_ARGS": shlex.join(join_flags(export.options)),
    }
    return "".join(f"{name}={value}\n" for name, value in variables.items())

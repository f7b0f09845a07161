"""A plan's text with another plan's values, what people wrote kept, and the file's revisions."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from offplan.errors import InputError, PlanError
from offplan.plan import MOST_FILE_BYTES, Plan, dump_plan, flow, leave_out_usual, parse_plan
from offplan.records import load_yaml


class _Edit(NamedTuple):
    """Characters ``start`` to ``stop`` of a text, and what is to stand there."""

    start: int
    stop: int
    text: str


def rewrite_plan(text: str, plan: Plan) -> str | None:
    """Put a plan's values into the text of another plan's file.

    Only values that differ are written anew: comments, blank lines, the order of keys and the way
    other values are written stay. A list that gets longer or shorter loses what stands inside it,
    such as a comment between two rules. Returns None if the text is laid out in a way that does not
    let its values be exchanged.
    """
    before = parse_plan(load_yaml(text), "plan", to_replan=True)
    root = yaml.compose(text, yaml.SafeLoader)
    assert root is not None, "a plan was read from it"
    edits = _edits(root, text, before.dump_with_units(), plan.dump_with_units())
    try:
        for edit in sorted(edits, key=lambda each: each.start, reverse=True):
            text = text[: edit.start] + edit.text + text[edit.stop :]
        written = parse_plan(load_yaml(text), "plan")
    except (ValueError, PlanError):  # an unusual layout, of which the edits made another text
        return None
    return text if dump_plan(written) == dump_plan(plan) else None


def _edits(node: yaml.Node, text: str, before: Any, after: Any) -> Iterator[_Edit]:
    """Yield what to write where a node's value changes from ``before`` to ``after``."""
    if before == after:
        return
    if isinstance(node, yaml.MappingNode) and isinstance(after, dict):
        values = {key.value: value for key, value in node.value}
        keys = {**before, **after}  # some are left out where they are usual
        changed = {key: after.get(key) for key in keys if before.get(key) != after.get(key)}
        added = {key: value for key, value in changed.items() if key not in values}
        if not node.flow_style or not (added or None in changed.values()):
            yield from _added(node, text, added)
            for key in changed.keys() - added.keys():
                yield from _edits(values[key], text, before.get(key), changed[key])
            return
    are_lists = isinstance(before, list) and isinstance(after, list)
    if isinstance(node, yaml.SequenceNode) and are_lists and len(before) == len(after):
        for item, *pair in zip(node.value, before, after, strict=True):
            yield from _edits(item, text, *pair)
        return
    start, stop = node.start_mark.index, _end(node)
    # an empty value begins right behind its colon
    yield _Edit(start, stop, " " * (start == stop) + _write(node, after))


def _added(node: yaml.Node, text: str, added: dict[str, Any]) -> Iterator[_Edit]:
    """Yield new lines of a block mapping, behind its last one."""
    if added:
        at = text.find("\n", _end(node))
        at = len(text) if at < 0 else at
        indent = " " * node.start_mark.column
        yield _Edit(at, at, "".join(f"\n{indent}{k}: {flow(_tidy(v))}" for k, v in added.items()))


def _write(node: yaml.Node, value: Any) -> str:
    """Write a value in place of a node: a list in lines where the node is one."""
    is_block = isinstance(node, yaml.SequenceNode) and not node.flow_style
    if is_block and value and isinstance(value, list):
        return f"\n{' ' * node.start_mark.column}".join(f"- {flow(_tidy(each))}" for each in value)
    return flow(_tidy(value))


def _tidy(value: Any) -> Any:
    """Leave out what is null or usual, as plans do."""
    if isinstance(value, list):
        return list(map(_tidy, value))
    return leave_out_usual(value) if isinstance(value, dict) else value


def _end(node: yaml.Node) -> int:
    """Return where a node ends, without the comments and blank lines behind a block."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.index)


def load_revision(revision: str, path: Path) -> Plan:
    """Read a plan file as it was in a git revision: ``HEAD``, ``main``, or another file's there.

    ``revision`` may name the file as git does, ``main:plans/old.yaml``; else it is ``path``. Paths
    that the plan names are not looked for. Raises InputError if git has no such file, PlanError
    if that is no valid plan.
    """
    named = revision if ":" in revision else f"{revision}:./{path.name}"
    if named.startswith("-"):
        raise InputError(f"{revision} is neither a file nor a git revision")
    folder = Path() if ":" in revision else path.parent
    command = ["git", "cat-file", "blob", named]
    try:
        done = subprocess.run(command, capture_output=True, cwd=folder, check=True)
        if len(done.stdout) > MOST_FILE_BYTES:
            raise PlanError(f"{named} is no plan: it is too long")
        return parse_plan(load_yaml(done.stdout.decode("utf-8")), named)
    except subprocess.CalledProcessError as error:
        why = " ".join(error.stderr.decode("utf-8", "replace").split())
        raise InputError(f"{revision} is neither a file nor a git revision: {why}") from None
    except OSError as error:
        raise InputError(f"{revision} is no file, and git cannot be asked: {error}") from None
    except ValueError as error:
        raise PlanError(f"{named} is no plan: {error}") from None

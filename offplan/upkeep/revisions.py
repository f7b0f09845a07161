"""Plans as git has them."""

import subprocess
from pathlib import Path

from offplan.errors import InputError, PlanError
from offplan.plan import MOST_FILE_BYTES, Plan, parse_plan
from offplan.records import load_yaml


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

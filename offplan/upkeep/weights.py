"""The bytes of a plan's weights, held against digests that were taken of them before."""

import re
from collections.abc import Mapping
from pathlib import Path

from offplan.checkpoint.model import Model
from offplan.checkpoint.weights import find_hub_digest, locate_shards, read_digest, shard_bytes
from offplan.errors import InputError, OffplanError
from offplan.files import write_whole
from offplan.progress import Progress
from offplan.records import read_text
from offplan.upkeep.figures import Finding

_LINE = re.compile(r"([0-9a-f]{64})  (.+)")
_MAX_LIST_BYTES = 2**24
"""Beyond any list of digests."""


def check_weights(
    model: Model, listed: Path | None, on_progress: Progress, *, record: bool = False
) -> Finding:
    """Read all weights of a model once, and compare their digests with those known.

    ``listed`` is the list of digests beside the plan, which comes before those of the Hub. With
    ``record`` it is written where no known digest contradicts it. ``on_progress`` hears (bytes
    read, bytes in all).

    Raises CheckpointError for a file that cannot be read, and InputError for a list that is not
    valid. With ``record``, raises InputError if a list with other digests is there, and
    OffplanError if the list cannot be written.
    """
    shards, wanted = locate_shards(model), shard_bytes(model)
    absent = [name for name in wanted if name not in shards]
    if absent or not wanted:
        what = f"{len(absent)} of {len(wanted)} shards are" if wanted else "the weights are"
        return Finding("weights", "unknown", f"{what} not on this disk: not read")
    given = {name: find_hub_digest(path, name) for name, path in shards.items()}
    expected = {name: digest for name, digest in given.items() if digest is not None}
    whose = "(the Hub's)"
    if listed is not None and listed.exists():
        expected, whose = _read_list(listed), f"(in {listed.name})"
    found = _read_all(shards, on_progress)
    wrong = [
        f"{shards[name]} has SHA-256 {digest[:12]}, expected {expected[name][:12]} {whose}"
        for name, digest in found.items()
        if expected.get(name, digest) != digest
    ]
    if wrong:
        return Finding("weights", "drift", f"{'; '.join(wrong)}: fetch the file again")
    if record and listed is not None:
        _record(listed, found)
        return Finding("weights", "holds", f"wrote the digests of {len(found)} files to {listed}")
    unknown = [name for name in found if name not in expected]
    if unknown:
        text = (
            f"no digest is known of {unknown[0]}"
            + (f" and {len(unknown) - 1} more" if unknown[1:] else "")
            + ": `record_weights` writes those of today beside the plan"
        )
        return Finding("weights", "unknown", text)
    return Finding("weights", "holds", f"{len(found)} files have the SHA-256 expected {whose}")


def _read_all(shards: Mapping[str, Path], on_progress: Progress) -> dict[str, str]:
    total = sum(path.stat().st_size for path in shards.values())
    done = 0

    def count(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        on_progress(min(done, total), total)

    return {name: read_digest(path, count) for name, path in shards.items()}


def _read_list(path: Path) -> dict[str, str]:
    """Read a list of digests by file name, as ``sha256sum`` writes it; raises InputError."""
    found = {}
    for line in read_text(path, "list of digests", _MAX_LIST_BYTES, InputError).splitlines():
        parts = _LINE.fullmatch(line)
        if parts is None:
            raise InputError(
                f"{path}: found {line[:80]!r}, expected a SHA-256, two spaces and the name of a "
                "file in each line, as offplan check --record-weights writes it: remove it to "
                "write it again"
            )
        found[parts[2]] = parts[1]
    return found


def _record(path: Path, found: Mapping[str, str]) -> None:
    if path.exists() and _read_list(path) != found:
        raise InputError(f"{path} is there with other files' digests: remove it to write it again")
    text = "".join(f"{digest}  {name}\n" for name, digest in sorted(found.items()))
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise OffplanError(
            f"{path} cannot be written ({error.strerror}): make room there, or check a copy of "
            "the plan in another folder"
        ) from error

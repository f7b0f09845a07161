"""Segments: dotted runs of a parameter's name, how they match names and cover them."""

import difflib
from collections.abc import Collection, Iterator
from itertools import combinations

_MOST_COMPARED = 100
"""Characters of a segment that are compared with names."""


def match_segments(segments: Collection[str], name: str) -> bool:
    """Return True if a segment is a dotted run of ``name``; no segments match everything.

    Source: vLLM matches ``"." + segment + "."`` in ``"." + name + "."``.
    """
    return not segments or any(f".{segment}." in f".{name}." for segment in segments)


def describe_unmatched(segments: Collection[str], names: Collection[str]) -> str | None:
    """Describe the first segment that is no dotted run of a name, and the nearest that is one.

    Returns None if each segment matches a name.
    """
    for segment in segments:
        if not any(match_segments([segment], name) for name in names):
            runs = sorted({run for name in names for run in list_runs(name)})
            near = difflib.get_close_matches(segment[:_MOST_COMPARED], runs, 1)
            parts = sorted({name.rpartition(".")[0] or name for name in names})
            hint = f"is {near[0]} meant?" if near else f"the segments are {', '.join(parts)}"
            return f"matches nothing with {segment!r}: no parameter has this segment; {hint}"
    return None


def list_runs(name: str) -> Iterator[str]:
    """List the dotted runs of a name's parts."""
    parts = name.split(".")
    for start, stop in combinations(range(len(parts) + 1), 2):
        yield ".".join(parts[start:stop])


def cover_names(
    wanted: Collection[str], unwanted: Collection[str], runs: Collection[str]
) -> list[str] | None:
    """Choose few and short ``runs`` that match all of ``wanted`` and none of ``unwanted``.

    Greedy: the run that covers most, of the fewest parts, so the same names always give the same
    segments. Returns None if the names cannot be told apart.
    """
    covers = {
        run: {name for name in wanted if match_segments([run], name)}
        for run in runs
        if not any(match_segments([run], name) for name in unwanted)
    }
    chosen, missing = [], set(wanted)

    def order_key(run: str) -> tuple[int, int, int, str]:
        return -len(covers[run] & missing), run.count("."), len(run), run

    while missing:
        best = min(covers, key=order_key, default="")
        if not covers.get(best, set()) & missing:
            return None
        chosen.append(best)
        missing -= covers[best]
    return sorted(chosen)

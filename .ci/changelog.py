"""Prints the changelog's section of a version, for the notes of its release.

    python .ci/changelog.py v0.1.0

Exits with 1 where the version is not offplan's, or the changelog has no section of it.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def find_section(changelog: str, version: str) -> str | None:
    """Return what stands under ``## VERSION``, None where there is no such heading."""
    sections = re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]
    for section in sections:
        heading, _, text = section.partition("\n")
        if heading.split()[:1] == [version]:
            return text.strip()
    return None


def main(tag: str) -> str:
    """Return the notes of the release ``tag``; raises SystemExit where there is none to make."""
    version = tag.removeprefix("v")
    source = (ROOT / "offplan" / "__init__.py").read_text("utf-8")
    if f'__version__ = "{version}"' not in source:
        raise SystemExit(f"{tag}: offplan/__init__.py has another __version__; set it, or the tag")
    section = find_section((ROOT / "CHANGELOG.md").read_text("utf-8"), version)
    if not section:
        raise SystemExit(f"{tag}: CHANGELOG.md has no text under '## {version}'; write it first")
    return section


if __name__ == "__main__":
    print(main(sys.argv[1]))

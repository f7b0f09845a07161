"""README and docs stay readable: lengths of sentences, of pages and of all pages together.

What is counted is prose: code blocks, tables, headings, pictures and the generated pages are left
out of sentences, and only the generated pages are left out of the sums. Print the figures with

    python -m tests.test_words
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli import ROOT

GENERATED = {"cli-reference.md", "families.md", "fields.md", "published-speeds.md", "records.md"}
README = ROOT / "README.md"
DOCS = [page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in GENERATED]
PAGES = [README, *DOCS]

MOST_IN_A_SENTENCE = 35
MOST_IN_THE_MEAN = 18
MOST_IN_THE_README = 1_100
MOST_IN_THE_DOCS = 18_700

FENCE = re.compile(r"^\s*```.*?^\s*```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?<=\n\n)(?: {4}.*\n)+", re.MULTILINE)
PICTURE = re.compile(r"!\[[^\]]*\]\([^)]*\)")
LINK = re.compile(r"\[([^\]]*)\]\([^)\s]*\)")
CODE = re.compile(r"`[^`]+`")
ITEM = re.compile(r"^\s*(?:[-*]|\d+\.) ")
END = re.compile(r"[.!?][)\"*]*\s+(?=[\"(*]*[A-Z0-9`]|offplan\b|transformers\b|vLLM\b)")
"""A sentence ends where the next word begins one: these names are written small."""


def count_words(text: str) -> int:
    """Count what has a letter or a digit; of code, each part between blanks."""
    return sum(any(c.isalnum() for c in word) for word in text.split())


def list_sentences(page: str) -> Iterator[str]:
    """List the sentences of a page's paragraphs and list items, code within them as it is."""
    text = FENCE.sub("\n\n", page)
    text = PICTURE.sub("\n\n", INDENTED.sub("\n", text))
    block: list[str] = []
    for line in [*text.splitlines(), ""]:
        bare = line.strip()
        ends = not bare or bare.startswith(("#", "|")) or ITEM.match(line)
        if ends and block:
            yield from split(" ".join(block))
            block = []
        if bare and not bare.startswith(("#", "|")):
            block.append(ITEM.sub("", line).strip())


def split(block: str) -> Iterator[str]:
    """Split a paragraph; a full stop within code or a name (`a.yaml`, 0.33.0) ends nothing."""
    text = LINK.sub(r"\1", block)
    codes = CODE.findall(text)
    for number, code in enumerate(codes):
        text = text.replace(code, f"`{number}`", 1)
    start = 0
    for end in [*(match.end() for match in END.finditer(text)), len(text)]:
        yield re.sub(r"`(\d+)`", lambda found: codes[int(found[1])], text[start:end]).strip()
        start = end


def measure(page: Path) -> tuple[int, list[int]]:
    """Return the words of a whole page, tables and code included, and those of each sentence."""
    text = page.read_text("utf-8")
    return count_words(text), [count_words(each) for each in list_sentences(text)]


def test_sentences_are_told_apart() -> None:
    page = (
        "# A heading\n\nOne is in `a. B`, of 0.3 % and x.yaml. offplan is two (or so.) Three:\n\n"
        "    code. Code.\n\n```sh\nls. A\n```\n- four\n- [five and](six.md) more\n\n| a | b. C |\n"
    )
    assert list(list_sentences(page)) == [
        "One is in `a. B`, of 0.3 % and x.yaml.",
        "offplan is two (or so.)",
        "Three:",
        "four",
        "five and more",
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_sentences_are_short(page: Path) -> None:
    sentences = list(list_sentences(page.read_text("utf-8")))
    long = [each for each in sentences if count_words(each) > MOST_IN_A_SENTENCE]
    assert not long, "split these: one fact a sentence"
    mean = sum(map(count_words, sentences)) / len(sentences)
    assert mean < MOST_IN_THE_MEAN, f"{mean:.1f} words in the mean"


def test_pages_are_few_words() -> None:
    assert measure(README)[0] <= MOST_IN_THE_README
    assert sum(measure(page)[0] for page in DOCS) <= MOST_IN_THE_DOCS


if __name__ == "__main__":
    total = 0
    for page in PAGES:
        words, sentences = measure(page)
        mean = sum(sentences) / len(sentences)
        print(f"{page.name:22} {words:6,} words  {mean:5.1f} a sentence  longest {max(sentences)}")
        total += words if page in DOCS else 0
    print(f"{'all of docs':22} {total:6,} words")

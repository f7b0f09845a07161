"""An acceptance profile reads back as it was written, and a damaged one is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from offplan.capabilities.drafts import Draft, read_draft
from offplan.drafts.acceptance import (
    AcceptanceProfile,
    check_acceptance,
    check_kind,
    dump_acceptance,
    load_acceptance,
)
from offplan.drafts.counts import DraftCounts
from offplan.errors import InputError
from tests.costs.builders import dense_model
from tests.drafts import MODEL

Change = Callable[[dict[str, Any]], object]


def count(*passes: tuple[int, int]) -> DraftCounts:
    counts = DraftCounts()
    for drafted, taken in passes:
        counts.note(drafted, taken)
    return counts


@pytest.fixture
def profile() -> AcceptanceProfile:
    return AcceptanceProfile.of_counts("ngram", MODEL, count((3, 3), (3, 1), (3, 0), (1, 1)))


def test_chances_are_of_what_was_offered(profile: AcceptanceProfile) -> None:
    assert profile.offered == (4, 2, 1)
    assert profile.chances == (0.75, 0.5, 1.0)
    assert profile.tokens == 3
    assert profile.chance_in_pause == 0.75  # nothing else is known of it
    counts = count((1, 1))
    for is_right in (True, False, False, False):
        counts.note_step(is_right=is_right)
    assert AcceptanceProfile.of_counts("ngram", MODEL, counts).chance_in_pause == 0.25


def test_positions_whose_turn_never_came_are_left_out() -> None:
    profile = AcceptanceProfile.of_counts("ngram", MODEL, count((7, 1), (7, 0)))
    assert (profile.chances, profile.offered) == ((0.5, 0.0), (2, 1))


def test_no_draft_is_no_profile() -> None:
    with pytest.raises(InputError, match="no draft was offered"):
        AcceptanceProfile.of_counts("ngram", MODEL, DraftCounts())


def test_it_reads_back(profile: AcceptanceProfile, tmp_path: Path) -> None:
    path = tmp_path / "acceptance.yaml"
    path.write_text(dump_acceptance(profile))
    assert load_acceptance(path) == profile
    assert load_acceptance(path).fingerprint == profile.fingerprint


def update(**values: object) -> Change:
    return lambda data: data.update(values)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (update(chances=[0.75, 1.5, 1.0]), "chances.1"),
        (update(chances=[-0.1, 0.5, 1.0]), "chances.0"),
        (update(chances=[0.5]), "chances has 1 positions; expected 3"),
        (update(offered=[4, 2]), "offered has 2 positions; expected 3"),
        (update(offered=[0, 0, 0]), "no draft was offered"),
        (update(offered=[4, 9, 1]), "offered 9 drafts at position 2, and 3 were taken"),
        (update(tokens=8), "tokens"),
        (update(kind="eagle"), "kind"),
        (update(steps=2, right=3), "right in 3 of 2 steps"),
        (update(offplan_acceptance=2), "of version 2: offplan_acceptance is 1"),
        (lambda data: data.pop("offplan_acceptance"), "it must be a mapping with the key"),
        (lambda data: data.pop("model"), "model: it is missing"),
        (update(text="secret"), "there is no such key"),
    ],
)
def test_a_damaged_file_is_refused(
    profile: AcceptanceProfile, tmp_path: Path, change: Change, why: str
) -> None:
    data = yaml.safe_load(dump_acceptance(profile))
    change(data)
    path = tmp_path / "acceptance.yaml"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(InputError, match=why):
        load_acceptance(path)


def test_another_kind_and_another_model_are_refused(profile: AcceptanceProfile) -> None:
    check_kind(profile, Draft(kind="ngram", tokens=1), "file")
    with pytest.raises(InputError, match=r"file is of ngram drafts, and `draft=mtp:2` of mtp"):
        check_kind(profile, Draft(kind="mtp", tokens=2), "file")
    check_acceptance(profile, dense_model(), "file")
    other = MODEL.model_copy(update={"source": "other", "headers_sha256": "1" * 64})
    moved = profile.model_copy(update={"model": other})
    with pytest.raises(InputError, match=r"file was recorded with other \(headers 1111"):
        check_acceptance(moved, dense_model(), "file")


def test_a_file_may_have_a_profile_of_each_kind(profile: AcceptanceProfile, tmp_path: Path) -> None:
    path, layers = tmp_path / "acceptance.yaml", profile.model_copy(update={"kind": "mtp"})
    both = profile.join(layers)
    path.write_text(dump_acceptance(both))
    assert path.read_text() == f"{dump_acceptance(profile)}---\n{dump_acceptance(layers)}"
    found = load_acceptance(path)
    assert (found.profiles, found.fingerprint) == ((profile, layers), both.fingerprint)
    assert both.fingerprint != profile.fingerprint
    assert [each.fingerprint for each in both.profiles] == [
        profile.fingerprint,
        layers.fingerprint,
    ]
    assert (found.find("ngram"), found.find("mtp")) == (profile, layers)
    check_kind(found, Draft(kind="mtp", tokens=2), "file")
    assert profile.find("mtp") is None
    for text, why in (
        (dump_acceptance(profile), "yaml: two profiles are of ngram drafts"),
        (dump_acceptance(layers).replace("0" * 64, "1" * 64), "are of two models"),
        ("just: this", "it must be a mapping with the key"),
    ):
        path.write_text(f"---\n{dump_acceptance(profile)}--- \n{text}")
        with pytest.raises(InputError, match=why):
            load_acceptance(path)


@pytest.mark.parametrize("text", ["ngram", "ngram:", "ngram:0", "ngram:8", "eagle:2", "3", ""])
def test_what_is_no_draft_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="draft"):
        read_draft(text)
    assert read_draft("NGRAM:3") == {"kind": "ngram", "tokens": 3}
    assert (read_draft("Auto"), read_draft("off")) == ("auto", "off")

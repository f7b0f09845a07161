"""An acceptance profile: how often a run took drafts, as a file. It holds nothing of the text."""

import hashlib
import re
import reprlib
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, model_validator
from typing_extensions import Self

from offplan.capabilities.drafts import MOST_DRAFTED, Draft, DraftKind
from offplan.checkpoint.model import Model
from offplan.drafts.counts import DraftCounts
from offplan.errors import InputError
from offplan.files import StrPath
from offplan.plan import ModelRef
from offplan.records import Record, dump_yaml, load_yaml, read_text

ACCEPTANCE_VERSION: Literal[1] = 1
MOST_FILE_BYTES = 2**16
MOST_COUNTED = 2**53
"""No count is larger: readers of JSON keep whole numbers exact up to here."""
SEPARATOR = "---\n"
"""The line between profiles of several kinds in one file."""
_BETWEEN = re.compile(r"^---[ \t\r]*$", re.MULTILINE)
DIGITS = 6
"""Decimal digits of a chance in a file."""

Count = Annotated[int, Field(ge=0, le=MOST_COUNTED)]
Chance = Annotated[float, Field(ge=0, le=1)]


class AcceptanceProfile(Record):
    """How often a model took drafts of one kind, by their position in a pass."""

    offplan_acceptance: Literal[1] = ACCEPTANCE_VERSION
    """Version of the format."""
    model: ModelRef
    """The model that took them."""
    kind: DraftKind
    tokens: Annotated[int, Field(ge=1, le=MOST_DRAFTED)]
    """Positions that were recorded; drafts behind them count as never taken."""
    chances: tuple[Chance, ...]
    """Chance that each position is taken, given that those before it were."""
    offered: tuple[Count, ...]
    """Drafts at each position whose turn came: each chance is of so many."""
    steps: Count = 0
    """Steps without drafts that compared one; 0 if that was not counted."""
    right: Count = 0
    """Those of ``steps`` whose draft would have been taken."""
    _others: tuple["AcceptanceProfile", ...] = PrivateAttr(default=())

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        """Refuse counts that no run gives: such a profile would promise what nothing keeps."""
        for key in ("chances", "offered"):
            if (found := len(getattr(self, key))) != self.tokens:
                raise ValueError(f"{key} has {found} positions; expected {self.tokens}")
        if not self.offered[0]:
            raise ValueError("offered: no draft was offered, so that none was taken or not")
        for position in range(1, self.tokens):
            reached = self.chances[position - 1] * self.offered[position - 1]
            if self.offered[position] > reached + 1:
                raise ValueError(
                    f"offered {self.offered[position]} drafts at position {position + 1}, and "
                    f"{reached:.0f} were taken at the one before"
                )
        if self.right > self.steps:
            raise ValueError(f"right in {self.right} of {self.steps} steps")
        return self

    @classmethod
    def of_counts(cls, kind: DraftKind, model: ModelRef, counts: DraftCounts) -> Self:
        """Sum up what a run counted; raises InputError if it offered no draft."""
        reached = [number for number in counts.offered if number]
        if not reached:
            raise InputError(
                "no draft was offered, so no acceptance was recorded: the text repeats nothing, or "
                "is too short"
            )
        taken = zip(counts.taken, reached, strict=False)
        return cls(
            model=model,
            kind=kind,
            tokens=len(reached),
            chances=tuple(round(number / most, DIGITS) for number, most in taken),
            offered=tuple(reached),
            steps=counts.compared,
            right=counts.right,
        )

    @classmethod
    def of_chance(cls, draft: Draft, model: ModelRef, chance: float) -> Self:
        """Return a profile in which every position has the same chance."""
        known = tuple([chance] * draft.tokens)
        return cls(
            model=model, kind=draft.kind, tokens=draft.tokens, chances=known, offered=_all(known)
        )

    def join(self, *others: "AcceptanceProfile") -> Self:
        """Return the same beside profiles of other kinds; raises InputError for what is no such."""
        joined = self._beside(others)
        for number, each in enumerate(others, 1):
            if each.kind in [known.kind for known in joined.profiles[:number]]:
                raise InputError(f"two profiles are of {each.kind} drafts: leave one of them out")
            if each.model.headers_sha256 != self.model.headers_sha256:
                raise InputError(
                    f"the acceptance profiles of {self.kind} and of {each.kind} drafts are of two "
                    "models: leave one out"
                )
        return joined

    @property
    def profiles(self) -> tuple["AcceptanceProfile", ...]:
        """Itself and the profiles of other kinds that its file has, each alone."""
        if not self._others:
            return (self,)
        return (self._beside(()), *self._others)

    def _beside(self, others: "tuple[AcceptanceProfile, ...]") -> Self:
        """Return the same beside some others, and beside no more."""
        copied = self.model_copy()
        copied._others = others
        vars(copied).pop("fingerprint", None)  # which a copy takes along
        return copied

    def find(self, kind: DraftKind) -> "AcceptanceProfile | None":
        """Return the profile of a kind of drafts; None if nothing is known of it."""
        return next((each for each in self.profiles if each.kind == kind), None)

    @property
    def chance_in_pause(self) -> float:
        """Chance that a step without drafts would have taken one."""
        return self.right / self.steps if self.steps else self.chances[0]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all that the profile says."""
        return hashlib.sha256(dump_acceptance(self).encode()).hexdigest()


def _all(chances: Sequence[float]) -> tuple[int, ...]:
    """Return counts that chances may come from."""
    reached, counts = float(MOST_COUNTED), []
    for chance in chances:
        counts.append(int(reached))
        reached *= chance
    return tuple(counts)


def dump_acceptance(profile: AcceptanceProfile) -> str:
    """Write a profile as YAML, a document for each kind: ``load_acceptance`` reads it back."""
    return SEPARATOR.join(map(_dump_one, profile.profiles))


def _dump_one(profile: AcceptanceProfile) -> str:
    data: dict[str, Any] = profile.model_dump(mode="json", exclude_none=True)
    if not profile.steps:
        del data["steps"], data["right"]
    lines = (
        f"{key}: {dump_yaml(value, width=10**6, on_one_line=True)}" for key, value in data.items()
    )
    return "".join(line.removesuffix("...\n") for line in lines)


def load_acceptance(path: StrPath) -> AcceptanceProfile:
    """Read a profile, of one kind or of several; raises InputError with each key that is wrong."""
    text = read_text(path, "acceptance profile", MOST_FILE_BYTES, InputError)
    documents = [each for each in _BETWEEN.split(text) if each.strip()] or [text]
    first, *others = (_load_one(each, path) for each in documents)
    try:
        return first.join(*others) if others else first
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _load_one(text: str, path: StrPath) -> AcceptanceProfile:
    try:
        data = load_yaml(text)
    except ValueError as error:
        raise InputError(f"{path} is no acceptance profile, which is YAML: {error}") from None
    if not isinstance(data, dict) or "offplan_acceptance" not in data:
        raise InputError(
            f"{path} is no acceptance profile: it must be a mapping with the key "
            f"`offplan_acceptance: {ACCEPTANCE_VERSION}`, as `record_drafts` writes it"
        )
    if (version := data["offplan_acceptance"]) != ACCEPTANCE_VERSION:
        raise InputError(
            f"{path} is an acceptance profile of version {reprlib.repr(version)}: "
            f"offplan_acceptance is {ACCEPTANCE_VERSION} in those that this offplan reads; record "
            "it again"
        )
    return AcceptanceProfile.check(data, str(path), "the acceptance profile", InputError)


def check_kind(profile: AcceptanceProfile, draft: Draft, name: str) -> None:
    """Raise InputError, which says ``name``, for a profile of another kind than a draft's."""
    if profile.find(draft.kind) is None:
        kinds = " and ".join(each.kind for each in profile.profiles)
        raise InputError(
            f"{name} is of {kinds} drafts, and {draft.key} of {draft.kind}: record those "
            "with `record_drafts`, or leave one of them out"
        )


def check_acceptance(profile: AcceptanceProfile, model: Model, name: str) -> None:
    """Raise InputError, which says ``name``, for a profile that is not of a model."""
    again = "record a run of this model with `record_drafts`, or leave `acceptance` out"
    profile.model.require(model, name, again)

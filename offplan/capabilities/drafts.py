"""Drafts: one pass checks several tokens of one text, which something cheaper has guessed.

Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023).
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator
from typing_extensions import Self

from offplan.capabilities.goal import Asked, GoalBase
from offplan.capabilities.offload import OffloadBase
from offplan.capabilities.way import Way
from offplan.checkpoint.model import Model
from offplan.checkpoint.prediction import find_prediction_layers
from offplan.errors import InputError
from offplan.records import Record
from offplan.stores import StoreName

DraftKind = Literal["ngram", "mtp"]
"""Source of drafts: what followed the same words earlier in the text, or prediction layers."""
PASS_TOKENS = (2, 4, 8)
"""Tokens of the passes that a session captures; a pass of fewer is padded to the next of them."""
MOST_DRAFTED = PASS_TOKENS[-1] - 1
"""Tokens that a pass drafts at most: its first token is no draft."""
LENGTHS: Mapping[DraftKind, tuple[int, ...]] = {
    "ngram": tuple(size - 1 for size in PASS_TOKENS),
    "mtp": (1, 2, 3),
}
"""Numbers of drafted tokens that plans are tried with.

Drafts that cost nothing fill a captured pass. Each draft of a prediction layer is a use of it, and
is taken less often than the one before.
"""


class Draft(Record):
    """The drafts of a plan: where they come from, and how many a pass has at most."""

    kind: DraftKind
    tokens: Annotated[int, Field(ge=1, le=MOST_DRAFTED)]
    """Drafted tokens of a pass, at most."""
    # left out where they lie on the device: other plans stay as they are
    experts: Literal["device", "host"] = Field(
        default="device", exclude_if=lambda place: place == "device"
    )
    """``host``: the routed experts of a prediction layer stay in pinned host memory, and are read
    in place. In a goal ``device`` lets the planner choose."""

    @model_validator(mode="after")
    def _has_layers(self) -> Self:
        if self.experts == "host" and not self.uses_layers:
            raise ValueError(
                f"found `experts: host` with `kind: {self.kind}`: prediction layers (mtp) alone "
                "have experts: leave `experts` out"
            )
        return self

    def __str__(self) -> str:
        """Return it as the command line takes it."""
        return f"{self.kind}:{self.tokens}"

    @property
    def uses_layers(self) -> bool:
        """True if the checkpoint's own prediction layers make the drafts, on the GPU."""
        return self.kind == "mtp"

    def with_experts(self, place: Literal["device", "host"]) -> "Draft":
        """Return the same with experts of its prediction layer in a place."""
        return self.model_copy(update={"experts": place})

    def list_steps(self) -> Iterator[tuple[str, "Draft"]]:
        """Yield its steps in words: lengths whose passes differ in time, and the other place."""
        for tokens in LENGTHS[self.kind]:
            is_other = pass_tokens(tokens) != pass_tokens(self.tokens)
            if is_other or (self.uses_layers and tokens != self.tokens):
                other = self.model_copy(update={"tokens": tokens})
                yield f"draft tokens {self.tokens} -> {tokens}", other
        if self.uses_layers:
            other = self.with_experts("device" if self.experts == "host" else "host")
            yield f"draft experts {self.experts} -> {other.experts}", other

    @property
    def key(self) -> str:
        """The argument that asks for it, in backquotes."""
        return f"`draft={self}`"

    def why_not_batch(self, batch: int) -> str | None:
        """Say why steps of so many sequences check no drafts; None if they do."""
        if batch == 1:
            return None
        return (
            f"{self.key} with `batch={batch}`: a pass checks the drafts of one sequence: choose "
            "batch 1"
        )

    def describe(self) -> str:
        """Say what is drafted, for a plan's report."""
        where = ", experts in host memory" if self.experts == "host" else ""
        return (
            f"up to {self.tokens} drafted token{'s'[: self.tokens > 1]} a pass ({self.kind}{where})"
        )


class DraftOffload(OffloadBase):
    """A decision whose steps may check drafts."""

    # left out where there is none: what is printed of other plans stays as it is
    draft: Draft | None = Field(default=None, exclude_if=lambda draft: draft is None)
    """The drafts that each pass checks; null makes one token a pass."""

    def list_steps(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield steps to passes of other sizes, and to none that check drafts."""
        if self.draft is not None:
            yield "without draft", {"draft": None}
            yield from ((step, {"draft": other}) for step, other in self.draft.list_steps())
        yield from super().list_steps()


class DraftGoal(GoalBase):
    """A question whose plans may check drafts."""

    # left out where it is usual: what is printed of other plans stays as it is
    draft: Literal["auto", "off"] | Draft = Field(
        default="auto", exclude_if=lambda draft: draft == "auto"
    )
    """The drafts that each pass checks; ``auto`` chooses them, or none, by an acceptance profile,
    and ``off`` has none."""

    @property
    def asked_draft(self) -> Draft | None:
        """The drafts that all plans have; None if plans may have none."""
        return self.draft if isinstance(self.draft, Draft) else None

    def list_refusals(self, asked: Asked) -> Iterator[str]:
        """Yield why no plan can check the drafts that are asked for."""
        if (draft := self.asked_draft) is not None:
            yield from self.list_draft_refusals(draft, asked)
            if self.objective != "latency":
                yield (
                    f"{draft.key} with `objective={self.objective}`, which chooses the batch: a "
                    "pass checks the drafts of one sequence: leave one of them out"
                )
        yield from super().list_refusals(asked)

    def list_draft_refusals(self, draft: Draft, asked: Asked) -> Iterator[str]:
        """Yield why a plan of this goal cannot check drafts."""
        yield from list_draft_refusals(
            draft,
            asked.model,
            way=self.way,
            batch=asked.batch,
            store=asked.store,
            engine=self.engine,
        )

    def list_unsaid(self) -> Iterator[tuple[str, str]]:
        """Yield the drafts that are asked for."""
        yield from super().list_unsaid()
        if self.asked_draft is not None:
            yield "draft", "offplan's own runtime alone checks drafts"


def read_draft(text: str) -> str | dict[str, Any]:
    """Read ``ngram:3``, ``auto`` or ``off`` as a goal's value; raises InputError for the rest."""
    word = text.lower()
    if word in ("auto", "off"):
        return word
    kind, _, tokens = word.partition(":")
    if kind not in get_args(DraftKind) or not tokens.isdecimal():
        raise InputError(
            f"draft {text!r}: write a kind and how many tokens a pass drafts, 1 to {MOST_DRAFTED}, "
            "as in ngram:3 or mtp:2, or auto or off"
        )
    if not 1 <= int(tokens) <= MOST_DRAFTED:
        raise InputError(
            f"draft {text!r}: found {tokens} tokens, expected 1 to {MOST_DRAFTED}: passes of up to "
            f"{MOST_DRAFTED + 1} tokens are captured"
        )
    return {"kind": kind, "tokens": int(tokens)}


def list_places(draft: Draft, model: Model) -> tuple[Draft, ...]:
    """List a draft with experts of its prediction layer in each place, the device first.

    A layer without routed experts has one place, and so has a draft whose experts are on the host.
    """
    if draft.uses_layers and draft.experts == "device" and has_experts(model):
        return draft, draft.with_experts("host")
    return (draft,)


def why_not_placed(draft: Draft, model: Model) -> str | None:
    """Say why experts of a model's prediction layer cannot lie where a draft has them."""
    if draft.experts == "device" or has_experts(model):
        return None
    return (
        f"{draft.key} with `experts: host`: the prediction layer of {model.source} has no routed "
        "experts: leave `experts` out"
    )


def has_experts(model: Model) -> bool:
    """Return True if a model has a prediction layer with routed experts."""
    layers = find_prediction_layers(model)
    return not isinstance(layers, str) and layers.block.expert_bytes > 0


def pass_tokens(tokens: int) -> int:
    """Return the tokens of the pass that checks so many drafts, padded to what is captured.

    A pass without drafts is a step of one token.
    """
    return next(size for size in (1, *PASS_TOKENS) if size > tokens)


def most_drafted(draft: Draft | None) -> int:
    """Return the drafts that the largest pass has room for, padding included; 0 without drafts."""
    return 0 if draft is None else pass_tokens(draft.tokens) - 1


def list_pass_sizes(draft: Draft | None) -> tuple[int, ...]:
    """Return the tokens of each pass that a session captures for drafts, ascending."""
    if draft is None:
        return ()
    most = pass_tokens(draft.tokens)
    return tuple(size for size in PASS_TOKENS if size <= most)


def list_draft_refusals(
    draft: Draft,
    model: Model,
    *,
    way: Way,
    batch: int,
    store: StoreName,
    engine: str | None = None,
) -> Iterator[str]:
    """Yield why offplan cannot run a plan with these drafts: planner and runtime ask alike.

    ``batch`` is the number of sequences of a step, ``engine`` the one that runs the plan.
    """
    key = draft.key
    if draft.uses_layers and isinstance(why := find_prediction_layers(model), str):
        yield f"{key}: {why}: choose `draft=ngram:N`"
    elif (not_placed := why_not_placed(draft, model)) is not None:
        yield not_placed
    if engine is not None:
        yield f"{key} with `engine={engine}`: offplan's own runtime alone checks drafts"
    if not way.is_own:
        yield f"{key}: {way.whose} passes are to run {model.source}, and drafts need offplan's own"
    if (no_batch := draft.why_not_batch(batch)) is not None:
        yield no_batch
    if store != "host":
        yield f"{key} with `store={store}`: passes of several tokens read no {store}'s memory"

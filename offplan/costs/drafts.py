"""Costs of passes that check drafts: several tokens of one text in each pass.

A pass reads its weights once, from GPU memory and over the link, and computes with all its tokens.
The experts that a step misses are those that any of its tokens chooses. ``drafts.mix`` tells how
many passes have how many tokens, and how much text they give. Time of a token is the mean of all
passes over the tokens of text that a pass gives.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from offplan.costs.pass_compute import PassCompute
from offplan.costs.term import Input, Term
from offplan.costs.timeline import PhaseTimes, to_seconds
from offplan.drafts.mix import Mix
from offplan.held.stage import Stage

GRAPH_BYTES = 128 * 2**10
"""GPU memory of a layer in a captured graph, beside the tensors that graphs keep.

Source: estimated, some ten kernels at 10 KiB; the profile's ``gpu_overhead`` has a step's graph.
"""


@dataclass(frozen=True)
class DraftedPass:
    """The passes of one size."""

    tokens: int
    """Tokens of each, padding included; 1 for a step without drafts."""
    share: float
    """Share of all passes."""
    compute: PassCompute
    taken: PhaseTimes

    @property
    def name(self) -> str:
        """Their key in a prediction."""
        return "step" if self.tokens == 1 else f"pass_{self.tokens}"


@dataclass(frozen=True)
class DraftedTimes:
    """The times of a text's passes where some check drafts."""

    mix: Mix
    passes: tuple[DraftedPass, ...]
    """The passes of each size, ascending; the first are steps without drafts."""

    def with_mix(self, mix: Mix) -> "DraftedTimes":
        """Return the same with other shares of the same passes."""
        shares = dict(mix.shares)
        passes = (replace(each, share=shares.get(each.tokens, 0.0)) for each in self.passes)
        return DraftedTimes(mix, tuple(passes))

    def mean(self, of: Callable[[PhaseTimes], Fraction | int]) -> Fraction:
        """Return a quantity of a token: the mean over passes, over the tokens that each gives."""
        total = sum((Fraction(each.share) * of(each.taken) for each in self.passes), Fraction(0))
        return total / Fraction(self.mix.tokens)

    @property
    def token_ps(self) -> Fraction:
        """Picoseconds of a token."""
        return self.mean(lambda taken: taken.step_ps)


def graph_bytes(stage: Stage, sizes: Sequence[int]) -> int:
    """Bytes of the graphs of passes of so many sizes, beside the tensors that they keep.

    Linear attention has RULE_LAUNCHES more kernels, and counts twice.
    """
    num_linear = sum(layer.kv_cache.state_bytes > 0 for layer in stage.layers)
    return GRAPH_BYTES * (len(stage.layers) + num_linear) * len(sizes)


_SECONDS: tuple[tuple[str, Callable[[PhaseTimes], Fraction | int]], ...] = (
    ("compute", lambda taken: taken.compute_ps),
    ("link", lambda taken: taken.link_ps),
    ("bound", lambda taken: taken.bound_ps),
    ("stall", lambda taken: max(Fraction(0), taken.step_ps - taken.compute_ps)),
    ("step", lambda taken: taken.step_ps),
)
"""Quantities of a phase that are times, as predictions have them."""


def list_drafted(stage: Stage, drafted: DraftedTimes) -> Iterator[Term]:
    """List the terms of passes that check drafts, and those of a token that follow from them."""
    source = "no acceptance profile: no draft is taken"
    if stage.acceptance is not None:
        source = f"acceptance profile {stage.acceptance.fingerprint[:12]}, by the rule of drafts"
    shares = tuple(
        Input(f"share of {_plural(each)}", each.share, "count", source) for each in drafted.passes
    )
    formula = "tokens of text / passes of all sizes"
    yield Term("draft.tokens", round(drafted.mix.tokens, 3), "count", formula, shares)
    for each in drafted.passes:
        taken = [Input(name, to_seconds(of(each.taken)), "s") for name, of in _SECONDS[:-1]]
        inputs = (*taken, Input("link bytes", each.taken.link_bytes, "bytes"))
        if each.compute.drafting_ps:
            of_layers = "of compute, the prediction layers'"
            inputs += (Input(of_layers, to_seconds(each.compute.drafting_ps), "s"),)
        if each.compute.drafting_bytes:
            of_layers = "of link bytes, the prediction layers'"
            inputs += (Input(of_layers, each.compute.drafting_bytes, "bytes"),)
        step_s = to_seconds(each.taken.step_ps)
        yield Term(f"draft.{each.name}", step_s, "s", "compute + stall, once a pass", inputs)
    parts = " + ".join(f"share of {_plural(each)} x its own" for each in drafted.passes)
    formula = f"({parts}) / draft.tokens"
    for name, of in _SECONDS:
        if name != "bound":
            yield Term(f"decode.{name}", to_seconds(drafted.mean(of)), "s", formula)
    awaited_ps = drafted.mean(lambda taken: taken.awaited_ps)
    bound_ps = max(drafted.mean(lambda taken: taken.compute_ps), awaited_ps)
    awaited = Input("link waited for", to_seconds(awaited_ps), "s")
    yield Term(
        "decode.bound", to_seconds(bound_ps), "s", "max(compute, link waited for)", (awaited,)
    )
    num_bytes = round(drafted.mean(lambda taken: taken.link_bytes))
    yield Term("decode.link_bytes", num_bytes, "bytes", formula)


def _plural(each: DraftedPass) -> str:
    return "steps" if each.tokens == 1 else f"passes of {each.tokens}"

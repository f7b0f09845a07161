"""Models and rules of every shape, for Hypothesis to draw."""

from hypothesis import strategies as st

from offplan.backends import BACKENDS
from offplan.checkpoint.model import Model
from offplan.errors import PlanError
from offplan.placement import Placement
from offplan.plan import Backend, Rule
from tests.costs.builders import make_model, place_rules, rule

NAMES = ("a", "b", "c", "d")
WAYS = st.sampled_from([each for each in BACKENDS.values() if each.is_usual])


def _vector(size: int) -> tuple[int, ...]:
    return (size,)


@st.composite
def odd_models(draw: st.DrawFn) -> Model:
    """Layers that each have some of four parameters, of uneven sizes."""
    shapes = st.dictionaries(
        st.sampled_from([f"{name}.weight" for name in NAMES]),
        st.builds(_vector, st.integers(1, 400)),
        min_size=1,
    )
    return make_model(draw(st.lists(shapes, min_size=1, max_size=8)))


@st.composite
def models_with_experts(draw: st.DrawFn) -> Model:
    """The same, with routed experts of uneven sizes in some layers, of one parameter or two."""
    names = [f"{name}.weight" for name in (*NAMES[:2], "experts.x", "experts.y")]
    shapes = st.dictionaries(
        st.sampled_from(names), st.builds(_vector, st.integers(1, 400)), min_size=1
    )
    return make_model(draw(st.lists(shapes, min_size=1, max_size=6)))


@st.composite
def rules_in_parts(draw: st.DrawFn, model: Model) -> list[Rule]:
    """Rules for a model, the first of which has prompts stream routed experts in parts.

    Where chunks have a token, it has some of a prompt's chunks meet a part at once, or all.
    """
    size = draw(st.integers(1, 3))
    group = size, draw(st.integers(1, size))
    first = rule("experts", decode=Backend.UVA, group=group)
    at_once = draw(st.sampled_from([None, 1, 2, 3, 5]))
    parts = {"parts": draw(st.sampled_from([2, 4, 8])), "tokens_at_once": at_once}
    first = first.model_copy(update=parts)
    rules = draw(rule_lists(len(model.layers)))
    return [first, *rules] if model.experts is not None else rules


@st.composite
def rule_lists(draw: st.DrawFn, num_layers: int) -> list[Rule]:
    rules = []
    for _ in range(draw(st.integers(0, 3))):
        segments = tuple(draw(st.lists(st.sampled_from(NAMES), max_size=3, unique=True)))
        if draw(st.integers(0, 4)) == 0:
            rules.append(
                Rule(
                    cpu_offload_params=segments,
                    max_bytes=draw(st.integers(1, 2000)),
                    prefill=Backend.UVA,
                    decode=Backend.UVA,
                )
            )
            continue
        size = draw(st.integers(1, num_layers + 1))
        group = size, draw(st.integers(1, size))
        rules.append(rule(*segments, group=group, prefill=draw(WAYS), decode=draw(WAYS)))
    return rules


def place_or_skip(model: Model, rules: list[Rule], prefetch_step: int) -> Placement:
    """Place, but drop rules that take nothing, which are errors."""
    for count in range(len(rules), -1, -1):
        try:
            return place_rules(model, rules[:count], prefetch_step)
        except PlanError:
            continue
    raise AssertionError("no rules never fail")

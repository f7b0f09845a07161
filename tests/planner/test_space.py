"""What the search goes over: segment classes and group patterns."""

from collections import Counter

import pytest

from offplan.held.held import hold
from offplan.planner.classes import group_patterns, list_patterns, segment_classes
from tests.costs.builders import dense_model, moe_model, rule


def test_classes_have_the_shortest_names() -> None:
    dense = {segment_class.segments for segment_class in segment_classes(hold(dense_model(2)))}
    assert dense >= {
        (),
        ("mlp",),
        ("self_attn",),
        ("k_proj", "q_proj", "v_proj"),
        ("o_proj",),
        ("gate_proj", "up_proj"),
        ("down_proj",),
        ("mlp", "self_attn"),
    }
    moe = {segment_class.segments for segment_class in segment_classes(hold(moe_model(3)))}
    assert moe >= {(), ("experts",), ("experts.down_proj",), ("shared_experts",), ("mlp",)}
    # one of gate and up of the routed experts cannot be chosen alone
    assert not [segments for segments in moe if segments == ("experts.up_proj",)]


def test_patterns_are_all_of_them_and_select_as_rules_do() -> None:
    patterns = list_patterns(5)
    assert len(set(zip(patterns.group_size, patterns.num_in_group, strict=True))) == 15
    for size, number, layers in zip(*patterns, strict=True):
        chosen = rule(group=(int(size), int(number)))
        assert layers.tolist() == [chosen.selects_layer(layer) for layer in range(5)]


@pytest.mark.parametrize("kinds", [{0}, {1}, {0, 1}])
def test_groups_are_of_distinct_patterns_that_cost_the_same(kinds: set[int]) -> None:
    kind_of = (0, 1, 0, 1, 1, 1)
    patterns = list_patterns(6)
    groups = group_patterns(kind_of, frozenset(kinds))
    seen = []
    for group in groups:
        assert list(group.patterns) == sorted(group.patterns), "the smallest groups first"
        for number in group.patterns:
            layers = [i for i in patterns.layers[number].nonzero()[0] if kind_of[i] in kinds]
            counts = Counter(kind_of[layer] for layer in layers)
            assert tuple(counts[kind] for kind in (0, 1)) == group.counts
            seen.append(tuple(layers))
    every = {tuple(i for i in row.nonzero()[0] if kind_of[i] in kinds) for row in patterns.layers}
    assert set(seen) == every - {()}
    assert len(seen) == len(set(seen))
    assert len(groups) == len({group.counts for group in groups})

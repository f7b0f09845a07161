"""Decisions in place of candidates: what each writes into a plan, and how plain that is."""

from collections.abc import Sequence

import numpy as np

from offplan.plan import Offload, Rule
from offplan.planner.candidates import NO_RULE, Candidates, Ints
from offplan.planner.classes import list_patterns
from offplan.planner.prices import Prices
from offplan.planner.space import Space


def list_plainness(prices: Prices, candidates: Candidates, on_host: Ints) -> Ints:
    """Return how plain candidates are, [candidates, 5]: ``Candidate.order``."""
    sizes = np.append(list_patterns(len(prices.space.kind_of)).group_size, 0)
    segments = [len(option.segment_class.segments) for option in prices.options]
    num_segments = np.append(segments, 0)
    return np.column_stack(
        [
            1 + (candidates.second != NO_RULE),
            on_host,
            num_segments[candidates.first] + num_segments[candidates.second],
            candidates.prefetch_step,
            sizes[candidates.first_pattern] + sizes[candidates.second_pattern],
        ]
    )


def write_candidate(
    prices: Prices, candidates: Candidates, number: int, cache_sizes: Sequence[int]
) -> Offload:
    """Write the decision of one candidate, whose layers have caches so large."""
    setting, num_slots, *taken = (int(column[number]) for column in candidates)
    patterns = list_patterns(len(prices.space.kind_of))
    fewest = min((each for each in cache_sizes if each), default=1)
    more = sum(each > fewest for each in cache_sizes)
    rules = tuple(
        prices.options[option].rule(
            int(patterns.group_size[pattern]), int(patterns.num_in_group[pattern]), fewest, more
        )
        for option, pattern in (taken[:2], taken[2:])
        if option != NO_RULE
    )
    return write_rules(prices.space, setting, max(1, num_slots), rules)


def write_rules(space: Space, setting: int, prefetch_step: int, rules: tuple[Rule, ...]) -> Offload:
    """Write the decision of these rules in a setting."""
    chosen = space.settings[setting]
    return Offload(
        prefetch_step=prefetch_step,
        prefill_chunk=chosen.prefill_chunk,
        embeddings=chosen.embeddings,
        store=space.machine.store,
        rules=rules,
        draft=chosen.draft,
    ).recoded_by(space.recoding)

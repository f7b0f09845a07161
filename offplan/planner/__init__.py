"""Planner: from a question to the best plan, by a search over a stated space.

Whoever is new here reads four files, in this order. The others hold what these name, and are read
where a number or a name is doubted.

1. ``space``: what all plans of a question share, and which chunks, rings and rules are tried.
2. ``option``: what a rule may take, how, and by which numbers of its own; ``options`` lists them.
3. ``search``: the best plan of one space: rules alone by their estimates, then pairs of two.
4. ``find``: which of the good plans is chosen, and what the answer holds.

``estimates`` bounds what plans take from below by arithmetic, and ``prices`` has the exact memory
and times of many plans at once. Both ask ``numbers`` for what a rule's own numbers take, and
``costs.in_place_costs`` for what layers read in place. ``single_rule_plans`` lists rules that a
budget leaves room for, ``in_place`` the plans that copy nothing, ``stages`` a pipeline's other
stages, ``packed`` what may be packed. The rest are questions of their own: ``frontier``,
``neighbours``, ``infeasible``.
"""

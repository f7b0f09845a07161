"""The best plan over what may be packed: nothing, all, or the fewest layers that make all fit.

Between them, only plans that then need nothing off the GPU are tried. They pay for packing in as
few layers as a group pattern can say. More memory never makes the best of these slower, as it does
not for each packing by itself.
"""

import numpy as np

from offplan.capabilities.packing import Packing
from offplan.held.packing import packable
from offplan.plan import Budget, Offload
from offplan.planner.aims import NEVER, WITHIN, Aim, Nearest
from offplan.planner.classes import list_patterns
from offplan.planner.search import MAX_RULES, Candidate, Search, Searcher
from offplan.planner.space import Space, find_room


def find_best(
    searcher: Searcher,
    budget: Budget,
    aim: Aim,
    limit: float = NEVER,
    max_rules: int = MAX_RULES,
    rival: Candidate | None = None,
) -> Search:
    """Find the best plan of a budget, of a value below ``limit``: packed only if that is better.

    A ``rival``, a plan of that budget, is chosen where it is as good and plainer.
    """
    packed = searcher.recoded
    if packed is None:
        return searcher.find(budget, aim, limit, max_rules, rival)
    fewest = _find_fewest(searcher.space, packed.space, budget, aim)
    if fewest is not None and not searcher.can_run(fewest.offload, budget):
        fewest = None
    if rival is None and fewest is not None and fewest.value < limit:
        rival = fewest
    fits = find_room(searcher.space, budget).lacking_bytes.min() <= 0
    searches: list[Search] = []
    # the better one first, since little of the other is then looked at
    for each in (searcher, packed) if fits else (packed, searcher):
        if rival is None or _least_value(each.space, aim) < rival.value:
            if rival is not None and not aim.tolerance:
                limit = rival.value
            searches.append(each.find(budget, aim, limit, max_rules, rival))
            rival = searches[-1].best
    return Search(
        rival,
        min((search.single for search in searches), default=NEVER),
        sum(search.num_candidates for search in searches),
        sum(search.num_priced for search in searches),
        min((search.gpu_lack for search in searches), default=0),
        min((search.host_lack for search in searches), default=0),
    )


def find_any(searcher: Searcher, budget: Budget) -> Search:
    """Find a plan that fits a budget and keeps the question's targets, or what is lacking."""
    aim = Nearest(searcher.space.limits_ps)
    # what misses a target is not wanted at all, so that hardly any plan is priced
    return find_best(searcher, budget, aim, WITHIN)


def reaches(searcher: Searcher, budget: Budget) -> bool:
    """Return True if a plan fits a budget and keeps the question's targets."""
    return find_any(searcher, budget).best is not None


def _least_value(space: Space, aim: Aim) -> float:
    """Return the value of the best plan if everything fitted."""
    return float(aim.values(*space.table.resident_ps.T.astype(float)).min())


def _find_fewest(plain: Space, packed: Space, budget: Budget, aim: Aim) -> Candidate | None:
    """Find the best plan with everything resident and some layers packed, by a pattern.

    The output head is packed where it is in plans that pack all, or stays as it is stored.
    """
    if any(p.is_expert for p in packable(plain.stage, runner=plain.question.runner)):
        return None  # the search packs experts in all layers or in none
    if plain.stage.num_stages > 1:
        return None  # whose other stages would have to fit as well
    whole = packed.recoding
    assert whole is not None, "that space packs all"
    patterns = list_patterns(len(plain.kind_of))
    num_patterns, num_heads = len(patterns.group_size), 1 + whole.output_head
    # all patterns with the head as where all is packed, then with the head as it is stored
    layers = np.tile(patterns.layers, (num_heads, 1))
    plain_head = np.arange(num_heads).repeat(num_patterns)
    saved = np.array(
        [a.nbytes - b.nbytes for a, b in zip(plain.stage.layers, packed.stage.layers, strict=True)]
    )
    saved_head = plain.stage.outside_bytes - packed.stage.outside_bytes
    room = find_room(packed, budget)
    fits = room.lacking_bytes[:, None] + saved @ ~layers.T + saved_head * plain_head <= 0
    fits &= (room.host_bytes >= 0)[:, None] & (saved @ layers.T > 0)
    if not fits.any():
        return None
    # the times of all packed, less what layers and a head that are not packed save
    base = packed.table.resident_ps + packed.table.row_ps
    longer = packed.table.layer_ps - plain.table.layer_ps
    prompt_ps = base[:, :1] - longer @ ~layers.T
    prompt_ps -= (packed.table.outside_ps - plain.table.outside_ps)[:, None] * plain_head
    step_longer = np.array(packed.decode.layer_ps) - np.array(plain.decode.layer_ps)
    step_ps = base[:, 1:] - step_longer @ ~layers.T
    step_ps = step_ps - (packed.decode.behind_ps - plain.decode.behind_ps) * plain_head
    values = np.where(fits, aim.values(prompt_ps.astype(float), step_ps.astype(float)), NEVER)
    count = np.broadcast_to(layers.sum(1), values.shape)
    first = np.lexsort((count.ravel(), values.ravel()))[0]
    number, pattern = np.unravel_index(first, values.shape)
    if values[number, pattern] == NEVER:
        return None
    setting, chosen = plain.settings[number], pattern % num_patterns
    packing = Packing(
        group_size=int(patterns.group_size[chosen]),
        num_in_group=int(patterns.num_in_group[chosen]),
        output_head=whole.output_head and not plain_head[pattern],
        leave_unpacked=whole.leave_unpacked,
    )
    offload = Offload(
        prefill_chunk=setting.prefill_chunk,
        embeddings=setting.embeddings,
        store=plain.machine.store,
        packing=packing,
        draft=setting.draft,
    )
    times_ps = float(prompt_ps[number, pattern]), float(step_ps[number, pattern])
    return Candidate(float(values[number, pattern]), (0, 0, 0, 1, 0), times_ps, lambda: offload)

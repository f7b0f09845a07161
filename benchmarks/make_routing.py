"""Write a routing profile of a model as a trace of stated reuse has it, to plan with.

    python -m benchmarks.make_routing CONFIG_JSON routing.json --reuse published

All layers have the reuse of the same traces: a profile stands for the mean of layers anyway.
"""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.traces import REUSES, make_trace
from offplan.checkpoint.model import Model
from offplan.checkpoint.open import open_model
from offplan.plan import ModelRef
from offplan.routing.profile import (
    BatchReuse,
    RoutingProfile,
    check_routing,
    dump_routing,
    make_routing,
)

TOKENS = 600
SEQUENCES = 4


def profile_trace(model: Model, reuse: str) -> RoutingProfile:
    """Draw traces of some sequences, and sum up how soon experts are chosen again."""
    assert model.experts is not None, "a mixture of experts"
    sizes = model.experts.num_experts, model.experts.num_experts_per_token
    layers = [layer.index for layer in model.layers if layer.expert_bytes]
    traces = [make_trace(*sizes, TOKENS, reuse, seed) for seed in range(SEQUENCES)]
    steps = np.stack(traces, axis=1)[:, None]  # [tokens, layers, sequences, choices]
    reference = ModelRef.model_validate(model, from_attributes=True)
    profile = make_routing(reference, layers[:1], [steps], sizes[0])
    changed = {
        "batches": _to_layers(profile.batches, layers),
        "passes": _to_layers(profile.passes, layers),
    }
    return profile.model_copy(update=changed)


def _to_layers(reuses: Iterable[BatchReuse], layers: Sequence[int]) -> tuple[BatchReuse, ...]:
    """Give each of some layers the reuse of the one layer that was recorded."""
    return tuple(
        each.model_copy(
            update={"layers": tuple(each.layers[0].model_copy(update={"layer": n}) for n in layers)}
        )
        for each in reuses
    )


def main() -> None:
    """Write the profile that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("output", type=Path)
    parser.add_argument("--reuse", choices=REUSES, default="published")
    given = parser.parse_args()
    model = open_model(given.config)
    if model.experts is None:
        parser.error(f"{given.config} has no routed experts")
    profile = profile_trace(model, given.reuse)
    check_routing(profile, model, str(given.output))
    given.output.write_text(dump_routing(profile), "utf-8")


if __name__ == "__main__":
    main()

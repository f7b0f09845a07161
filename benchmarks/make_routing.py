"""Write a routing profile of a model as a trace of stated reuse has it, to plan with.

    python -m benchmarks.make_routing CONFIG_JSON routing.json --reuse published

All layers have the reuse of the same traces: a profile stands for the mean of layers anyway.
"""

import argparse
from pathlib import Path

import numpy as np

from benchmarks.traces import REUSES, make_trace
from offplan.checkpoint.model import Model
from offplan.checkpoint.open import open_model
from offplan.plan import ModelRef
from offplan.routing.profile import (
    BatchReuse,
    LayerReuse,
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

    def spread(reuses: tuple[BatchReuse, ...]) -> tuple[BatchReuse, ...]:
        """Give all layers the one's reuse."""
        return tuple(
            each.model_copy(update={"layers": tuple(_as_layer(each, index) for index in layers)})
            for each in reuses
        )

    changed = {"batches": spread(profile.batches), "passes": spread(profile.passes)}
    return profile.model_copy(update=changed)


def _as_layer(reuse: BatchReuse, index: int) -> LayerReuse:
    return reuse.layers[0].model_copy(update={"layer": index})


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

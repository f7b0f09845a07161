"""The mapping from stored tensors to the parameters of a transformers model that they fill."""

from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from offplan.errors import CheckpointError
from offplan.held.stage import Stage
from offplan.runtime.forms.runnable import check_experts
from offplan.runtime.loading.checks import check_filled, check_headers, check_layers
from offplan.runtime.loading.codes import map_codes
from offplan.runtime.loading.pieces import arrange
from offplan.runtime.loading.sources import Gathered, gather, list_sources
from offplan.runtime.loading.target import Conversion, Piece, Target
from offplan.runtime.refusal import refuse


def map_tensors(skeleton: PreTrainedModel, stage: Stage) -> dict[str, Target]:
    """Find for every parameter the stored tensors that fill it, by transformers' own mapping.

    Returns targets by parameter name; of a weight that is not stored by its values, one for each
    part. Raises CheckpointError when parameters stay unfilled, stored tensors have nowhere to go,
    or their headers say that they do not fill their places.
    """
    state = skeleton.state_dict(keep_vars=True)
    gathered, unused = gather(skeleton, list_sources(stage), state)
    targets: dict[str, Target] = {}
    for one in gathered:
        if one.parameter.form.is_raw:
            targets |= _map_values(skeleton, one, state)
        else:
            targets |= map_codes(skeleton, one)
    check_experts(skeleton, {target.codes.weight for target in targets.values() if target.codes})
    check_filled(stage, state, targets, unused)
    check_layers(skeleton, stage, state, targets)
    return targets


def _map_values(
    skeleton: PreTrainedModel, one: Gathered, state: Mapping[str, torch.Tensor]
) -> dict[str, Target]:
    """Find what stored values fill: views of a parameter, or all that a conversion makes."""
    arranged = arrange(one.converter, one.sources, [source.tensor.shape for source in one.sources])
    if arranged is not None:
        target = Target(arranged[0])
        check_headers(one.name, target, state[one.name])
        return {one.name: target}
    assert one.converter is not None
    return _map_made(Conversion(one.converter, skeleton, one.name, tuple(one.sources)), state)


def _map_made(conversion: Conversion, state: Mapping[str, torch.Tensor]) -> dict[str, Target]:
    """Find what a conversion fills, by converting shapes alone; raises CheckpointError."""
    tensors = [source.tensor for source in conversion.sources]
    operations = ", ".join(type(o).__name__ for o in conversion.converter.operations)
    try:
        made = conversion.convert(torch.empty(t.shape, device="meta") for t in tensors)
    except Exception as error:  # whatever an operation of transformers raises
        raise refuse(
            f"{conversion.name} is stored in another form than it is used in ({operations}), and "
            f"transformers cannot convert it ({error})"
        ) from None
    for name, value in made.items():
        expected = state[name].shape if name in state else None
        if value.shape != expected:
            raise CheckpointError(
                f"{conversion.name}: {operations} of {', '.join(t.name for t in tensors[:2])} "
                f"makes {name} {list(value.shape)}; the model wants "
                f"{'no such parameter' if expected is None else list(expected)}"
            )
    return dict.fromkeys(made, Target(tuple(map(Piece, conversion.sources)), conversion))

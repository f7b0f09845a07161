"""Checks before memory is taken: what the headers say is what the model wants."""

from collections.abc import Mapping

import torch

from offplan.errors import CheckpointError
from offplan.runtime.loading.mapping import Target

FLOATS = {"F64", "F32", "F16", "BF16"}
"""Stored types that become the model's own by rounding alone."""


def verify_headers(targets: Mapping[str, Target], state: Mapping[str, torch.Tensor]) -> None:
    """Check stored sizes, shapes and types against ``state`` (the model's, of any device).

    What transformers' operations convert is left to them. Raises CheckpointError naming the first
    tensor that does not fill its place.
    """
    for name, target in targets.items():
        if target.conversion is not None:
            continue
        wanted = state[name]
        _check_size(target, wanted)  # first: a smaller parameter may have nothing to select
        for piece in target.pieces:
            tensor, shape = piece.tensor, tuple(piece.select(wanted).shape)
            if tensor.shape != shape:
                raise CheckpointError(
                    f"{tensor.name} has the shape {tensor.shape}; the model wants {shape}: the "
                    "config is not that of these weights"
                )
            if wanted.is_floating_point() != (tensor.dtype in FLOATS):
                raise CheckpointError(
                    f"{tensor.name} is stored as {tensor.dtype}; the model wants {wanted.dtype}, "
                    "which it cannot be read as: fetch a checkpoint in bf16, f16 or f32"
                )


def _check_size(target: Target, parameter: torch.Tensor) -> None:
    """Raise CheckpointError when the stored tensors are more or less than the parameter."""
    found = sum(piece.tensor.num_elements for piece in target.pieces)
    if found != parameter.numel():
        raise CheckpointError(
            f"{target.name}: found {found} elements in {len(target.pieces)} stored tensors, "
            f"expected {parameter.numel()}, {list(parameter.shape)}; config.json belongs to "
            "another model, or the checkpoint is incomplete"
        )

"""Units and packing leave nothing of a layer out, and nothing twice."""

from collections import Counter

import pytest
from hypothesis import given

from offplan.checkpoint.model import Model
from offplan.held.held import hold
from offplan.held.packing import pack_everything
from offplan.held.unit import group_units
from tests.costs.builders import dense_model, moe_model
from tests.costs.strategies import odd_models
from tests.held import is_packed


@given(odd_models())
def test_units_are_all_of_a_layer(model: Model) -> None:
    for layer in hold(model).layers:
        units = group_units(layer)
        tensors = Counter(tensor.name for unit in units for tensor in unit.tensors)
        assert tensors == Counter(tensor.name for p in layer.parameters for tensor in p.stored)
        assert sum(unit.nbytes for unit in units) == layer.nbytes


@pytest.mark.parametrize("model", [dense_model(), moe_model()], ids=["dense", "experts"])
def test_packed_layers_unpack_to_what_is_stored(model: Model) -> None:
    packed = hold(model, pack_everything(model))
    assert all(any(map(is_packed, layer.parameters)) for layer in packed.layers)
    assert tuple(layer.as_stored for layer in packed.layers) == model.layers
    assert packed.loaded_bytes < hold(model).loaded_bytes

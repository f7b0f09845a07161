"""Weights as operators take them: apart and together again, in every stored form."""

import pytest
import torch

from offplan.runtime.forms import reference
from tests.runtime import coded
from tests.runtime.coded import FORMS, make_parts
from tests.runtime.columns import hold
from tests.runtime.interpreted import need_triton


@pytest.mark.parametrize("name", FORMS)
def test_a_weight_passes_through_an_operators_arguments(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_triton()
    from offplan.runtime.forms import operators, products

    monkeypatch.setattr(coded, "DEVICE", "cpu")
    form, parts = hold(FORMS[name], make_parts(name))
    again, joined = operators._join(*operators._split(form, parts))
    assert again == form
    assert [*joined] == [*parts]
    assert all(joined[part] is parts[part] for part in parts)
    room = products.empty_values(form, parts, torch.bfloat16)
    assert room.shape == reference.expand(form, parts, torch.bfloat16).shape

"""Every store has its figures where its record says."""

from typing import Any

import pytest

from offplan.machine.profile import MachineProfile
from offplan.plan import Prediction
from offplan.stores import HOST, STORES, Store
from tests.costs.builders import make_machine


@pytest.mark.parametrize("store", STORES.values(), ids=STORES)
def test_predictions_and_profiles_have_its_keys(store: Store) -> None:
    assert Prediction.model_fields[store.bytes_key].alias == store.memory
    if store.link is not None:
        assert {store.link.rate, store.link.latency} <= MachineProfile.model_fields.keys()


def test_a_profile_takes_the_link_of_a_store() -> None:
    for store in STORES.values():
        if (link := store.link) is not None:
            rates: dict[str, Any] = {link.rate: 20e9}
            machine = make_machine(**rates)
            linked = machine.with_store(store.name)
            assert (machine.store, linked.store) == (HOST.name, store.name)
            assert linked.with_threads(2).store == store.name
            assert (linked.link, linked.h2d.value) == (link.name, 20e9)
            assert linked != machine

"""A routing profile reads back as it was written, and a damaged one is refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from offplan.errors import InputError
from offplan.plan import ModelRef
from offplan.routing.profile import RoutingProfile, dump_routing, load_routing, make_routing

MODEL = ModelRef(source="org/model", headers_sha256="0" * 64, dtype="bfloat16")


@pytest.fixture
def profile() -> RoutingProfile:
    random = np.random.default_rng(0)
    runs = [random.integers(0, 8, (20, 2, batch, 2)).astype(np.int16) for batch in (4, 3)]
    return make_routing(MODEL, [1, 3], runs, 8)


def test_it_reads_back(profile: RoutingProfile, tmp_path: Path) -> None:
    path = tmp_path / "routing.json"
    path.write_text(dump_routing(profile))
    assert load_routing(path) == profile
    assert load_routing(path).fingerprint == profile.fingerprint


def test_ages_are_optional_and_of_the_profile_s_bands(
    profile: RoutingProfile, tmp_path: Path
) -> None:
    """Profiles of before have none, and keep their fingerprints."""
    data = json.loads(dump_routing(profile))
    for batch in data["batches"]:
        (chosen, there) = np.array(batch["again"]).sum(axis=(0, 1))
        assert chosen == sum(sum(layer["distances"]) for layer in batch["layers"])
        assert chosen <= there <= batch["steps"] * 8 * len(batch["layers"])
    path = tmp_path / "routing.json"
    for wrong, why in (
        (data["batches"][0]["again"][:-1], "has 3 bands of places; expected 4"),
        ([row[1:] for row in data["batches"][0]["again"]], "expected 12 pairs"),
        ([[[2, 1]] * 12] * 4, "more experts were chosen than lay there"),
    ):
        path.write_text(json.dumps({**data, "batches": [{**data["batches"][0], "again": wrong}]}))
        with pytest.raises(InputError, match=why):
            load_routing(path)
    for batch in (*data["batches"], *data["passes"]):
        del batch["again"]
    path.write_text(json.dumps(data))
    before = load_routing(path)
    assert before.batches[0].again is None
    assert "again" not in dump_routing(before)


def test_batches_are_powers_of_two_and_the_largest(profile: RoutingProfile) -> None:
    assert [each.batch for each in profile.batches] == [1, 2, 4]
    # a run of 4 sequences has two pairs, one of 3 has one and a rest
    assert [each.steps for each in profile.batches] == [7 * 20, 3 * 20, 20]
    assert profile.tokens == 7 * 20
    runs = [np.zeros((5, 1, 3, 2), np.int16)]
    assert [each.batch for each in make_routing(MODEL, [0], runs, 8).batches] == [1, 2, 3]


def test_hits_grow_to_all_that_was_used_before(profile: RoutingProfile) -> None:
    for each in profile.batches:
        rates = [each.hit_rate(size) for size in range(9)]
        assert rates == sorted(rates)
        assert rates[0] == 0
        first_uses = sum(layer.first_uses for layer in each.layers)
        assert rates[8] == pytest.approx(1 - first_uses / (each.touched * each.steps * 2))
    assert profile.batches[0].touched < profile.batches[1].touched < profile.batches[2].touched


def test_a_batch_that_was_not_recorded_is_refused(profile: RoutingProfile) -> None:
    assert profile.of_batch(4) is profile.batches[2]
    with pytest.raises(InputError, match="has batches of 1, 2, 4 and none of 8"):
        profile.of_batch(8)


def test_no_step_is_no_profile() -> None:
    with pytest.raises(InputError, match="raise `num_tokens`"):
        make_routing(MODEL, [1], [], 8)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda d: d.update(offplan_routing=3), "offplan_routing"),
        (lambda d: d.update(offplan_routing=1), "a profile of version 1 has none"),
        (lambda d: d["passes"].reverse(), "in ascending order"),
        (lambda d: d["batches"][0].update(tokens=2), "found tokens, which passes alone have"),
        (lambda d: d["passes"][0].update(tokens=1), "2 tokens or more"),
        (
            lambda d: d["passes"][2]["layers"][0].update(distances=[14] * 8),
            "layer 1 of passes of 8 tokens",
        ),
        (lambda d: d["batches"].reverse(), "not in ascending order"),
        (lambda d: d["batches"][1]["layers"].pop(), "batch 2 has other layers"),
        (lambda d: d["batches"][0]["layers"][0]["distances"].pop(), "has 7 distances; expected 8"),
        (lambda d: d["batches"][0]["layers"][0].update(first_uses=-1), "first_uses"),
        (
            lambda d: d["batches"][0]["layers"][0].update(distances=[0] * 8, first_uses=0),
            "chose 0 experts in 140 steps",
        ),
        (lambda d: d.update(num_experts_per_token=9), "a token chooses 9 of 8 experts"),
        (lambda d: d.update(tokens=139), "140 steps of 1 tokens, and 139 tokens were recorded"),
        (
            lambda d: d["batches"][0]["layers"][1].update(distances=[200] + [0] * 7),
            "layer 3 of batch 1 chose one place of the order of use 200 times in 140 steps",
        ),
        (
            lambda d: d["batches"][0]["layers"][1].update(distances=[140] * 8),
            "in 140 steps, expected 140 to 280: a step chooses 2 distinct ones at most",
        ),
        (
            lambda d: d["batches"][0]["layers"][0].update(first_uses=3),
            "chose an expert behind 7 others, and 3 first uses were counted",
        ),
        (lambda d: d.update(batches=[]), "batches"),
        (lambda d: d.pop("model"), "model: it is missing"),
        (lambda d: d.update(texts=["secret"]), "there is no such key"),
    ],
)
def test_a_damaged_file_is_refused(
    profile: RoutingProfile, tmp_path: Path, change: object, why: str
) -> None:
    path = tmp_path / "routing.json"
    data = json.loads(dump_routing(profile))
    assert callable(change)
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(InputError, match=why):
        load_routing(path)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "3"])
def test_what_is_no_profile_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "routing.json"
    path.write_text(text)
    with pytest.raises(InputError, match="routing"):
        load_routing(path)


def test_no_caches_miss_less_than_the_best_sizes(profile: RoutingProfile) -> None:
    for each in profile.batches:
        chosen = each.touched * len(each.layers)
        assert each.least_missed(0) == pytest.approx(chosen)
        assert each.least_missed(8 * len(each.layers)) == pytest.approx(0)
        for size in range(9):
            missed = chosen * (1 - each.hit_rate(size))
            assert each.least_missed(size * len(each.layers)) <= missed + 1e-9


def test_a_profile_of_another_version_is_refused(profile: RoutingProfile, tmp_path: Path) -> None:
    path = tmp_path / "routing.json"
    path.write_text(dump_routing(profile).replace('"offplan_routing": 2', '"offplan_routing": 7'))
    with pytest.raises(InputError, match=r"of version 7: offplan_routing is 1 .* record it again"):
        load_routing(path)


def test_a_profile_of_before_has_no_passes_and_keeps_its_fingerprint(
    profile: RoutingProfile, tmp_path: Path
) -> None:
    data = json.loads(dump_routing(profile))
    data["offplan_routing"] = 1
    del data["passes"]
    path = tmp_path / "routing.json"
    path.write_text(json.dumps(data))
    before = load_routing(path)
    assert before.batches == profile.batches
    assert before.find(1, 4) is None
    assert "passes" not in dump_routing(before)
    assert dump_routing(before).startswith('{"offplan_routing": 1, ')


def test_passes_are_of_consecutive_tokens_of_one_text() -> None:
    """Two texts of one layer: every token chooses experts 0 and 1, or all in turn."""
    same, turns = np.tile([0, 1], (16, 1)), np.arange(32).reshape(16, 2) % 8
    run = np.stack([same, turns], axis=1)[:, None].astype(np.int16)
    made = make_routing(MODEL, [0], [run], 8)
    assert [(each.batch, each.tokens) for each in made.passes] == [(1, 2), (1, 4), (1, 8)]
    assert [each.steps for each in made.passes] == [2 * 8, 2 * 4, 2 * 2]
    # 2 distinct experts of the one text, and of the other twice as many a token
    assert [each.touched for each in made.passes] == [(2 + 4) / 2, (2 + 8) / 2, (2 + 8) / 2]
    assert made.find(1, 2) is made.passes[0]
    short = make_routing(MODEL, [0], [run[:3]], 8)
    assert [each.tokens for each in short.passes] == [2]

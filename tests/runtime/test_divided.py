"""Kept experts of which cores and link divide those missed, on the CPU."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from offplan.backends import Backend
from offplan.capabilities.cached_experts import MissRates
from offplan.errors import OffplanError
from offplan.plan import Rule
from offplan.runtime.cached_experts import executor
from offplan.runtime.cached_experts import experts as cached
from offplan.runtime.cached_experts.executor import CachedExperts
from offplan.runtime.cached_experts.rates import Found
from offplan.runtime.host_cores.executor import ExpertsTask, HostCores
from offplan.runtime.host_cores.handover import Handover
from offplan.runtime.host_cores.server import ByCores
from offplan.runtime.rows import Rows
from offplan.runtime.session import Session
from tests.hostcores.cores import require_cores
from tests.runtime.cached import Abort, cached_of, count_experts, keeping, prompts, run_hostile
from tests.runtime.divided import dividing, run_beside_lists, save, sharing, wide
from tests.runtime.families import MOST_ROUNDING
from tests.runtime.fed import run_fed, run_in_float32, typical_error
from tests.runtime.plans import compiled_layers, group, offload, open_session
from tests.runtime.quantise import save_stored
from tests.runtime.stream import AtOnce
from tests.tiers import each_value_once, others_in_sweep

require_cores()

CASES = [("qwen3_moe", form) for form in ("values", "fp8_block", "int4", "nvfp4")]
CASES += [("gpt_oss", "mxfp4"), ("deepseek_v3", "fp8_block")]
"""Families and forms; in CI half of them have whole experts divided, the others split ones."""


@pytest.fixture(autouse=True)
def halves() -> Iterator[None]:
    """Half of what is missed is the cores', where a test says nothing else."""
    with sharing(0.5):
        yield


@pytest.mark.slow
@pytest.mark.parametrize(("family", "form"), others_in_sweep(CASES, CASES[1::2]))
def test_logits_are_as_near_to_float32(family: str, form: str, tmp_path: Path) -> None:
    stored, plain = save(family, form, tmp_path)
    exact = run_in_float32(plain)
    own = typical_error(run_fed(stored, offload()), exact)
    for num, share, prefill in ((1, 1.0, "prefetch"), (2, 0.5, "uva"), (3, 0.3, "prefetch")):
        rule = dividing(num, prefill, later=num - 1)
        with sharing(share):
            made = run_fed(stored, offload(rule, prefill_chunk=3))
        assert typical_error(made, exact) < MOST_ROUNDING * own, share


@pytest.mark.slow
@pytest.mark.parametrize(("family", "form"), others_in_sweep(CASES, CASES[::2]))
def test_logits_of_a_split_expert_are_as_near(family: str, form: str, tmp_path: Path) -> None:
    stored, plain = save(family, form, tmp_path, **wide(family))
    exact = run_in_float32(plain)
    own = typical_error(run_fed(stored, offload()), exact)
    for num, share, prefill in ((2, 0.5, "uva"), (3, 0.3, "prefetch")):
        rule = dividing(num, prefill, later=num - 1.5)
        with sharing(share):
            made = run_fed(stored, offload(rule, prefill_chunk=3))
        assert typical_error(made, exact) < MOST_ROUNDING * own, share


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    into, config = (
        tmp_path_factory.mktemp("divided"),
        {"num_local_experts": 8, "num_hidden_layers": 4},
    )
    return save("qwen3_moe", "values", into, **config)[0]


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    into, config = tmp_path_factory.mktemp("wide"), {"num_local_experts": 8, "num_hidden_layers": 4}
    return save("qwen3_moe", "values", into, **config, **wide("qwen3_moe"))[0]


@pytest.mark.parametrize(
    ("share", "prefill", "later"),
    each_value_once(
        product(
            [(1, 0.6), (2, 0.6), (2, 1.0), (3, 0.7), (5, 0.4)],
            ["prefetch", "uva"],
            [None, 0.4, 8.0],
        )
    ),
)
@pytest.mark.slow
def test_counts_are_those_of_a_list(
    folder: Path, share: tuple[int, float], prefill: str, later: float | None
) -> None:
    """``share`` is a number of slots, and the part of what is missed that the cores multiply."""
    num, part = share
    decision = offload(dividing(num, prefill, later=later), prefill_chunk=7)
    with sharing(part), open_session(folder, decision) as session:
        session.warm_up(1, 7)
        cached_of(session).invalidate()
        run_beside_lists(session, part)
        found = session.count(36)["cached_experts"]
        assert found is not None
        assert 0 < found.by_cores <= found.misses
        assert part < 1 or found.by_cores == found.misses
        # one slot has what the link brings now
        assert bool(found.later) == (later is not None and num > 1)


@pytest.mark.parametrize(
    ("num", "share"), others_in_sweep([(3, 0.5), (3, 0.34), (5, 0.7)], [(3, 0.34)])
)
@pytest.mark.parametrize("later", [None, 0.8])
@pytest.mark.slow
def test_counts_of_split_experts_are_those_of_a_list(
    wide_folder: Path, num: int, share: float, later: float | None
) -> None:
    decision = offload(dividing(num, later=later), prefill_chunk=7)
    with sharing(share), open_session(wide_folder, decision) as session:
        session.warm_up(1, 7)
        cached_of(session).invalidate()
        run_beside_lists(session, share)
        counts = count_experts(session).values()
        assert all(found.split for found in counts)
        assert any(found.later for found in counts) == bool(later)


@pytest.mark.slow
def test_the_same_bits_for_the_same_history(folder: Path) -> None:
    """With aborted prompts and steps between."""
    runs = []
    for _ in range(2):
        decision = offload(dividing(3, later=0.7), prefill_chunk=7)
        with open_session(folder, decision) as session:
            runs.append(run_hostile(session))
            counts = count_experts(session).values()
            assert all(c.hits and c.by_cores for c in counts)
            assert any(c.copied for c in counts)
            assert any(c.later for c in counts)
    assert all(map(torch.equal, *runs))


@pytest.mark.slow
def test_an_aborted_pass_leaves_slots_empty(folder: Path) -> None:
    """What then comes is what a session makes that has seen nothing else."""
    decision = offload(dividing(2, later=1.0), prefill_chunk=7)
    with open_session(folder, decision) as session:
        run_hostile(session)
        cached_of(session).invalidate()
        got = [session.prefill(prompts(3)[0]).clone()]
        got += [session.decode(torch.tensor([[token]])).clone() for token in (3, 9, 9, 4)]
    with open_session(folder, decision) as session:
        expected = [session.prefill(prompts(3)[0]).clone()]
        expected += [session.decode(torch.tensor([[token]])).clone() for token in (3, 9, 9, 4)]
    assert all(map(torch.equal, got, expected))


@pytest.mark.slow
def test_what_another_expert_left_in_the_last_slot_is_not_seen(wide_folder: Path) -> None:
    """Of a split expert some columns are not copied there; infinite ones times zero are NaN."""
    made = []
    for left in (0.0, torch.inf):
        with open_session(wide_folder, offload(dividing(2, later=0.3))) as session:
            logits = session.prefill(prompts(0)[0])
            for layer in cached_of(session).layers.values():
                for slots in layer.slots.values():
                    slots[-1].fill_(left)
            made.append(session.decode(logits.argmax(-1, keepdim=True)).clone())
            assert any(found.split for found in count_experts(session).values())
    assert torch.equal(*made)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[AtOnce]:
    """A GPU's stream that products are handed over in, simulated."""
    made: list[Handover] = []
    at_once = AtOnce()

    def serve(device: torch.device) -> ByCores:
        server = ByCores(device)
        server._handover = Handover(device, at_once)
        made.append(server._handover)
        return server

    monkeypatch.setattr(HostCores, "servers", {Backend.HOST: serve})
    yield at_once
    for handover in made:
        handover.close()


def note(stream: AtOnce, name: str, at: str, monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    """Have the stream see when a function is called."""
    own = getattr(module, at)

    def call(*arguments: Any) -> Any:
        stream.seen.append(name)
        return own(*arguments)

    monkeypatch.setattr(module, at, call)


@pytest.mark.slow
def test_the_bell_rings_before_the_copies(
    folder: Path, stream: AtOnce, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the stream waits for the answer once the device has multiplied what is in slots."""
    note(stream, "copy", "copy_missed", monkeypatch, cached)
    note(stream, "multiply", "forward_stored", monkeypatch, cached)
    with open_session(folder, offload(dividing(2), prefill_chunk=7)) as session:
        logits = session.prefill(prompts(0)[0])
        session.decode(logits.argmax(-1, keepdim=True))
        stream.seen.clear()
        session.decode(logits.argmax(-1, keepdim=True))
        num_layers = len(cached_of(session).layers)
    assert stream.seen == ["write", "copy", "multiply", "wait"] * num_layers


BY_CORES = ["write", "wait"]
"""A product that the stream waits for before anything else."""


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (dividing(2), ["write", "multiply", "shared", "wait"] * 3),
        # the prompt leaves the last layer in the ring
        (group(1, 1, "experts", decode="host"), [*["write", "shared", "wait"] * 2, "shared"]),
        # the first layer is dense; products of the cores use the same memory, one after the other
        (
            group(1, 1, "mlp", decode="host"),
            [*BY_CORES * 3, *[*BY_CORES, "shared", *BY_CORES * 3] * 2, "shared"],
        ),
    ],
)
@pytest.mark.slow
def test_shared_experts_are_multiplied_before_the_wait(
    rule: Rule,
    expected: list[str],
    stream: AtOnce,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    checkpoint, _ = save("deepseek_v3", "fp8_block", tmp_path)
    note(stream, "multiply", "forward_stored", monkeypatch, cached)
    with open_session(checkpoint, offload(rule, prefill_chunk=7, prefetch_step=1)) as session:
        for each in session.loaded.module.modules():
            if hasattr(each, "shared_experts"):
                note(stream, "shared", "forward", monkeypatch, each.shared_experts)
        logits = session.prefill(prompts(0)[0])
        # the first step behind an aborted pass, or behind none, waits for what that may have begun
        logits = session.decode(logits.argmax(-1, keepdim=True))
        stream.seen.clear()
        session.decode(logits.argmax(-1, keepdim=True))
    assert stream.seen == expected


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_another_batch_begins_behind_a_step(family: str, tmp_path: Path) -> None:
    """Its cache is allocated while the parameters are those of a step."""
    checkpoint, _ = save(family, "fp8_block", tmp_path)
    decision = offload(dividing(2), prefill_chunk=7)

    def run(session: Session, batch: int) -> list[torch.Tensor]:
        cached_of(session).invalidate()
        made = [session.prefill(torch.arange(6 * batch).view(batch, 6)).clone()]
        made += [session.decode(torch.full((batch, 1), token)).clone() for token in (3, 9)]
        return made

    with open_session(checkpoint, decision) as session:
        first, second, again = (run(session, batch) for batch in (1, 2, 1))
    with open_session(checkpoint, decision) as session:
        expected = run(session, 2)
    assert all(map(torch.equal, second, expected))
    assert all(map(torch.equal, first, again))


@pytest.mark.slow
def test_a_hand_over_gives_the_same(
    folder: Path, stream: AtOnce, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a step that ended while the cores computed for it."""
    decision = offload(dividing(2), prefill_chunk=7)
    with open_session(folder, decision) as session:
        handed = run_hostile(session)
        session.prefill(prompts(2)[0])
        stream.seen.clear()
        with monkeypatch.context() as patched:
            patched.setattr(Handover, "end", abort)
            with pytest.raises(Abort):
                session.decode(torch.tensor([[3]]))
        assert stream.seen == ["write"]
        again = run_hostile(session)
        assert stream.seen[1] == "wait"
        session.check()
    monkeypatch.setattr(HostCores, "servers", {Backend.HOST: ByCores})
    with open_session(folder, decision) as session:
        expected = run_hostile(session)
    assert all(map(torch.equal, handed, expected))
    assert all(map(torch.equal, again, expected))


def abort(*_: object) -> torch.Tensor:
    raise Abort


@pytest.mark.slow
@pytest.mark.parametrize("family", others_in_sweep(["qwen3_moe", "deepseek_v3"], ["qwen3_moe"]))
def test_compiled_layers_run_no_code_of_others(
    folder: Path, family: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Layers that are divided, that keep experts and that are resident share what was compiled."""
    decision = offload(dividing(2, every=3), keeping(2, every=2), prefill_chunk=7)
    config = {"n_routed_experts": 8, "num_hidden_layers": 4, "first_k_dense_replace": 0}
    other = family == "deepseek_v3"
    checkpoint = save(family, "values", tmp_path, **config)[0] if other else folder

    def run() -> tuple[list[torch.Tensor], dict[int, Any]]:
        with open_session(checkpoint, decision) as session:
            made = [session.prefill(prompts(0)[0]).clone()]
            made += [session.decode(torch.tensor([[token]])).clone() for token in range(20)]
            return made, count_experts(session)

    logits, counts = run()
    # on a GPU it is called within an operator
    monkeypatch.setattr(ExpertsTask, "begin", torch.compiler.disable(ExpertsTask.begin))
    with compiled_layers():
        got, found = run()
    assert all(map(torch.equal, got, logits))
    assert found == counts
    assert sorted(bool(each.by_cores) for each in found.values()) == [False, False, True]


@pytest.mark.slow
def test_texts_that_join_and_leave(folder: Path) -> None:
    """The same bits each time, with rows of the batch that have no text."""

    def run() -> list[torch.Tensor]:
        with open_session(folder, offload(dividing(2), prefill_chunk=4)) as session:
            rows = Rows(session, 2)
            first = rows.join([1, 2, 3, 4, 5, 6, 7, 8, 9])
            made = [first.logits.clone()]
            made += [rows.step({first.row: token})[first.row].clone() for token in (3, 4)]
            second = rows.join([7, 3])
            made.append(second.logits.clone())
            made += [each.clone() for each in rows.step({first.row: 1, second.row: 2}).values()]
            rows.leave(first.row)
            made.append(rows.step({second.row: 6})[second.row].clone())
            assert any(found.by_cores for found in count_experts(session).values())
            return made

    assert all(map(torch.equal, run(), run()))


@pytest.mark.slow
def test_rates_that_others_disturbed_are_said_and_measured_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a later prompt: until then steps are divided by the disturbed ones."""
    disturbed = Found(MissRates(1.0, 1.0, 1e-6), "measured while others took 1.6 of 2 cores")
    found = [disturbed, disturbed, Found(MissRates(0.0, 1e-6, 1.0), None)]
    done = []
    monkeypatch.setattr(ByCores, "drain", lambda server: done.append("waited"))

    def find_rates(*_: object) -> Found:
        done.append("measured")
        return found.pop(0)

    monkeypatch.setattr(executor, "find_rates", find_rates)
    monkeypatch.setattr(executor, "name_question", lambda *_: {})
    monkeypatch.setattr(CachedExperts, "given_rates", None)
    monkeypatch.setattr(CachedExperts, "is_timed", True)  # as on a GPU
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    prompt = torch.arange(8)[None]
    decision = offload(dividing(3), prefetch_step=1)
    with open_session(folder, decision) as session, session.stream():

        def shares() -> list[int]:
            table = next(iter(cached_of(session).layers.values())).table
            assert table.shares is not None
            return [share & 0xFFFF for share in table.shares.tolist()]

        for seconds, num_left in (0.0, 2), (0.5, 2), (1.5, 1), (4.0, 0):
            now, says = seconds, num_left > 0
            done.clear()
            session.prefill(prompt)
            (said,) = session.describe()
            told = " These times were measured while others took 1.6 of 2 cores, and are not kept."
            assert said.endswith(told) == says
            assert any(shares()) == (not says)
            assert len(found) == num_left
            # steps may be under way, whose exchange a measurement would overwrite
            assert seconds < 1 or (done[0], done[-1]) == ("waited", "measured")


@pytest.mark.slow
def test_no_share_is_the_link_alone(folder: Path) -> None:
    logits = []
    for rule in (dividing(2, later=1.0), keeping(2, every=1)):
        with sharing(0.0), open_session(folder, offload(rule, prefill_chunk=7)) as session:
            logits.append(run_hostile(session))
            counts = count_experts(session).values()
            assert not any(found.by_cores or found.later for found in counts)
    assert all(map(torch.equal, *logits))


@pytest.mark.slow
def test_some_layers_are_divided_beside_others(tmp_path: Path) -> None:
    """Layers with slots that are divided, and that are not, and the cores' own, in one model."""
    stored, plain = save("qwen3_moe", "fp8_block", tmp_path, num_hidden_layers=4)
    exact = run_in_float32(plain)
    own = typical_error(run_fed(stored, offload()), exact)
    rules = [dividing(2, every=4), keeping(2, every=3)]
    rules.append(
        Rule.model_validate(
            keeping(2, every=1).model_dump(mode="json")
            | {
                "decode": "host",
                "cached_experts": None,
            }
        )
    )
    assert typical_error(run_fed(stored, offload(*rules)), exact) < MOST_ROUNDING * own


def test_what_the_cores_cannot_multiply_is_refused(tmp_path: Path) -> None:
    stored, _ = save_stored("qwen3_moe", "fp8_block", tmp_path / "wide")
    with pytest.raises(OffplanError, match="computes in bfloat16, found a model in float32"):
        open_session(stored, offload(dividing(2)))
    with pytest.raises(ValueError, match=r"rule 1 has cached_experts.*expected `store: host`"):
        offload(dividing(2), store="peer")

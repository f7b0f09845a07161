"""Kept experts of which cores and link divide those missed, on a GPU: captured, and replayed."""

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from offplan.backends import Backend
from offplan.errors import OffplanError
from offplan.hostmem.busy import Watch
from offplan.plan import Offload, Rule
from offplan.runtime.cached_experts.expert_table import SEQUENCE
from offplan.runtime.host_cores.handover import Handover
from offplan.runtime.host_cores.server import ByCores
from offplan.runtime.session import Session
from tests.hostcores.cores import require_cores
from tests.runtime.cached import Abort, abort_in, cached_of, count_experts, keeping, prompts
from tests.runtime.divided import check_contents, dividing, run_beside_lists, save, sharing, wide
from tests.runtime.plans import offload, open_session

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

require_cores()

CASES = [("qwen3_moe", "values"), ("qwen3_moe", "fp8_block"), ("gpt_oss", "mxfp4")]
CASES.append(("deepseek_v3", "fp8_block"))
"""Of these the last has shared experts."""
RULES = [dividing(1), dividing(2, "uva", later=0.7), dividing(3, later=8), dividing(2, every=2)]
NUM_STEPS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("divided")


@pytest.fixture(autouse=True)
def halves(request: pytest.FixtureRequest) -> Iterator[None]:
    """More than half of what is missed is the cores', where rates are not what is tested."""
    if "rates" in request.function.__name__:
        yield
        return
    with sharing(0.6):
        yield


@functools.cache
def saved(folder: Path, family: str, form: str) -> Path:
    into = folder / f"{family}-{form}"
    into.mkdir()
    return save(family, form, into, **({"num_local_experts": 8} if family == "qwen3_moe" else {}))[
        0
    ]


@functools.cache
def saved_wide(folder: Path, family: str, form: str) -> Path:
    into = folder / f"wide-{family}-{form}"
    into.mkdir()
    config = {"num_local_experts": 8} if family == "qwen3_moe" else {}
    return save(family, form, into, **config, **wide(family))[0]


def run_history(session: Session) -> torch.Tensor:
    """Logits of all steps behind prompts of several batches, of the same tokens whatever is made.

    Of each batch the first steps run uncaptured, the others are replayed.
    """
    made = []
    with session.stream():
        for number, prompt in enumerate(prompts(0)):
            fed = torch.Generator().manual_seed(number)
            session.prefill(prompt)
            for _ in range(NUM_STEPS):
                tokens = torch.randint(0, 64, (len(prompt), 1), generator=fed)
                made.append(session.decode(tokens.to(session.device)).clone())
        made = [each.float().cpu() for each in made]
    session.check()
    return torch.cat(made)


def decide(*rules: Rule) -> Offload:
    return offload(*rules, prefill_chunk=7)


@functools.cache
def run_resident(checkpoint: Path) -> torch.Tensor:
    with open_session(checkpoint, decide(), "cuda") as session:
        return run_history(session)


def require_near(made: torch.Tensor, resident: torch.Tensor) -> None:
    """A token may be sent to other experts by what is rounded before them: the median is near."""
    assert made.isfinite().all()
    assert (made - resident).abs().mean(-1).median() < 0.05 * resident.std()


@pytest.mark.parametrize("rule", RULES, ids=["1", "2, in place", "3", "2 of every second layer"])
@pytest.mark.parametrize(("family", "form"), CASES)
def test_logits_are_near_resident_ones(folder: Path, family: str, form: str, rule: Rule) -> None:
    checkpoint = saved(folder, family, form)
    with open_session(checkpoint, decide(rule), "cuda") as session:
        made = run_history(session)
        counts = count_experts(session).values()
        assert any(found.hits for found in counts)
        assert any(found.by_cores for found in counts)
        # where a step misses one expert, the cores have it, and the link brings it later
        assert rule.cached_experts == 1 or any(found.copied or found.later for found in counts)
        assert any(found.later for found in counts) == bool(rule.later_experts)
    require_near(made, run_resident(checkpoint))


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize(("family", "form"), [*CASES, ("qwen3_moe", "int4")])
def test_logits_of_a_split_expert_are_near(
    folder: Path, family: str, form: str, capture: bool
) -> None:
    """The rest of it is read from the last slot, beside what an older one has left there."""
    checkpoint = saved_wide(folder, family, form)
    rule = dividing(2, later=0.5)
    with open_session(checkpoint, decide(rule), "cuda", capture=capture) as session:
        made = run_history(session)
        assert any(found.split for found in count_experts(session).values())
    require_near(made, run_resident(checkpoint))


def test_the_same_bits_and_counts_for_the_same_history(folder: Path) -> None:
    """Three times: of two sessions the first goes on after a pass that was aborted."""
    checkpoint = saved(folder, "qwen3_moe", "values")
    runs, counts = [], []
    for num_runs in (2, 1):
        with open_session(checkpoint, decide(RULES[1]), "cuda") as session:
            for _ in range(num_runs):
                session.warm_up(1, 10)
                with session.stream():
                    abort_in(session, 1)
                    with pytest.raises(Abort):
                        session.prefill(prompts(0)[1])
                runs.append(run_history(session))
                counts.append(count_experts(session))
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])
    assert counts[0] == counts[1] == counts[2]


@pytest.mark.parametrize(
    ("share", "splits"), [(0.3, False), (0.5, False), (1.0, False), (0.5, True)]
)
@pytest.mark.parametrize("later", [None, 0.6, 8.0])
def test_counts_are_those_of_a_list(
    folder: Path, share: float, splits: bool, later: float | None
) -> None:
    decision = decide(dividing(3, later=later))
    checkpoint = (saved_wide if splits else saved)(folder, "qwen3_moe", "fp8_block")
    with (
        sharing(share),
        open_session(checkpoint, decision, "cuda", capture=False) as session,
        session.stream(),
    ):
        session.warm_up(1, 7)
        cached_of(session).invalidate()
        run_beside_lists(session, share)


def test_counts_of_captured_steps_are_those_of_uncaptured_ones(folder: Path) -> None:
    """Copies that captured steps wait for run on a stream of the host's own."""
    checkpoint, counts, runs = saved(folder, "qwen3_moe", "values"), [], []
    for capture in (False, True):
        decision = decide(dividing(3, later=2.5))
        # one session's own rates would divide other experts than another's
        with (
            sharing(0.5),
            open_session(checkpoint, decision, "cuda", capture=capture) as session,
        ):
            session.warm_up(1, 10)
            runs.append(run_history(session))
            counts.append(count_experts(session))
            server = session.loaded.store.servers[Backend.HOST]
            assert isinstance(server, ByCores)
            spent, num_later = server.count(), sum(each.later for each in counts[-1].values())
            layers = cached_of(session).layers.values()
            assert spent is not None
            assert num_later > 0
            assert spent.queued_bytes >= num_later * min(each.of.expert_bytes for each in layers)
            with session.stream():
                cached_of(session)._drain()
                check_contents(session)
    # a captured prompt's settle comes at the same places. What is compiled rounds otherwise, which
    # sends a few tokens to other experts: steps meet as many, and about as many are found
    for index, found in counts[0].items():
        other = counts[1][index]
        assert abs(found.from_prompts - other.from_prompts) <= 2
        assert abs(found.hits - other.hits) <= 0.1 * found.hits
        assert abs(found.later - other.later) <= 2
    require_near(runs[1], runs[0])


def test_an_abort_with_copies_under_way(folder: Path) -> None:
    checkpoint = saved(folder, "qwen3_moe", "values")
    decision = decide(dividing(3, later=8))
    with open_session(checkpoint, decision, "cuda", capture=False) as session:
        expected = run_history(session)
    with open_session(checkpoint, decision, "cuda", capture=False) as session:
        with session.stream():
            session.prefill(prompts(0)[0])
            for token in (3, 9, 31):
                session.decode(torch.tensor([[token]], device="cuda"))
            abort_in(session, 1)
            with pytest.raises(Abort):
                session.decode(torch.tensor([[22]], device="cuda"))
            check_contents(session)
        assert torch.equal(run_history(session), expected)


def test_copies_that_do_not_come_are_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup gives them up, and the session's tokens are called wrong."""
    from offplan.runtime.cached_experts import table_kernels

    monkeypatch.setattr(table_kernels, "MOST_POLLS", 1000)
    checkpoint = saved(folder, "qwen3_moe", "values")
    decision = decide(dividing(3, later=8))
    with open_session(checkpoint, decision, "cuda", capture=False) as session:
        with session.stream():
            session.prefill(prompts(0)[0])
            for layer in cached_of(session).layers.values():
                layer.table.number(SEQUENCE).add_(1)  # of a list that nobody was given
            session.decode(torch.tensor([[3]], device="cuda"))
        torch.cuda.synchronize()
        with pytest.raises(OffplanError, match="did not come in time"):
            session.check()


def test_rates_are_measured_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path))
    monkeypatch.setattr(Watch, "why", None)  # as on an idle machine: disturbed rates are not kept
    found = []
    for _ in range(2):
        with open_session(
            saved(folder, "qwen3_moe", "values"), decide(RULES[1]), "cuda"
        ) as session:
            run_history(session)
            (said,) = session.describe()
            assert said.startswith("Of the experts that a layer misses")
            found.append([layer.rates for layer in cached_of(session).layers.values()])
    assert found[0] == found[1]
    for rates in found[0]:
        assert rates is not None
        assert 0 < rates.cores_s < 1e-2
        assert 0 < rates.link_s < 1e-2


def test_a_step_that_is_aborted_between_begin_and_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cores may still compute for it when the next product is begun."""
    checkpoint = saved(folder, "qwen3_moe", "fp8_block")
    with open_session(checkpoint, decide(RULES[1]), "cuda", capture=False) as session:
        expected = run_history(session)
    with open_session(checkpoint, decide(RULES[1]), "cuda", capture=False) as session:
        with session.stream():
            session.prefill(prompts(0)[0])
            with monkeypatch.context() as patched:
                patched.setattr(Handover, "end", _abort)
                with pytest.raises(Abort):
                    session.decode(torch.tensor([[3]], device="cuda"))
        require_near(run_history(session), expected)


def _abort(*_: object) -> torch.Tensor:
    raise Abort


def test_a_host_function_gives_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = saved(folder, "gpt_oss", "mxfp4")

    def run() -> torch.Tensor:
        with open_session(checkpoint, decide(RULES[1]), "cuda") as session:
            return run_history(session)

    expected = run()
    monkeypatch.setattr(Handover, "_can_wait", lambda self: False)
    assert torch.equal(run(), expected)


@pytest.mark.parametrize("capture", [False, True])
def test_no_share_is_the_link_alone(folder: Path, capture: bool) -> None:
    """Bit for bit what kept experts give without the cores, and near where steps are compiled.

    What is compiled rounds the sum of the experts where the cores' is added to it, and not before.
    """
    checkpoint, logits = saved(folder, "qwen3_moe", "fp8_block"), []
    for rule in (dividing(2, later=1.0), keeping(2, every=1)):
        with (
            sharing(0.0),
            open_session(checkpoint, decide(rule), "cuda", capture=capture) as session,
        ):
            logits.append(run_history(session))
    if capture:
        require_near(*logits)
    else:
        assert torch.equal(*logits)

"""Sessions whose decode steps the host's cores compute, on the CPU."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from offplan.backends import Backend
from offplan.checkpoint.open import open_model
from offplan.errors import OffplanError, PlanError
from offplan.forms.form import Component
from offplan.plan import Rule
from offplan.runtime.host_cores.executor import ByCoresModule, HostCores, task_of
from offplan.runtime.host_cores.handover import Handover
from offplan.runtime.host_cores.server import ByCores
from offplan.runtime.session import Session
from tests.hostcores.cores import require_cores
from tests.runtime.families import MOST_ROUNDING
from tests.runtime.fed import BATCH, FED, run_fed, run_in_float32, typical_error
from tests.runtime.plans import group, offload, open_session
from tests.runtime.quantise import FORMS, save_stored
from tests.runtime.stream import AtOnce
from tests.tiers import others_in_sweep

require_cores()

REFUSED = ("int8", "int8_zeros", "int8_bytes_zeros", "mxfp8", "mxfp8_modelopt")
COMPUTED = [form for form in FORMS if form not in REFUSED]
CASES = [("qwen3", form) for form in COMPUTED] + [
    ("qwen3_moe", "fp8_block"),
    ("qwen3_moe", "int4"),
    ("qwen3_moe", "nvfp4"),
    ("qwen3_moe", "gptq8_v2"),  # with an index that says what is so anyway
    ("gpt_oss", "mxfp4"),
    ("deepseek_v3", "fp8_block"),
]
RULES = {
    "the MLP": group(1, 1, "mlp", decode="host"),
    "attention, read in place by the prompt": group(
        2, 1, "self_attn", prefill="uva", decode="host"
    ),
    "all": group(1, 1, prefill="uva", decode="host"),
}
ALL_RULES = ("fp8_block", "int4", "nvfp4", "mxfp4")
"""Forms that run by each rule; which layers the cores compute is the same for further ones."""
KERNELS = ("int8_bytes", "gptq", "awq", "mxfp4_rows", "bnb8")
"""Forms beside those that the cores' kernels read each in a way of its own."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "form"),
    others_in_sweep(CASES, [case for case in CASES if case[1] in (*ALL_RULES, *KERNELS)]),
)
def test_logits_are_as_near_to_float32(family: str, form: str, tmp_path: Path) -> None:
    stored, plain = save_stored(family, form, tmp_path, dtype=torch.bfloat16)
    exact = run_in_float32(plain)
    own = typical_error(run_fed(stored, offload()), exact)
    for name in RULES if form in ALL_RULES else ["all"]:
        rule = RULES[name]
        made = run_fed(stored, offload(rule, prefetch_step=1))
        assert typical_error(made, exact) < MOST_ROUNDING * own, name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_stored("qwen3_moe", "fp8_block", tmp_path, torch.bfloat16, num_hidden_layers=3)[0]


@pytest.mark.slow
def test_a_layer_that_the_prompt_left_in_the_ring_is_not_for_the_cores(folder: Path) -> None:
    decision = offload(group(1, 1, "experts", decode="host"), prefetch_step=2)
    with open_session(folder, decision) as session, session.stream():
        loaded = session.loaded
        given = [part for part in loaded.module.modules() if isinstance(part, ByCoresModule)]
        assert len(given) == 1  # of three layers two are in the ring
        session.prefill(BATCH)
        assert given[0].cores is None
        session.decode(FED[0][:, None])
        assert given[0].cores is not None


@pytest.mark.slow
def test_the_same_bits_each_time(folder: Path) -> None:
    decision = offload(group(1, 1, "mlp", decode="host"), prefetch_step=1)
    assert torch.equal(run_fed(folder, decision), run_fed(folder, decision))


@pytest.mark.slow
def test_two_sessions_beside_one_another(folder: Path) -> None:
    decision = offload(group(1, 1, "mlp", decode="host"), prefetch_step=1)
    expected = run_fed(folder, decision)
    with open_session(folder, decision) as first, open_session(folder, decision) as second:
        for session in (first, second):
            with session.stream():
                session.prefill(BATCH)
                made = [session.decode(tokens[:, None]).clone() for tokens in FED]
                assert torch.equal(torch.stack(made).float(), expected)


def test_part_of_what_is_multiplied_together_is_refused(folder: Path) -> None:
    rule = group(1, 1, "mlp.experts.down_proj", decode="host")
    with pytest.raises(PlanError, match=r"takes mlp.experts.down_proj.weight without .*gate_proj"):
        open_session(folder, offload(rule))


@pytest.mark.slow
def test_what_has_no_kernel_is_refused(tmp_path: Path) -> None:
    rule = group(1, 1, "mlp", decode="host")
    stored, _ = save_stored("qwen3", "int8", tmp_path / "groups", torch.bfloat16)
    told = r"scales of \d+ weights of 8 bits .*mlp.down_proj.weight\)"
    with pytest.raises(OffplanError, match=told):
        open_session(stored, offload(rule))
    stored, _ = save_stored("qwen3", "fp8_block", tmp_path / "wide")
    with pytest.raises(OffplanError, match="computes in bfloat16, found a model in float32"):
        open_session(stored, offload(rule))
    _, plain = save_stored("gpt_oss", "mxfp4", tmp_path / "columns", torch.bfloat16)
    with pytest.raises(OffplanError, match="no kernel for experts whose rows are inputs"):
        open_session(plain, offload(rule))
    stored, _ = save_stored("qwen3_moe", "gptq", tmp_path / "orders", torch.bfloat16)
    with pytest.raises(PlanError, match=r"inputs in an order of each one's own \(g_idx\)"):
        open_session(stored, offload(rule))


def test_orders_that_files_alone_tell_are_refused(tmp_path: Path) -> None:
    stored, _ = save_stored("qwen3_moe", "gptq", tmp_path, torch.bfloat16, num_hidden_layers=1)
    config = (stored / "config.json").read_text()
    (stored / "config.json").write_text(config.replace('"desc_act": true', '"desc_act": false'))
    rule = group(1, 1, "experts", prefill="uva", decode="host")
    with pytest.raises(OffplanError, match="joined weights whose inputs have orders of their own"):
        open_session(stored, offload(rule))


def test_no_compiler_is_said_before_loading(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from offplan.hostcores import library

    library.load_library.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(OffplanError, match=r"`decode: host` needs a C.* no-such-compiler"):
        open_session(folder, offload(group(1, 1, "mlp", decode="host")))


def test_rules_say_where_it_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="prefill: host serves decode alone; choose prefetch or"):
        group(1, 1, prefill="host", decode="host")
    with pytest.raises(ValueError, match="a max_bytes rule is read in place: prefill and decode"):
        Rule.model_validate({"max_bytes": 10, "prefill": "uva", "decode": "host"})
    with pytest.raises(ValueError, match=r"rule 1 is .*host's cores.*\(host\), which reads no sec"):
        offload(group(1, 1, decode="host"), store="peer")


@pytest.mark.slow
def test_as_many_threads_compute_as_are_asked_for(folder: Path) -> None:
    decision = offload(group(1, 1, "experts", prefill="uva", decode="host"))
    made = []
    for num_threads in (None, 1, 2):
        model = open_model(str(folder))
        session = Session(
            model, decision, context=16, device="cpu", folder=folder, host_threads=num_threads
        )
        with session:
            task = next(
                task_of(part)
                for part in session.loaded.module.modules()
                if isinstance(part, ByCoresModule)
            )
            assert num_threads in (None, task.server.num_threads)
            with session.stream():
                session.prefill(BATCH)
                made.append(session.decode(FED[0][:, None]).clone())
    assert all(torch.equal(each, made[0]) for each in made)


def take_handovers(monkeypatch: pytest.MonkeyPatch) -> list[Handover]:
    """Have the cores be asked as for a GPU, by a stream that is simulated."""
    made: list[Handover] = []

    def make(device: torch.device) -> ByCores:
        server = ByCores(device)
        made.append(Handover(device, AtOnce(), num_threads=1))
        server._handover = made[0]
        return server

    monkeypatch.setattr(HostCores, "servers", {Backend.HOST: make})
    return made


def find_pages(address: int) -> bool:
    """Return True if memory is mapped at an address."""
    with open("/proc/self/maps") as file:
        ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in file]
    return any(first <= address < last for first, last in ranges)


@pytest.mark.slow
@pytest.mark.parametrize("hangs", [True, False])
def test_what_a_hung_thread_may_read_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    """Closing a session would else unmap weights below a thread, which ends the process."""
    handovers = take_handovers(monkeypatch)
    woken: list[Handover] = []
    monkeypatch.setattr(Handover, "wake", lambda handover: woken.append(handover))
    session = open_session(folder, offload(group(1, 1, "experts", decode="host"), prefetch_step=1))
    with session.stream():
        session.prefill(BATCH)
        woken.clear()
        session.decode(FED[0][:, None])
        session.decode(FED[1][:, None])
    tasks = [task_of(p) for p in session.loaded.module.modules() if isinstance(p, ByCoresModule)]
    kept: list[Any] = [task.keeps for task in tasks]
    owners = [weakref.ref(each[0][0][1][Component.WEIGHT]) for each in kept]
    pages = [slab.data_ptr() for slab in session.loaded.store.slabs.values()]
    assert tasks
    assert woken == handovers * 2  # before each step, which may come after a pause
    assert all(map(find_pages, pages))
    del tasks, kept
    if hangs:
        slow = handovers[0]._coordinator.add_sleep(4, limit_s=0.05)
        handovers[0].exchange.enqueue(slow)
        told = r"a thread of the host hangs, .* MiB of host memory stay taken until this process"
        with pytest.raises(OffplanError, match=told):
            session.close()
    else:
        session.close()
    session.close()
    assert [ref() is not None for ref in owners] == [hangs] * len(owners)
    assert all(find_pages(at) == hangs for at in pages)

"""Decode steps that the host's cores compute for a GPU: captured, replayed, and as without one."""

from pathlib import Path

import pytest
import torch

from offplan.backends import Backend
from offplan.errors import OffplanError
from offplan.runtime.host_cores.handover import Handover
from offplan.runtime.host_cores.server import ByCores
from offplan.runtime.session import Session
from tests.hostcores.cores import require_cores
from tests.runtime.plans import group, offload, open_session
from tests.runtime.quantise import save_stored

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

require_cores()

PROMPT = torch.tensor([[3, 14, 15, 9, 26, 40, 33], [58, 9, 7, 9, 3, 21, 17]])
FED = torch.randint(0, 60, (8, 2), generator=torch.Generator().manual_seed(0))
CASES = [("qwen3", "fp8_block"), ("qwen3_moe", "fp8_block"), ("gpt_oss", "mxfp4")]


def run_fed(folder: Path, device: str, decode: str, *, capture: bool = True) -> torch.Tensor:
    decision = offload(group(1, 1, "mlp", decode=decode), prefetch_step=1)
    with open_session(folder, decision, device, capture=capture) as session:
        return step_fed(session)


def step_fed(session: Session) -> torch.Tensor:
    made = []
    with session.stream():
        session.prefill(PROMPT)
        for tokens in FED.to(session.device):
            made.append(session.decode(tokens[:, None]).clone())
        made = [each.float().cpu() for each in made]
    session.check()
    return torch.stack(made)


@pytest.mark.parametrize(("family", "form"), CASES)
def test_logits_are_near_those_of_the_gpu(family: str, form: str, tmp_path: Path) -> None:
    stored, _ = save_stored(family, form, tmp_path, torch.bfloat16)
    by_gpu, by_cores = (run_fed(stored, "cuda", decode) for decode in ("uva", "host"))
    # one token may be sent to other experts by what is rounded before them
    assert (by_gpu - by_cores).abs().mean(-1).median() < 0.05 * by_gpu.std()
    # uncaptured layers are not compiled, and round elsewhere
    uncaptured = run_fed(stored, "cuda", "host", capture=False)
    assert (by_gpu - uncaptured).abs().mean(-1).median() < 0.05 * by_gpu.std()
    assert torch.equal(by_cores, run_fed(stored, "cuda", "host"))


def test_a_host_function_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, _ = save_stored("qwen3_moe", "fp8_block", tmp_path, torch.bfloat16)
    expected = run_fed(stored, "cuda", "host")
    monkeypatch.setattr(Handover, "_can_wait", lambda self: False)
    assert torch.equal(run_fed(stored, "cuda", "host"), expected)


def test_the_stream_can_wait() -> None:
    handover = Handover(torch.device("cuda"))
    try:
        assert handover.exchange.waits, "the probe failed: host functions serve in its place"
    finally:
        handover.close()


def test_a_failure_ends_with_an_error_and_leaves_the_device_usable(tmp_path: Path) -> None:
    stored, _ = save_stored("qwen3", "fp8_block", tmp_path, torch.bfloat16)
    decision = offload(group(1, 1, "mlp", decode="host"), prefetch_step=1)
    with open_session(stored, decision, "cuda") as session:
        step_fed(session)
        server = session.loaded.store.servers[Backend.HOST]
        assert isinstance(server, ByCores)
        assert server._handover is not None
        slow = server._handover._coordinator.add_sleep(1.0, limit_s=0.1)
        with session.stream():
            server._handover.exchange.enqueue(slow)
        with pytest.raises(OffplanError, match="did not answer in time"):
            step_fed(session)
    assert run_fed(stored, "cuda", "host").isfinite().all()


def test_two_sessions_one_after_the_other_and_beside_one_another(tmp_path: Path) -> None:
    stored, _ = save_stored("qwen3_moe", "fp8_block", tmp_path, torch.bfloat16)
    decision = offload(group(1, 1, "mlp", decode="host"), prefetch_step=1)
    expected = run_fed(stored, "cuda", "host")
    with (
        open_session(stored, decision, "cuda") as first,
        open_session(stored, decision, "cuda") as second,
    ):
        assert torch.equal(step_fed(first), expected)
        assert torch.equal(step_fed(second), expected)
        assert torch.equal(step_fed(first), expected)

"""Offload decisions for tests, made without the planner, and sessions that carry them out."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from offplan.capabilities.stock import STOCK
from offplan.capabilities.way import OWN
from offplan.checkpoint.model import Model
from offplan.checkpoint.open import open_model
from offplan.plan import Offload, Rule
from offplan.runtime.executors import EXECUTORS
from offplan.runtime.loading.loaded import LoadedModel
from offplan.runtime.loading.prepared import prepare
from offplan.runtime.measuring.bench import Bench
from offplan.runtime.model.layers import DecoderLayers
from offplan.runtime.passes.link import Link
from offplan.runtime.session import Session
from offplan.schedule import Copy, Wait

CONTEXT = 48
NUM_TOKENS = 6
"""Tokens that follow a prompt."""


def group(
    group_size: int,
    num_in_group: int,
    *segments: str,
    prefill: str = "prefetch",
    decode: str = "prefetch",
) -> Rule:
    return Rule.model_validate(
        {
            "cpu_offload_params": segments,
            "group_size": group_size,
            "num_in_group": num_in_group,
            "prefill": prefill,
            "decode": decode,
        }
    )


def in_parts(num_parts: int, every: int = 1, **more: Any) -> Rule:
    """A rule by which prompts stream the routed experts of each layer, or every so many."""
    way = {"prefill": "prefetch", "decode": "uva", **more}
    pattern = {"cpu_offload_params": ["experts"], "group_size": every, "num_in_group": 1}
    return Rule.model_validate({**pattern, **way, "parts": num_parts})


def offload(
    *rules: Rule,
    prefetch_step: int = 2,
    prefill_chunk: int = 64,
    embeddings: Literal["device", "host"] = "device",
    store: Literal["host", "peer"] = "host",
) -> Offload:
    return Offload(
        prefetch_step=prefetch_step,
        prefill_chunk=prefill_chunk,
        embeddings=embeddings,
        store=store,
        rules=rules,
    )


class LateLink:
    """Makes every copy as late as the schedule allows; the CPU's own link makes it at once.

    Both are legal orders of a right schedule; with a wrong one at least one of them computes with
    another layer's weights.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._pending: list[Copy] = []

    @property
    def bytes_moved(self) -> int:
        return self._link.bytes_moved

    def copy(self, op: Copy) -> None:
        self._pending.append(op)

    def wait(self, op: Wait) -> None:
        """Perform what is pending, in order, up to this slot's copy."""
        while any(pending.slot == op.slot for pending in self._pending):
            self._link.copy(self._pending.pop(0))


def load(model: Model, decision: Offload, folder: Path | None) -> LoadedModel:
    """Load a model on the CPU; random weights without a folder."""
    return LoadedModel(prepare(model, decision, torch.device("cpu"), EXECUTORS), folder)


def open_session(
    folder: Path,
    decision: Offload,
    device: str = "cpu",
    *,
    late_copies: bool = False,
    capture: bool = True,
    stock: bool = False,
) -> Session:
    return Session(
        open_model(str(folder)),
        decision,
        context=CONTEXT,
        device=device,
        folder=folder,
        capture=capture,
        way=STOCK if stock else OWN,
        wrap_link=LateLink if late_copies else lambda link: link,
    )


@contextmanager
def compiled_layers(
    backend: Callable[..., Any] = lambda graph, _: graph.forward,
) -> Iterator[None]:
    """Let sessions that open meanwhile compile their layers, on a CPU too, by a backend.

    It is in the compiler's place: other options than another layer's have torch compile it again.
    """
    own = DecoderLayers.__init__

    def compile_all(layers: DecoderLayers, modules: torch.nn.ModuleList, **_: object) -> None:
        own(layers, modules, compiled=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "torch._inductor.compile_fx.compile_fx",
            lambda graph, inputs, **_: backend(graph, inputs),
        )
        patch.setattr(DecoderLayers, "__init__", compile_all)
        torch.compiler.reset()
        try:
            yield
        finally:
            torch.compiler.reset()


def make_bench(folder: Path, decision: Offload, prompt: torch.Tensor, device: str) -> Bench:
    """A short benchmark of a decision."""
    return Bench(
        model=open_model(str(folder)),
        offload=decision,
        context=CONTEXT,
        device=torch.device(device),
        folder=folder,
        prompt=prompt,
        num_steps=4,
        num_repeats=2,
        used_before=0,
    )


def run_greedily(
    folder: Path, decision: Offload, prompt: torch.Tensor, **options: Any
) -> list[torch.Tensor]:
    """Logits after the prompt and after each greedy token, [batch, vocabulary] each."""
    return run_each_greedily(folder, decision, [prompt], **options)[0]


def run_each_greedily(
    folder: Path, decision: Offload, prompts: Sequence[torch.Tensor], **options: Any
) -> list[list[torch.Tensor]]:
    """The same of several prompts, one after the other in a session."""
    session = open_session(folder, decision, **options)
    made = []
    with session, session.stream():
        for prompt in prompts:
            logits = [session.prefill(prompt).clone()]
            for _ in range(NUM_TOKENS):
                tokens = logits[-1].argmax(-1, keepdim=True)
                logits.append(session.decode(tokens).clone())
            made.append([entry.cpu() for entry in logits])
    return made

"""Linear attention: every pass goes on from the right state, and a prompt begins from none."""

import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from offplan.checkpoint.open import open_model
from offplan.errors import CheckpointError
from offplan.plan import Rule, Workload
from offplan.runtime.measuring import layer_times
from offplan.runtime.measuring.layer_times import READ_ONCE_TOKENS
from offplan.runtime.model import delta_rule, rewrites
from offplan.runtime.model.rewrites import find_linear
from offplan.runtime.session import Session
from offplan.transformers_private import DELTA_RULE, RULE_OF_MANY
from tests.held import open_stage
from tests.runtime.conftest import NUM_LAYERS, save_tiny
from tests.runtime.families import NUM_STEPS, TOLERANCE, load_stock, run_stock
from tests.runtime.plans import group, offload

CONTEXT = 180
GENERATOR = torch.Generator().manual_seed(0)
PROMPT = torch.randint(64, (2, 150), generator=GENERATOR)
"""Longer than two of the rule's chunks of 64, and no multiple of them."""
LINEAR = (0, 2, 4)
"""Layers that have linear attention."""


@pytest.fixture(scope="module", params=["linear", "linear_experts"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("linear", tmp_path_factory.mktemp("dense"))


def load(folder: Path, *rules: Rule, chunk: int = 64) -> Session:
    decision = offload(*(rules or (group(2, 1),)), prefill_chunk=chunk)
    return Session(open_model(str(folder)), decision, context=CONTEXT, device="cpu", folder=folder)


def request(session: Session, prompt: torch.Tensor) -> list[torch.Tensor]:
    with session.stream():
        logits = [session.prefill(prompt).clone()]
        for _ in range(NUM_STEPS):
            logits.append(session.decode(logits[-1].argmax(-1, keepdim=True)).clone())
    return logits


@functools.cache
def expect(folder: Path) -> list[torch.Tensor]:
    return run_stock(load_stock(folder), PROMPT)


@functools.cache
def run_resident(folder: Path) -> list[torch.Tensor]:
    """Logits where one layer streams, which then owns its slot."""
    with load(folder, group(5, 1), chunk=20) as session:
        return request(session, PROMPT)


def assert_close(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    scale = max(float(logits.abs().max()) for logits in expected)
    for ours, theirs in zip(got, expected, strict=True):
        assert float((ours - theirs).abs().max()) < TOLERANCE * scale


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [256, 128, 37, 3])
def test_a_prompt_in_chunks_of_any_length(folder: Path, chunk: int) -> None:
    with load(folder, chunk=chunk) as session:
        assert_close(request(session, PROMPT), expect(folder))


@pytest.mark.slow
def test_a_chunk_in_spans(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrites, "SPAN_TOKENS", 50)
    with load(folder, chunk=256) as session:
        assert_close(request(session, PROMPT), expect(folder))


@pytest.mark.slow
def test_a_prompt_token_by_token(dense: Path) -> None:
    prompt = PROMPT[:, :9]
    with load(dense, chunk=1) as session:
        assert_close(request(session, prompt), run_stock(load_stock(dense), prompt))


@pytest.mark.slow
@pytest.mark.parametrize(
    "rules",
    [
        (group(1, 1),),
        (group(3, 2),),
        (group(1, 1, "linear_attn"),),
        (group(2, 1, "mlp", decode="uva"), group(1, 1, "conv1d", prefill="uva", decode="uva")),
    ],
    ids=["all", "two of three", "linear attention", "two rules"],
)
def test_logits_equal_resident(folder: Path, rules: tuple[Rule, ...]) -> None:
    with load(folder, *rules, chunk=20) as session:
        assert all(map(torch.equal, request(session, PROMPT), run_resident(folder)))


def stop(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def interrupt(session: Session) -> None:
    """End a prompt after its first chunks have changed states."""
    steps = session.runner.layers._steps
    own, steps[3] = steps[3], stop
    with pytest.raises(KeyboardInterrupt):
        session.prefill(PROMPT)
    steps[3] = own


def warm_up(session: Session) -> None:
    session.warm_up(*PROMPT.shape)


def measure(session: Session) -> None:
    with session.stream(), torch.inference_mode():
        for layer in session.runner.chunk_layers(PROMPT[:, :70], 0, 70):
            layer()
        session.runner.set_length(30)
        for layer in session.runner.forward.step_layers(PROMPT[:, :1]):
            layer()


def spoil(session: Session) -> None:
    with torch.inference_mode():
        for _, state in states_of(session):
            state.fill_(torch.nan)


@pytest.mark.slow
@pytest.mark.parametrize("disturb", [interrupt, warm_up, measure, spoil])
def test_a_prompt_begins_from_no_state(dense: Path, disturb: Callable[[Session], None]) -> None:
    with load(dense) as session:
        expected = request(session, PROMPT)
        other = PROMPT[:1, 5:80]
        first = request(session, other)  # which has another batch
        request(session, PROMPT)
        disturb(session)
        assert all(map(torch.equal, request(session, PROMPT), expected))
        assert all(map(torch.equal, request(session, other), first))


def states_of(session: Session) -> list[tuple[int, torch.Tensor]]:
    assert session.runner.layers.cache is not None
    return [
        (index, state)
        for index in LINEAR
        for state in session.runner.layers.cache.layers[index].layers[0].tensors()
    ]


@pytest.mark.slow
def test_states_stay_where_they_are_and_take_what_was_planned(folder: Path) -> None:
    with load(folder) as session:
        request(session, PROMPT)
        before = [state.data_ptr() for _, state in states_of(session)]
        request(session, PROMPT[:, 7:60])
        assert [state.data_ptr() for _, state in states_of(session)] == before
        for index, layer in enumerate(session.loaded.model.layers):
            taken = sum(state.nbytes for at, state in states_of(session) if at == index)
            assert taken == len(PROMPT) * layer.kv_cache.state_bytes


@pytest.mark.slow
def test_a_decode_step_is_compiled_once_for_each_kind_and_whole(dense: Path) -> None:
    with load(dense) as session, session.stream(), torch.inference_mode():
        request(session, PROMPT)
        layers, counter = session.runner.layers, CompileCounter()
        calls = layers.note_calls(lambda: session.runner.forward.step(PROMPT[:, :1]))
        assert len(calls) == NUM_LAYERS
        torch._dynamo.reset()
        for own, call in zip(layers._steps, calls, strict=True):
            torch.compile(own, backend=counter, fullgraph=True)(call.hidden, **call.arguments)
        assert counter.frame_count == 2


@pytest.mark.slow
def test_a_chunk_that_kernels_take_is_compiled_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delta_kernel = pytest.importorskip("offplan.runtime.model.delta_kernel")
    with load(folder) as session, session.stream(), torch.inference_mode():
        request(session, PROMPT)
        states = [(state, state.clone()) for _, state in states_of(session)]

        def run(step: Callable[..., Any], call: Any) -> list[torch.Tensor]:
            made = step(call.hidden, **call.arguments)
            after = [state.clone() for state, _ in states]
            for state, before in states:
                state.copy_(before)
            return [made, *after]

        layers = session.runner.layers
        calls = layers.note_calls(lambda: session.runner.forward.chunk(PROMPT, 0, PROMPT.shape[1]))
        expected = [run(layers._steps[index], calls[index]) for index in LINEAR]
        own = unwrap_rule(session)
        for module in (delta_rule, rewrites):
            monkeypatch.setattr(module, "serves", lambda *_: True)
        monkeypatch.setattr(
            delta_kernel,
            "take_tokens",
            lambda query, key, value, g, beta, initial_state, epsilon: own(
                query, key, value, g=g, beta=beta, initial_state=initial_state,
                output_final_state=True, use_qk_l2norm_in_kernel=True,
            ),
        )  # fmt: skip
        graphs: list[torch.fx.GraphModule] = []

        def note(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
            graphs.append(graph)
            return graph.forward

        torch._dynamo.reset()
        for index, eager in zip(LINEAR, expected, strict=True):
            whole = torch.compile(layers._steps[index], backend=note, fullgraph=True)
            assert_close(run(whole, calls[index]), eager)
        (graph,) = graphs
        targets = [node.target for node in graph.graph.nodes]
        assert targets.count(torch.ops.offplan.delta_rule.default) == 1
        assert torch.conv1d not in targets


def unwrap_rule(session: Session) -> Callable[..., Any]:
    """transformers' own rule for many tokens, which runs anywhere."""
    (linear, *_) = filter(None, find_linear(session.loaded.module.get_decoder().layers))
    rule = getattr(sys.modules[type(linear).__mro__[2].__module__], RULE_OF_MANY)
    return inspect.unwrap(rule)


@pytest.mark.slow
def test_other_packages_kernels_are_not_called(
    dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.qwen3_5 import modeling_qwen3_5

    for name in DELTA_RULE:
        wrap = functools.wraps(getattr(modeling_qwen3_5, name))
        monkeypatch.setattr(modeling_qwen3_5, name, wrap(lambda *_, **__: stop()))
    with load(dense) as session:
        got = request(session, PROMPT)
    assert_close(got, expect(dense))
    monkeypatch.setattr(modeling_qwen3_5, "causal_conv1d_fn", stop)
    with pytest.raises(CheckpointError, match="whose code in torch is not found"):
        load(dense)


def test_a_convolution_is_not_timed_as_a_product(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, products = open_stage(folder), []
    monkeypatch.setattr(
        layer_times, "measure_in_place_reads", lambda each, *_, **__: products.extend(each)
    )
    layer_times.measure_model_reads(stage, Workload(batch=1), [READ_ONCE_TOKENS + 1], 1e9)
    shapes = {shape for shape, _ in products}
    assert shapes
    assert not any(shape[1] == 1 for shape in shapes)


def test_linear_attention_is_found(dense: Path) -> None:
    with load(dense) as session:
        found = find_linear(session.loaded.module.get_decoder().layers)
        assert [index for index, part in enumerate(found) if part is not None] == [*LINEAR]

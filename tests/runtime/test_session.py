"""What a session believes about itself, whatever happens to it."""

import gc
import json
import mmap
import sys
import weakref
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from offplan.checkpoint.model import KVCache
from offplan.checkpoint.open import open_model
from offplan.errors import CheckpointError, InputError, MemoryLimitError, OffplanError
from offplan.placement import Phase
from offplan.row_cache import RowCache
from offplan.runtime.forms.experts import GROUPS_NAME
from offplan.runtime.generate import Measured, generate
from offplan.runtime.loading.skeleton import build_skeleton
from offplan.runtime.memory import store
from offplan.runtime.model.cache_mask import filled_blocks, filled_mask, filled_up_to
from offplan.runtime.model.caches import LayerCaches, Position
from offplan.runtime.model.kernels import ExpertKernels, find_filled, find_own_experts
from offplan.runtime.model.latent import Expansion
from offplan.runtime.model.layers import MAX_VARIANTS, Call, DecoderLayers
from offplan.runtime.session import Session
from offplan.schedule import Copy
from offplan.transformers_private import chosen_experts
from tests.held import input_embedding
from tests.runtime.conftest import CONFIGS, NUM_LAYERS, SIZES, save_tiny
from tests.runtime.interpreted import need_triton
from tests.runtime.plans import CONTEXT, compiled_layers, group, offload, open_session
from tests.tiers import each_value_once, first_quick, others_in_sweep

NUM_TOKENS = 6
PROMPT = torch.tensor([[3, 14, 15, 9, 26, 5, 35, 8, 9, 7]])


def tokens_of(session: Session) -> list[int]:
    return [int(token) for token in generate(session, PROMPT, NUM_TOKENS, Measured())]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("checkpoint", "copies"),
    each_value_once(product(sorted(CONFIGS), range(1, 9))),
    indirect=["checkpoint"],
)
def test_a_request_after_an_interrupted_one(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, copies: int
) -> None:
    with open_session(checkpoint, offload(group(1, 1))) as session:
        expected = tokens_of(session)
        copy, left = session.link.copy, copies

        def interrupt(op: Copy) -> None:
            nonlocal left
            left -= 1
            if not left:
                raise KeyboardInterrupt
            copy(op)

        monkeypatch.setattr(session.link, "copy", interrupt)
        with pytest.raises(KeyboardInterrupt):
            tokens_of(session)
        monkeypatch.undo()
        with pytest.raises(ValueError, match="before prefill"):
            session.decode(PROMPT[:, :1])
        assert tokens_of(session) == expected


@pytest.mark.slow
def test_what_chunks_expand_goes_with_a_prompt_that_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms: list[weakref.ref[torch.Tensor]] = []
    extend = Expansion.extend

    def note(expansion: Expansion, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = extend(expansion, *arguments)
        rooms.extend(weakref.ref(part) for part in expansion._kept or ())
        if len(rooms) > 5:
            raise MemoryError
        return keys, values

    folder = save_tiny("deepseek_v2", tmp_path / "checkpoint")
    with open_session(folder, offload(prefill_chunk=4)) as session:
        expected = tokens_of(session)
        monkeypatch.setattr(Expansion, "extend", note)
        with pytest.raises(MemoryLimitError):
            tokens_of(session)
        gc.collect()
        assert rooms
        assert not any(room() is not None for room in rooms)
        monkeypatch.undo()
        assert tokens_of(session) == expected


def test_a_request_after_one_that_overflowed(checkpoint: Path) -> None:
    with open_session(checkpoint, offload()) as session:
        expected = tokens_of(session)
        assert session.runner.layers.cache is not None
        with torch.inference_mode():
            for layer in session.runner.layers.cache.layers:
                layer.keys.fill_(torch.nan)
                layer.values.fill_(torch.nan)
        assert tokens_of(session) == expected


def test_closing_gives_everything_back(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block is memory that lives as long as any view of it does."""
    blocks: list[weakref.ref[mmap.mmap]] = []

    class Pages(mmap.mmap):
        def __init__(self, *_: object) -> None:
            blocks.append(weakref.ref(self))

    def allocate(num_bytes: int, device: torch.device, what: str) -> torch.Tensor:
        return torch.frombuffer(Pages(-1, num_bytes), dtype=torch.uint8)

    monkeypatch.setattr(mmap, "mmap", Pages)
    monkeypatch.setattr(store, "allocate", allocate)
    untied = input_embedding(open_model(str(checkpoint))) is not None
    embeddings: dict[str, Any] = {"embeddings": "host"} if untied else {}
    session = open_session(checkpoint, offload(group(2, 1), group(1, 1, "mlp"), **embeddings))
    tokens_of(session)
    assert session.runner.layers.cache is not None
    caches = [weakref.ref(layer.keys) for layer in session.runner.layers.cache.layers]
    held = [ref for ref in (*blocks, *caches) if ref() is not None]
    assert len(held) == 1 + 2 + NUM_LAYERS + untied + NUM_LAYERS  # arena, slots, slabs, caches
    for _ in range(2):
        session.close()
        assert [ref() for ref in held] == [None] * len(held)
        for use in (session.prefill, session.decode):
            with pytest.raises(ValueError, match="session is closed"):
                use(PROMPT)


def test_tokens_of_another_batch_are_refused(checkpoint: Path) -> None:
    with open_session(checkpoint, offload()) as session:
        session.prefill(PROMPT)
        with pytest.raises(InputError, match=r"\(1, 1\)"):
            session.decode(torch.zeros(2, 1, dtype=torch.int64))


def test_a_long_prompt_after_a_token_alone(tmp_path: Path) -> None:
    """Experts are gathered for one token and grouped for many, whatever came before."""
    folder = save_tiny("deepseek_v2", tmp_path)
    with open_session(folder, offload()) as session:
        config = session.loaded.module.config
        session.prefill(PROMPT[:, :1])
        assert config._experts_implementation == "batched_mm"
        session.prefill(PROMPT)
        assert config._experts_implementation == "grouped_mm"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_neox"])
def test_stored_buffers_and_caches_of_another_name(tmp_path: Path, name: str) -> None:
    folder = save_tiny(name, tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = stock.generate(PROMPT, max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None)
    with open_session(folder, offload(group(2, 1))) as session:
        assert tokens_of(session) == expected[0, PROMPT.shape[1] :].tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "chunk"),
    each_value_once(product(["mistral_windowed", "chunked"], [1, 3, 4, 9, 64])),
)
def test_a_chunk_looks_back_as_far_as_its_window(tmp_path: Path, name: str, chunk: int) -> None:
    folder = save_tiny(name, tmp_path)
    prompt = torch.cat([PROMPT, PROMPT], dim=1)
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with open_session(folder, offload(prefill_chunk=chunk)) as session, torch.inference_mode():
        expected = stock(prompt).logits[:, -1]
        torch.testing.assert_close(session.prefill(prompt), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("chunk", "num_rows"), [(64, 10), (4, 10 + 1)])
def test_rows_of_an_embedding_on_the_host_cross_the_link(
    tmp_path: Path, chunk: int, num_rows: int
) -> None:
    measured = Measured()
    decision = offload(embeddings="host", prefill_chunk=chunk)
    with open_session(save_tiny("qwen3", tmp_path), decision) as session:
        for _ in generate(session, PROMPT, NUM_TOKENS, measured):
            pass
        row_bytes = SIZES["hidden_size"] * 4
        assert measured.prefill_link_bytes == num_rows * row_bytes
        assert measured.decode_link_bytes == (NUM_TOKENS - 1) * row_bytes
        assert session.link.bytes_moved == 0


def test_the_model_is_set_up_where_it_runs(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the phase of each pass that runs it, and for none that was captured."""
    with open_session(checkpoint, offload()) as session, torch.inference_mode():
        entered: list[Phase] = []
        monkeypatch.setattr(session.loaded, "enter_phase", entered.append)
        logits = session.prefill(PROMPT)
        session.decode(PROMPT[:, :1])
        assert entered == [Phase.PREFILL, Phase.DECODE]
        # as what was captured is replayed
        monkeypatch.setattr(session.runner._passes, "run", lambda *_, **__: logits)
        session.decode(PROMPT[:, :1])
        assert len(entered) == 2


def test_a_step_after_calls_of_a_prompt_were_noted(checkpoint: Path) -> None:
    """As measuring does: the step writes its own row, not the prompt's."""
    with open_session(checkpoint, offload()) as session, torch.inference_mode():
        session.prefill(PROMPT)
        expected = session.decode(PROMPT[:, :1]).clone()
        session.prefill(PROMPT)
        session.runner.chunk_layers(PROMPT, 0, PROMPT.shape[1])
        assert torch.equal(session.decode(PROMPT[:, :1]), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", others_in_sweep(["qwen3", "chunked", "gptj"], ["qwen3"]))
def test_prompts_and_steps_in_turn_compile_nothing_more(tmp_path: Path, name: str) -> None:
    folder = save_tiny(name, tmp_path)
    with compiled_layers(), open_session(folder, offload(prefill_chunk=5)) as session:
        tokens = tokens_of(session)
        compiled = counters["stats"]["unique_graphs"]
        assert tokens_of(session) == tokens
        assert counters["stats"]["unique_graphs"] == compiled > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "filled"),
    [
        ("qwen3_wide", "float32", filled_blocks),
        ("mistral_windowed", "bfloat16", filled_up_to),
        ("mistral_windowed", "float32", filled_mask),
        ("chunked", "bfloat16", filled_up_to),
        ("latents_wide", "bfloat16", filled_up_to),
        ("latents_wide", "float32", filled_mask),
        ("deepseek_v2", "bfloat16", filled_mask),
    ],
)
def test_kernels_of_a_captured_step(tmp_path: Path, name: str, dtype: str, filled: object) -> None:
    with open_session(save_tiny(name, tmp_path), offload()) as session:
        session.loaded.model = replace(session.loaded.model, dtype=dtype)
        assert find_filled(session.loaded.model, session.loaded.module, session.context) is filled


def test_a_window_that_the_config_leaves_to_its_model_type(tmp_path: Path) -> None:
    folder = save_tiny("olmo3_windowed", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["layer_types"]
    (folder / "config.json").write_text(json.dumps(config))
    with open_session(folder, offload()) as session:
        model, module = session.loaded.model, session.loaded.module
        assert model.layers[0].kv_cache.window == 8
        assert find_filled(model, module, session.context) is filled_mask
        assert find_filled(model, module, 8) is filled_blocks  # no shorter than the context


@pytest.mark.parametrize(
    ("name", "dtype", "served"),
    first_quick(
        [
            ("deepseek_v2", "bfloat16", True),
            ("deepseek_v2", "float16", True),
            ("deepseek_v2", "float32", False),
            ("qwen3", "bfloat16", False),
        ]
    ),
)
def test_whose_experts_the_kernels_serve(
    tmp_path: Path, name: str, dtype: str, served: bool
) -> None:
    need_triton()
    with open_session(save_tiny(name, tmp_path), offload()) as session:
        session.loaded.model = replace(session.loaded.model, dtype=dtype)
        assert (
            bool(
                find_own_experts(session.loaded.model, session.loaded.module, with_kernels=True)[1]
            )
            is served
        )
        if served:
            experts = next(m for m in session.loaded.module.modules() if hasattr(m, "has_gate"))
            experts.has_bias = True
            assert not find_own_experts(
                session.loaded.model, session.loaded.module, with_kernels=True
            )[1]


@pytest.mark.slow
def test_prompts_of_many_tokens_group_experts(tmp_path: Path) -> None:
    """Those held by their values, where a GPU's kernels are at hand; a step never does."""
    need_triton()
    with open_session(save_tiny("deepseek_v2", tmp_path), offload()) as session:
        model, module = replace(session.loaded.model, dtype="float16"), session.loaded.module
        config = module.get_decoder().config

        def choose(phase: Phase, num_tokens: int, *, with_own: bool = True) -> str:
            kernels = ExpertKernels(model, module, session.device, with_own=with_own)
            kernels.choose(phase, num_tokens)
            chosen = chosen_experts(config)
            assert kernels.can_capture(num_tokens) == (
                chosen == GROUPS_NAME or num_tokens * model.experts.num_experts_per_token <= 64
            )
            return chosen

        assert choose(Phase.PREFILL, 1000) == GROUPS_NAME
        assert choose(Phase.PREFILL, 1000, with_own=False) == "grouped_mm"
        assert choose(Phase.PREFILL, 3) == choose(Phase.DECODE, 3) == "offplan"
        kernels = ExpertKernels(model, module, session.device, with_own=True)
        kernels.choose(Phase.DECODE, 1000)
        assert chosen_experts(config) == "offplan"


def test_without_triton_no_weight_is_loaded(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(OffplanError, match="needs the package triton"):
        open_session(checkpoint, offload(), "cuda")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"index_topk": CONTEXT - 1},
            f"more than {CONTEXT - 1} tokens.*`context={CONTEXT - 1}` or less",
        ),
        ({"index_topk": 0}, "found an index_topk of 0 in .* expected 2048"),
        # whose indexers are not known to choose all of a short text
        ({"model_type": "hy_v4"}, r"sparse attention \(model\.layers\.0\.\S+indexer\)"),
    ],
)
def test_sparse_attention_is_refused_where_it_leaves_tokens_out(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    model = open_model(str(save_tiny("deepseek_v32", tmp_path)))
    changed = replace(model, config={**model.config, **change})
    with pytest.raises(CheckpointError, match=message):
        Session(changed, offload(), context=CONTEXT, device="cpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rms_norm_eps": "1e-6"}, "StrictDataclassFieldValidationError"),
        ({"model_type": "qwen9"}, "found model_type 'qwen9'"),
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
    ],
)
def test_a_config_that_transformers_refuses(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    model = open_model(str(save_tiny("qwen3", tmp_path)))
    with pytest.raises(CheckpointError, match=message):
        build_skeleton(replace(model, config={**model.config, **change}))


def test_experts_with_products_of_their_own_are_refused(tmp_path: Path) -> None:
    model = open_model(str(save_tiny("jetmoe", tmp_path)))
    assert model.experts is not None
    with pytest.raises(CheckpointError, match="experts that transformers multiplies in a way"):
        build_skeleton(model)


def test_a_layer_that_returns_more_than_hidden_states_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Qwen3DecoderLayer.forward
    monkeypatch.setattr(Qwen3DecoderLayer, "forward", lambda *a, **b: (own(*a, **b),) * 2)
    with pytest.raises(CheckpointError, match="layer 0 returns more than hidden states"):
        open_session(save_tiny("qwen3", tmp_path), offload())


@pytest.mark.parametrize("beside", [(), (None,), (None, None)])
def test_what_layers_return_as_a_tuple_is_returned_as_one(beside: tuple[None, ...]) -> None:
    class Layer(torch.nn.Module):
        def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            return (2 * hidden, *beside)

    layer = Layer()
    with pytest.raises(CheckpointError, match="more than hidden states"):
        DecoderLayers(torch.nn.ModuleList([layer]), compiled=False).step(0, Call(torch.ones(3), {}))
    vars(layer).pop("forward")
    vars(layer)["beside"] = beside
    layers = DecoderLayers(torch.nn.ModuleList([layer]), compiled=False)
    layers.cache = LayerCaches(RowCache([KVCache(1)], 1), Position(torch.device("cpu")))
    made = layer(torch.ones(3))
    assert made[1:] == beside
    assert torch.equal(made[0], torch.full((3,), 2.0))


@pytest.mark.slow
def test_the_process_keeps_its_limit_of_compilations() -> None:
    heard = []

    class Layer(torch.nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            heard.append(torch._dynamo.config.recompile_limit)
            return hidden

    before = torch._dynamo.config.recompile_limit
    layers = DecoderLayers(torch.nn.ModuleList([Layer()]), compiled=True)
    with torch.compiler.set_stance("force_eager"):
        layers.step(0, Call(torch.zeros(1), {}))
    assert heard == [MAX_VARIANTS]
    assert torch._dynamo.config.recompile_limit == before


@pytest.mark.slow
def test_layers_of_other_sessions_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each session compiles its layers, and its own share what is compiled."""

    class Layer(torch.nn.Module):
        def forward(self, hidden: torch.Tensor, *, by: int = 2) -> torch.Tensor:
            return hidden * by

    compiled = CompileCounter()
    monkeypatch.setattr("offplan.runtime.model.layers.MAX_VARIANTS", 2)
    with compiled_layers(compiled):
        for number in range(1, 5):
            layers = DecoderLayers(torch.nn.ModuleList([Layer(), Layer()]), compiled=True)
            for index in range(2):
                hidden = torch.full((number,), float(number))
                assert torch.equal(layers.step(index, Call(hidden, {})), 2 * hidden)
            assert compiled.frame_count == number


@pytest.mark.slow
def test_a_layer_cut_at_its_experts_shares_no_code() -> None:
    """What is compiled for it, guarded by nothing behind the cut, must not serve whole layers.

    In a capture, where nothing can be compiled, these would be compiled once more.
    """

    class Whole(torch.nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden + 1

    class Cut(Whole):
        @torch.compiler.disable
        def _hand_over(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden + 2

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self._hand_over(hidden)

    class Block(torch.nn.Module):
        def __init__(self, experts: torch.nn.Module) -> None:
            super().__init__()
            self.experts = experts

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.experts(hidden * 2) * 3

    class Layer(torch.nn.Module):
        def __init__(self, experts: torch.nn.Module) -> None:
            super().__init__()
            self.block = Block(experts)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.block(hidden * 5) + 1

    compiled = CompileCounter()
    with compiled_layers(compiled):
        layers = DecoderLayers(torch.nn.ModuleList([Layer(Whole()), Layer(Cut())]), compiled=True)
        for again in range(2):
            for index, expected in enumerate((34.0, 37.0)):
                assert layers.step(index, Call(torch.ones(1), {})).item() == expected
            if not again:
                before = compiled.frame_count
    assert compiled.frame_count == before

"""A cache in FP8: codes of E3M4, and logits as of a cache whose values are rounded so."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import PreTrainedConfig

from offplan.capabilities.goal import Asked
from offplan.capabilities.way import OWN
from offplan.checkpoint.model import Model, Vectors
from offplan.checkpoint.open import open_model
from offplan.costs.activations import activation_parts
from offplan.errors import CheckpointError
from offplan.held.held import hold
from offplan.library.runnable import find_obstacle
from offplan.plan import Goal, Workload
from offplan.row_cache import SCALE_BYTES
from offplan.runtime.loading.skeleton import build_skeleton, decoder_layers
from offplan.runtime.model import cache_codes, caches
from offplan.runtime.model.attention import weigh
from offplan.runtime.model.cache_codes import (
    decode_to,
    encode,
    encode_by_bits,
    scales_of,
)
from offplan.runtime.model.cache_mask import filled_up_to
from offplan.runtime.model.caches import Ring, _Layer
from offplan.runtime.model.codes_scratch import Scratch
from offplan.runtime.model.probe import check_codes
from offplan.runtime.rows import Rows
from offplan.runtime.session import Session
from tests.runtime.coded_cache import FP8, PROMPT, weigh_codes, weigh_latents
from tests.runtime.conftest import CONFIGS, OTHERS, save_tiny
from tests.runtime.families import VARIANTS, make_config
from tests.runtime.greedy import TOLERANCE
from tests.runtime.interpreted import need_triton
from tests.runtime.plans import CONTEXT, group, offload
from tests.tiers import first_quick, others_in_sweep

FAMILIES = ["qwen3", "sinks", "deepseek_v3", "mistral_windowed", "chunked", "soft_caps", "linear"]
FAMILIES += ["shared_streams", "global_heads", "narrow_values"]
"""Grouped heads, sinks, latents, rings of windows and of chunks, soft caps, states beside keys,
caches that later layers read, heads of another size in some layers, and of values."""
DOCS = Path(__file__).parents[2] / "docs"
OWN_FAMILIES = yaml.safe_load((DOCS / "families.yaml").read_text("utf-8"))["own"]["exact"]
REFUSED = {"axk2", "deepseek_v32", "diffllama", "glm_moe_dsa"}
"""Families whose indexers keep further keys, and one that has attention take half of what is cached
twice."""
RELATIVE = 2.0**-5
"""Part by which E3M4 changes a value at most: half of a step of four bits of mantissa."""


def round_off(states: torch.Tensor) -> torch.Tensor:
    scratch = Scratch(2 * states.numel() * states.itemsize, states.device)
    return scratch.expand(encode(states), encode(states), states.dtype)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_are_near_and_rounded_once(dtype: torch.dtype) -> None:
    sizes = torch.logspace(-3, 3, 7) if dtype is torch.float16 else torch.logspace(-30, 36, 7)
    states = (torch.randn(2, 3, 7, 16) * sizes[:, None]).to(dtype)
    made = round_off(states)
    largest = states.abs().amax(-1, keepdim=True).double()
    # below 2**-2 of the scale steps have one size: a part of the largest of 2**-6 / 15.5 / 2
    bound = (RELATIVE * states.abs().double()).clamp(min=2.0**-7 / 15.5 * largest)
    bound *= 1 + (dtype is torch.float32) * 2.0**-5  # which is rounded to float16 first
    assert bool(((made.double() - states.double()).abs() <= bound).all())
    assert torch.equal(round_off(made), made)
    assert torch.equal(round_off(torch.zeros(1, 8, dtype=dtype)), torch.zeros(1, 8, dtype=dtype))


def test_bits_are_those_of_the_format() -> None:
    """Exponents of three bits with a bias of 3, and steps of 2**-6 below 2**-2."""
    number = torch.arange(128)
    exponent, mantissa = number >> 4, (number & 15) / 16
    values = torch.where(exponent > 0, 1 + mantissa, mantissa) * 2.0 ** (exponent.clamp(1) - 3)
    made = torch.empty(256)
    decode_to(made, torch.arange(256).byte(), torch.ones(1))
    assert torch.equal(made, torch.cat([values, -values]))
    assert torch.equal(encode_by_bits(made.half())[1:128], torch.arange(1, 128).byte())
    assert torch.equal(encode_by_bits(made.half())[129:], torch.arange(129, 256).byte())


def test_bits_round_to_the_nearest_and_half_to_even() -> None:
    """Of all codes, what lies half way between two, and just beside."""
    codes = torch.empty(128, dtype=torch.float16)
    decode_to(codes, torch.arange(128).byte(), torch.ones(1))
    half, number = (codes[1:] + codes[:-1]) / 2, torch.arange(127)
    below, above = (torch.nextafter(half, half.new_full((), to)) for to in (0, 31))
    assert torch.equal(encode_by_bits(half), (number + number % 2).byte())
    assert torch.equal(encode_by_bits(below), number.byte())
    assert torch.equal(encode_by_bits(above), (number + 1).byte())


def test_compiled_codes_are_those_of_torch() -> None:
    states = torch.randn(2, 3, 4, 16).bfloat16()
    assert torch.equal(torch.compile(encode, backend="eager")(states), encode(states))


def test_a_nan_and_an_infinity_show_in_the_scale() -> None:
    states = torch.ones(4, 8)
    states[1, 2], states[2, 3] = torch.nan, -torch.inf
    assert scales_of(encode(states))[:, 0].isnan().tolist() == [False, True, True, False]


def open_coded(folder: Path, chunk: int, *, coded: bool = True) -> Session:
    return Session(
        open_model(str(folder)),
        offload(group(2, 1), prefill_chunk=chunk),
        context=CONTEXT,
        device="cpu",
        folder=folder,
        way=FP8 if coded else OWN,
    )


@contextmanager
def rounded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Context in which a cache of values keeps those that codes stand for."""
    with monkeypatch.context() as patch:
        for kind in (_Layer, Ring):
            update = kind.update

            def keep(layer: Any, keys: Any, values: Any, update: Any = update) -> Any:
                return update(layer, round_off(keys), round_off(values))

            patch.setattr(kind, "update", lambda *states, keep=keep, **others: keep(*states[:3]))
        yield


def follow(session: Session) -> torch.Tensor:
    """Logits after a prompt and after 20 tokens that depend on none, [21, batch, vocabulary]."""
    with session:
        made = [session.prefill(PROMPT).clone()]
        for number in range(20):
            made.append(session.decode(torch.tensor([[number], [60 - number]])).clone())
    return torch.stack(made)


@pytest.mark.parametrize("name", first_quick(FAMILIES))
@pytest.mark.parametrize("chunk", [64, 5])
def test_logits_are_those_of_rounded_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, chunk: int
) -> None:
    folder = save_tiny(name, tmp_path)
    found = follow(open_coded(folder, chunk))
    plain = follow(open_coded(folder, chunk, coded=False))
    with rounded(monkeypatch):
        expected = follow(open_coded(folder, chunk, coded=False))
    scale = float(expected.abs().max())
    assert float((found - expected).abs().max()) < TOLERANCE * scale
    assert not torch.equal(found, plain)


def record_codes(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Have codes of what is cached recorded, and return the list of them."""
    made: list[torch.Tensor] = []

    def record(states: torch.Tensor) -> torch.Tensor:
        made.append(encode(states))
        return made[-1]

    monkeypatch.setattr(caches, "encode", record)
    return made


def keep_near_codes(monkeypatch: pytest.MonkeyPatch, recorded: list[torch.Tensor]) -> None:
    """Have recorded codes kept where those of the same states in this run are the next ones.

    A sum in another order differs by a millionth. So one of some ten thousand numbers, which lies
    between two codes, is rounded the other way.
    """
    codes = iter(recorded)

    def encode_again(states: torch.Tensor) -> torch.Tensor:
        known, made = next(codes), encode(states)
        return torch.where((known.int() - made.int()).abs() == 1, known, made)

    monkeypatch.setattr(caches, "encode", encode_again)


@pytest.mark.parametrize("name", first_quick(FAMILIES))
def test_steps_in_place_see_what_steps_by_mask_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As on a GPU, whose kernel is told a position, with products by torch in its place."""
    need_triton()
    from offplan.runtime.model import coded_kernel

    monkeypatch.setattr(coded_kernel, "attend_one", weigh_codes)
    monkeypatch.setattr(coded_kernel, "attend_latent_codes", weigh_latents)
    folder = save_tiny(name, tmp_path)
    recorded = record_codes(monkeypatch)
    expected, session = follow(open_coded(folder, 5)), open_coded(folder, 5)
    session.runner.forward.find_filled = filled_up_to
    keep_near_codes(monkeypatch, recorded)
    found = follow(session)
    assert float((found - expected).abs().max()) < TOLERANCE * float(expected.abs().max())


@pytest.mark.parametrize("name", first_quick(["qwen3", "mistral_windowed", "deepseek_v3"]))
def test_codes_stored_by_one_kernel_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As on a GPU, with torch in the kernel's place: in caches, and of steps in rings."""
    need_triton()
    from offplan.runtime.model import codes_kernel

    stored = []

    def store(keys: Any, values: Any, kept_keys: Any, kept_values: Any, new: Any) -> None:
        stored.append(keys.shape[2])
        for states, kept in ((keys, kept_keys), (values, kept_values)):
            caches._write(kept, new % kept.shape[2], encode(states))

    folder = save_tiny(name, tmp_path)
    expected = follow(open_coded(folder, 5))
    monkeypatch.setattr(codes_kernel, "store", store)
    monkeypatch.setattr(caches, "_stores_codes", lambda states: True)
    assert torch.equal(follow(open_coded(folder, 5)), expected)
    assert stored.count(1) >= 20 * 5
    assert (max(stored) > 1) == (name != "mistral_windowed")  # whose chunks rings keep


@pytest.mark.parametrize("seed", range(4))
def test_attention_changes_within_what_rounding_can_do(seed: int) -> None:
    """Scores differ by d = 1/16 of the sum of their products' sizes at most, so weights by a factor
    of exp(2 d), and values by 1/16 each."""
    torch.manual_seed(seed)
    query, key, value = (
        torch.randn(2, 4, 1, 32),
        torch.randn(2, 2, 50, 32),
        torch.randn(2, 2, 50, 32),
    )
    seen, sinks = torch.ones(1, 50, dtype=torch.bool), torch.randn(4)
    asked = seen, 32**-0.5, None, sinks
    exact, found = (
        weigh(query, key, value, *asked),
        weigh(query, round_off(key), round_off(value), *asked),
    )
    repeated = [each.repeat_interleave(2, 1) for each in (key, value)]
    products = query.abs() @ repeated[0].abs().mT
    most = RELATIVE * 32**-0.5 * products.amax(-1, keepdim=True)
    sizes = weigh(query, key, value.abs(), *asked)
    bound = ((2 * most).exp() * (1 + RELATIVE) - 1) * sizes
    assert bool(((found - exact).abs() <= bound).all())
    assert float((found - exact).norm() / exact.norm()) < RELATIVE


def held_bytes(model: Model, batch: int, chunk: int) -> tuple[int, int]:
    """Predicted bytes of the cache, and of the values of one layer's codes."""
    stage, work = (
        hold(model, way=FP8),
        Workload(batch=batch, context=CONTEXT, prompt_tokens=16, output_tokens=4),
    )
    parts = activation_parts(stage, work, chunk)
    return stage.cache_bytes(work), parts["values of one layer's cached codes"]


@pytest.mark.parametrize("name", first_quick(FAMILIES))
def test_predicted_bytes_are_allocated(tmp_path: Path, name: str) -> None:
    folder = save_tiny(name, tmp_path)
    with open_coded(folder, 5) as session:
        session.prefill(PROMPT)
        cache = session.runner.layers.cache
        assert cache is not None
        assert cache.scratch is not None
        found = sum(part.numel() * part.itemsize for part in cache.tensors())
        assert (found, cache.scratch.memory.nbytes) == held_bytes(open_model(str(folder)), 2, 5)
    stored = hold(open_model(str(folder))).row_cache(CONTEXT)
    assert found < 2 * stored.nbytes


@pytest.mark.parametrize("name", first_quick(["qwen3", "mistral_windowed", "deepseek_v3"]))
def test_rows_go_on_from_codes(tmp_path: Path, name: str) -> None:
    """Rows copied, cut short and read again give what a text read at once gives."""
    folder, tokens = save_tiny(name, tmp_path), PROMPT[0].tolist()
    with open_coded(folder, 5) as session:
        rows = Rows(session, 3)
        (first,) = rows.join_all([tokens])
        (again,) = rows.join_all([[*tokens, 7, 8]])
        made = rows.step({first.row: 3, again.row: 4})
    with open_coded(folder, 5) as session:
        session.prefill(torch.tensor([[*tokens, 7, 8]]))
        expected = session.decode(torch.tensor([[4]]))[0]
    scale = float(expected.abs().max())
    assert float((made[again.row] - expected).abs().max()) < TOLERANCE * scale
    assert again.tokens_read < len(tokens)


@pytest.mark.parametrize("layer", [1, 2])
def test_what_reaches_attention_otherwise_than_cached_is_refused(
    tmp_path: Path, layer: int
) -> None:
    """In a layer that keeps codes, and in one that reads another's."""
    model = open_model(str(save_tiny("shared_streams", tmp_path)))
    layers, stage = decoder_layers(build_skeleton(model)), hold(model, way=FP8)
    caches = [each.kv_cache for each in stage.layers]
    check_codes("tiny", layers, caches)
    vars(layers[layer])["reads"] = [[]]
    with pytest.raises(CheckpointError, match=f"layer {layer} changes what is cached"):
        check_codes("tiny", layers, caches)


def state_own(config: PreTrainedConfig) -> dict[str, Any]:
    """State the keys that a config's class knows: tests set keys of other families, too."""
    known = {
        name for each in type(config).__mro__ for name in vars(each).get("__annotations__", ())
    }
    known |= {"model_type", "per_layer_config"}
    stated = json.loads(config.to_json_string(use_diff=False))
    own = {key: stated[key] for key in known & stated.keys()}
    text = config.get_text_config()
    return own if text is config else {**own, "text_config": state_own(text)}


def list_refusals(config: PreTrainedConfig, folder: Path) -> tuple[list[str], list[str]]:
    """Why a planner refuses codes for a model of a config, and why a run does."""
    path = folder / "config.json"
    path.write_text(json.dumps(state_own(config)), "utf-8")
    model, goal = open_model(str(path)), Goal(kv_cache_dtype="fp8")
    by_run = find_obstacle(hold(model, way=goal.way))
    return [*goal.list_refusals(Asked(model, 1, "host"))], [] if by_run is None else [by_run]


@pytest.mark.slow
@pytest.mark.parametrize("family", others_in_sweep(OWN_FAMILIES, ["gemma4_text", "diffllama"]))
@pytest.mark.parametrize("variant", ["plain", "windows"])
def test_a_planner_refuses_what_a_run_does(tmp_path: Path, family: str, variant: str) -> None:
    by_planner, by_run = list_refusals(make_config(family, VARIANTS[variant]), tmp_path)
    assert bool(by_planner) == bool(by_run) == (family in REFUSED)


WIDER = {n: {"head_dim": 18, "num_key_value_heads": 1} for n in (1, 3, 4)}


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    first_quick(
        [
            ("global_heads", {}, None),
            ("global_heads", {"per_layer_config": WIDER}, "vectors of 18 elements"),
            ("narrow_values", {"v_head_dim": 6}, "vectors of 6 elements"),
            ("qwen3", {"head_dim": 10}, "vectors of 10 elements"),
            ("deepseek_v3", {"qk_rope_head_dim": 6}, "vectors of 6 elements"),
            ("deepseek_v32", {}, "caches what is not known to be vectors"),
        ]
    ),
)
def test_sizes_of_heads_are_refused_alike(
    tmp_path: Path, name: str, changes: dict[str, Any], why: str | None
) -> None:
    config = (CONFIGS | OTHERS)[name]
    refusals = list_refusals(type(config)(**{**config.to_dict(), **changes}), tmp_path)
    assert [bool(each) for each in refusals] == [why is not None] * 2
    assert all(why in each for each in chain(*refusals)) if why else True


def test_a_class_that_caches_other_heads_is_refused(tmp_path: Path) -> None:
    model = open_model(str(save_tiny("global_heads", tmp_path)))
    layers, stage = decoder_layers(build_skeleton(model)), hold(model, way=FP8)
    caches = [each.kv_cache for each in stage.layers]
    check_codes("tiny", layers, caches)
    caches[1] = replace(caches[1], vectors=(Vectors(2, 16),) * 2)
    with pytest.raises(CheckpointError, match=r"layer 1 caches 2 of 16 .* class 1 of 32"):
        check_codes("tiny", layers, caches)


def test_scales_stand_behind_codes() -> None:
    assert encode(torch.ones(2, 8)).shape == (2, 8 + SCALE_BYTES)
    assert cache_codes.is_coded(encode(torch.ones(2, 8)))

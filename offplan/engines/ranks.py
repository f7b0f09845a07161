"""The weights of one rank of an engine, of a model that is divided among several GPUs.

Source: vLLM 0.33.0, ``layers/linear`` (``QKVParallelLinear``), ``layers/vocab_parallel_embedding``,
``fused_moe/config``, ``models/gpt_oss`` (``_load_weights_mxfp4``) and
``distributed/utils.get_pp_indices``; SGLang 0.5.23, likewise.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn

from offplan.capabilities.ranks import Ranks
from offplan.capabilities.way import OWN, Way
from offplan.checkpoint.architecture import Architecture
from offplan.checkpoint.group import group_outside
from offplan.checkpoint.layers import is_in_out
from offplan.checkpoint.model import (
    OUTPUT_HEADS,
    Experts,
    KVCache,
    Layer,
    Model,
    owner,
)
from offplan.checkpoint.parameter import Parameter
from offplan.checkpoint.tables import INPUT_EMBEDDINGS
from offplan.checkpoint.tensors import TensorInfo, Tensors
from offplan.engines.engine import VOCABULARY_MULTIPLE, family_of, pad_rows
from offplan.errors import ExportError
from offplan.files import load_facts
from offplan.forms.form import Component, Kind, WordOrder
from offplan.held.held import absorbed_bytes, keep_cache
from offplan.held.runner import Runner
from offplan.held.stage import Stage

FACTS: dict[str, Any] = load_facts(Path(__file__).with_suffix(".yaml"))

FORMS = (
    *(Kind.RAW, Kind.FP8_BLOCK, Kind.FP8_CHANNEL, Kind.FP8_TENSOR, Kind.MXFP4, Kind.NVFP4),
    Kind.W4A16,
)
"""Stored forms whose parts are known to be divided as their weights are."""
WORD_ORDERS = (None, WordOrder.COMPRESSED_TENSORS)
"""Orders of whole numbers whose tensors are [out, in], as the matrix is."""
ZEROS_OF_WORD = 8
"""Rows whose zeros of 4 bits share a word."""
MXFP4_BLOCK = 32
"""Weights that share a scale there; ranks have whole ones of the experts' intermediate size."""

OUT, IN = -2, -1
"""Dimensions of a matrix, [..., out, in]."""


@dataclass(frozen=True)
class Divider:
    """Divides a model among an engine's ranks."""

    model: Model
    runner: Runner
    ranks: Ranks
    way: Way = OWN
    """The passes that a goal names, which say what type the cache has."""

    def __post_init__(self) -> None:
        if not self._is_among(FACTS["architectures"][self._engine]):
            found = ", ".join(self.model.architecture.class_names) or self.model.model_type
            raise ExportError(
                f"{self.ranks.label}: how {found} is divided among ranks is not known of "
                f"{self.runner.name}, whatever their number: plan for one GPU"
            )
        heads = self.model.architecture.tower_heads
        if self.model.towers and (not heads or heads % self.ranks.tensor):
            self._refuse(f"how {heads or 'the'} heads of what reads images are divided")
        if self._engine == "vllm" and self.ranks.expert not in (1, self.ranks.tensor):
            raise ExportError(
                f"{self.ranks.label}: vLLM divides whole experts among all ranks of a stage or "
                f"none: --ep {self.ranks.tensor}, or leave it out"
            )
        if self.ranks.expert > 1 and self.model.experts is None:
            raise ExportError(f"{self.ranks.label}: {self.model.source} has no routed experts")
        if self.ranks.pipeline > len(self.model.layers):
            raise ExportError(
                f"{self.ranks.label}: {self.model.source} has {len(self.model.layers)} layers, "
                "fewer than stages"
            )

    def stage(self, number: int) -> Stage:
        """Return what a rank of a stage holds; its layers are counted anew from 0 on."""
        counts = split_layers(len(self.model.layers), self.ranks.pipeline, self._engine)
        stop = [*accumulate(counts)][number]
        run = range(stop - counts[number], stop)
        whole = self.model.layers[run.start : run.stop]
        layers = tuple(self._divide_layer(index, layer) for index, layer in enumerate(whole))
        architecture = self._architecture(run)
        stage = Stage(
            model=self.model,
            layers=layers,
            outside=group_outside(self._outside(number), architecture),
            architecture=architecture,
            experts=self._divide_experts(layers),
            pass_rules=self.runner.pass_rules,
            label=self.ranks.label,
            num_gpus=self.ranks.tensor,
            num_stages=self.ranks.pipeline,
            number=number,
            first_layer=run.start,
            derived_bytes=absorbed_bytes(self.model, layers),
        )
        return stage.with_layout(self.runner.lay_out(stage))

    def _architecture(self, run: range) -> Architecture:
        whole, ranks = self.model.architecture, self.ranks
        heads, routing, linear = whole.attention, whole.routing, whole.linear
        num_experts = routing.num_experts
        return replace(
            whole,
            num_layers=len(run),
            mixers=whole.mixers[run.start : run.stop],
            windows=whole.windows[run.start : run.stop],
            attention=replace(
                heads,
                num_heads=heads.num_heads // ranks.tensor,
                num_kv_heads=heads.num_kv_heads // self._kv_parts,
            ),
            linear=linear
            and linear._replace(
                num_key_heads=linear.num_key_heads // ranks.tensor,
                num_value_heads=linear.num_value_heads // ranks.tensor,
            ),
            routing=replace(routing, num_experts=num_experts and num_experts // ranks.expert),
        )

    @cached_property
    def _kv_parts(self) -> int:
        """Parts that heads of keys and values are divided into; beyond, ranks have the same."""
        heads = self.model.architecture.attention
        tensor, num_kv_heads = self.ranks.tensor, heads.num_kv_heads
        if not heads.num_heads or heads.num_heads % tensor:
            self._refuse(f"how {heads.num_heads} heads are divided")
        is_repeated = tensor > num_kv_heads
        if not num_kv_heads or (tensor % num_kv_heads if is_repeated else num_kv_heads % tensor):
            self._refuse(f"how {num_kv_heads} heads of keys and values are divided")
        if is_repeated and self._is_among(FACTS["repeats_no_heads"]):
            names = ", ".join(self.model.architecture.class_names)
            self._refuse(f"how {names} with {num_kv_heads} heads of keys and values is divided")
        return min(tensor, num_kv_heads)

    @cached_property
    def _state_parts(self) -> int:
        """Parts that the heads of linear attention are divided into, with their state."""
        linear, tensor = self.model.architecture.linear, self.ranks.tensor
        if linear is None:
            self._refuse("how states are divided")
        if linear.num_key_heads % tensor or linear.num_value_heads % tensor:
            heads = f"{linear.num_key_heads} and {linear.num_value_heads} heads"
            self._refuse(f"how {heads} of linear attention are divided")
        return tensor

    def _divide_layer(self, index: int, layer: Layer) -> Layer:
        parameters = tuple(self._divide(parameter, layer) for parameter in layer.parameters)
        cache = layer.kv_cache
        # each rank caches whole latents
        has_latents = any(name.endswith("kv_a_proj_with_mqa") for name in layer.segments)
        parts = 1 if has_latents else self._kv_parts
        of_heads = self._state_parts if cache.state_bytes else 1
        if cache.bytes_per_token % parts or cache.state_bytes % of_heads:
            self._refuse(f"how the cache of layer {layer.index} is divided")
        kept = KVCache(cache.bytes_per_token // parts, cache.window, cache.state_bytes // of_heads)
        divided = replace(layer, index=index, parameters=parameters, kv_cache=kept)
        return keep_cache(divided, self.model, self.way, self.runner)

    def _divide(self, parameter: Parameter, layer: Layer) -> Parameter:
        """Return a rank's part of a parameter."""
        form = parameter.form
        if form.kind not in FORMS or form.word_order not in WORD_ORDERS or parameter.is_shuffled:
            order = f" in {form.word_order.value}'s order" if form.word_order else ""
            self._refuse(
                f"how {parameter.name} of layer {layer.index}, stored as {form.kind.value}{order}, "
                "is divided"
            )
        module, is_bias = _find_module(parameter.name)
        way = self._find_way(module)
        if way == "whole":
            return parameter
        if way is None:
            self._refuse(f"how {parameter.name} of layer {layer.index} is divided")
        tensor = self.ranks.tensor
        axis, parts = IN if way == "inputs" else OUT, tensor
        if way == "keys_and_values":
            parts = self._kv_parts
        elif way == "inputs" and is_bias:
            parts = 1
        if parameter.is_expert:
            parameter = self._choose_experts(parameter, layer)
            parts = 1 if parts == 1 else tensor // self.ranks.expert
        if parts == 1:
            return parameter
        return self._slice(parameter, axis, parts, layer)

    def _find_way(self, module: str) -> str | None:
        """Return the way in which a module is divided; None if it is not known."""
        names = self.model.architecture.class_names
        tables = [FACTS["own"].get(name, {}) for name in names] + [FACTS["modules"]]
        for way, modules in (item for table in tables for item in table.items()):
            if any(f".{module}".endswith(f".{name}") for name in modules):
                return str(way)
        return "whole" if "norm" in module.rpartition(".")[2] else None

    def _choose_experts(self, parameter: Parameter, layer: Layer) -> Parameter:
        """Return the parameter of a group's experts."""
        groups = self.ranks.expert
        number = parameter.tensors[0].shape[0] if parameter.is_fused else len(parameter.tensors)
        if number % groups:
            self._refuse(f"how the {number} experts of layer {layer.index} are divided")

        if parameter.is_fused:
            share = Fraction(1, groups)
            return _resize(parameter, lambda _, each: _scale(each, 0, share), 0, share)
        kept = slice(number // groups)
        beside = tuple((part, tensors[kept]) for part, tensors in parameter.beside)
        return replace(parameter, tensors=parameter.tensors[kept], beside=beside)

    def _slice(self, parameter: Parameter, axis: int, parts: int, layer: Layer) -> Parameter:
        """Return one of equal slices of each matrix, its scales with it."""
        is_bias = _find_module(parameter.name)[1]
        num_dims = len(parameter.shape) - parameter.is_fused
        at = axis if num_dims > 1 and not is_bias else -1
        if num_dims > 2 and axis == OUT:
            at = -num_dims  # a convolution's outputs come first
        turned = is_in_out(parameter, self.model.architecture)
        if turned and parameter.form.is_raw and at == axis and num_dims > 1:
            at = IN + OUT - axis
        share = self._divide_size(parameter, at, parts, layer)
        kind = parameter.form.kind
        return _resize(parameter, lambda part, each: _cut(each, kind, part, at, share), at, share)

    def _divide_size(self, parameter: Parameter, at: int, parts: int, layer: Layer) -> Fraction:
        """Return the part of a dimension that the rank of most has, in whole blocks of scales."""
        size, block, remedy = parameter.shape[at], 1, ""
        if parameter.form.block is not None:
            block = parameter.form.block[at]
        if at == OUT and parameter.of(Component.ZERO):
            block = max(block, ZEROS_OF_WORD)
        if parameter.is_expert and self.ranks.expert == 1:
            remedy = f"--ep {self.ranks.tensor}, by which ranks have whole experts, "
        if parameter.is_expert and any(p.form.kind is Kind.MXFP4 for p in layer.parameters):
            # a row of gate and one of up go with a column of down
            num_shards = 1 + ("gate_up" in parameter.name)
            block = MXFP4_BLOCK * num_shards
            num_blocks, rest = divmod(size, block)
            most = -(-num_blocks // parts)
            last_has_some = most * (parts - 1) < num_blocks
            is_even = not rest and not size % (parts * num_shards)
            if self._divides_blocks and is_even and last_has_some:
                return Fraction(most, num_blocks)
        if size % (parts * block):
            of_blocks = f" in blocks of {block}" * (block > 1)
            self._refuse(
                f"how {size}{of_blocks} of {parameter.name} of layer {layer.index} are divided",
                remedy,
            )
        return Fraction(1, parts)

    @property
    def _divides_blocks(self) -> bool:
        """Return True if ranks may have unlike numbers of an expert's blocks of scales.

        vLLM rounds its buffers up by enough; some of SGLang's are smaller than the first rank's.
        """
        return self._is_among(FACTS["unlike_blocks"]) and self._engine == "vllm"

    def _divide_experts(self, layers: Sequence[Layer]) -> Experts | None:
        experts, groups = self.model.experts, self.ranks.expert
        if experts is None:
            return None
        number = experts.num_experts // groups
        largest = max(layer.expert_bytes for layer in layers)
        return replace(
            experts, num_experts=number, bytes_per_expert=largest // number, groups=groups
        )

    def _outside(self, stage: int) -> Tensors:
        """Return what a rank of a stage holds outside the layers, vocabularies by their rows."""
        model, held = self.model, list[TensorInfo]()
        for tensor in model.outside:
            module, is_tower = owner(tensor.name), tensor.name in model.towers
            if tensor.name in model.not_loaded and not is_tower:
                continue
            known = module in INPUT_EMBEDDINGS or module in OUTPUT_HEADS or "norm" in module
            if tensor.dtype not in ("BF16", "F16", "F32") or not (known or is_tower):
                self._refuse(f"how {tensor.name} outside the layers is divided")
            if is_tower:
                held.append(self._divide_tower(tensor))
            elif stage in self._stages_of(module):
                held.append(tensor if "norm" in module else self._divide_rows(tensor))
        return tuple(held)

    def _divide_tower(self, tensor: TensorInfo) -> TensorInfo:
        """Return a rank's part of what reads images; all stages have it."""
        module, is_bias = _find_module(tensor.name)
        way, tensor_ranks = self._find_way(module), self.ranks.tensor
        if way == "whole" or (way == "inputs" and is_bias):
            return tensor
        at = {"outputs": 0, "inputs": -1}.get(way or "")
        if at is None or tensor.shape[at] % tensor_ranks:
            self._refuse(f"how {tensor.name} outside the layers is divided")
        return _scale(tensor, at, Fraction(1, tensor_ranks))

    def _stages_of(self, module: str) -> Collection[int]:
        """Return the stages that hold a module outside the layers."""
        everywhere = FACTS["on_all_stages"][self._engine]
        last = self.ranks.pipeline - 1
        is_embedding = module in INPUT_EMBEDDINGS
        part = "embedding" if is_embedding else "norm" if "norm" in module else "head"
        if self._is_among(everywhere.get(part, ())):
            return range(last + 1)
        if not is_embedding:
            return (last,)
        return (0,) if self.model.stores_head else (0, last)

    def _divide_rows(self, tensor: TensorInfo) -> TensorInfo:
        """Return a rank's rows of a vocabulary, padded as the engine does."""
        tensor_ranks, padded = self.ranks.tensor, pad_rows(tensor)
        if padded.shape[0] % tensor_ranks and self._engine == "sglang":
            padded = pad_rows(tensor, VOCABULARY_MULTIPLE * tensor_ranks)
        if padded.shape[0] % tensor_ranks:
            self._refuse(f"how the {padded.shape[0]} rows of {tensor.name} are divided")
        return _scale(padded, 0, Fraction(1, tensor_ranks))

    def _is_among(self, architectures: Collection[str]) -> bool:
        return not set(self.model.architecture.class_names).isdisjoint(architectures)

    @property
    def _engine(self) -> str:
        return family_of(self.runner.name or "")

    def _refuse(self, what: str, remedy: str = "") -> NoReturn:
        raise ExportError(
            f"{self.ranks.label}: {what} among ranks is not known, or {self.runner.name} cannot: "
            f"choose other numbers of them, {remedy}or plan for one GPU"
        )


def split_layers(num_layers: int, num_stages: int, engine: str) -> list[int]:
    """Return how many layers each stage of a pipeline has.

    Layers that are left over go to the last stages: with vLLM to those before the last one.
    """
    counts = [num_layers // num_stages] * num_stages
    first = -2 if engine == "vllm" else -1
    for number in range(num_layers % num_stages):
        counts[first - number] += 1
    return counts


def _find_module(name: str) -> tuple[str, bool]:
    """Return the module of a parameter by its name, and whether it is a bias of it."""
    module, _, last = name.rpartition(".")
    if last in ("weight", "bias"):
        return module, last == "bias"
    return name.removesuffix("_bias"), last.endswith("_bias")


def _resize(
    parameter: Parameter,
    cut: Callable[[Component, TensorInfo], TensorInfo],
    at: int,
    share: Fraction,
) -> Parameter:
    """Return a parameter of which each tensor is cut, and dimension ``at`` is a share of it."""
    tensors = tuple(cut(Component.WEIGHT, each) for each in parameter.tensors)
    beside = tuple((part, tuple(cut(part, each) for each in of)) for part, of in parameter.beside)
    logical = parameter.logical_shape and _scale_shape(parameter.logical_shape, at, share)
    return replace(parameter, tensors=tensors, beside=beside, logical_shape=logical)


def _cut(tensor: TensorInfo, kind: Kind, part: Component, at: int, share: Fraction) -> TensorInfo:
    """Return a slice of what is stored of a matrix; what is one value for all stays whole."""
    if kind is Kind.MXFP4 and part is Component.WEIGHT:
        at -= 1  # whose rows are stored by blocks
    if part is Component.INPUT_SCALE or len(tensor.shape) < 2:
        is_by_row = part is Component.SCALE and kind is Kind.FP8_CHANNEL and at == OUT
        if part is not Component.WEIGHT and not is_by_row:
            return tensor
        at = -1
    return tensor if tensor.shape[at] == 1 else _scale(tensor, at, share)


def _scale(tensor: TensorInfo, at: int, share: Fraction) -> TensorInfo:
    return tensor._replace(shape=_scale_shape(tensor.shape, at, share))


def _scale_shape(shape: tuple[int, ...], at: int, share: Fraction) -> tuple[int, ...]:
    sizes = list(shape)
    size = sizes[at] * share
    assert size.denominator == 1, "what does not divide was refused"
    sizes[at] = int(size)
    return tuple(sizes)

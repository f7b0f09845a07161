"""vLLM with bfloat16 weights packed without loss.

::

    vllm serve MODEL --quantization offplan_packed

vLLM finds ``register`` through the entry point ``offplan`` of ``vllm.general_plugins``. Linear
layers, routed experts and an output head that is not tied hold packed weights: 0.76 of the bytes,
the same bits. vLLM packs each layer as soon as that layer is loaded, so a GPU never holds the
whole model unpacked. The products are the runtime's own.

Source: vLLM 0.33.0, ``model_executor/layers/quantization``; its online quantisation is built alike.
"""

import logging
from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
from vllm import __version__ as vllm_version
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.fused_moe.activation import (
    ApplyMoEActivationConfig,
    apply_moe_activation,
)
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import (
    get_quantization_config,
    register_quantization_config,
)
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase
from vllm.model_executor.layers.quantization.online.moe_base import OnlineMoEMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.offloader import get_offloader

from offplan.engines.names import name_part
from offplan.engines.taken import QUANTIZATION, READ_IN_PLACE, Taken
from offplan.engines.vllm import WORKER_VERSIONS
from offplan.errors import ExportError
from offplan.forms.form import Component
from offplan.forms.host_kernels import PACKED, can_pack
from offplan.kernel_sizes import are_gathered
from offplan.runtime.forms.packing import pack_in_runs
from offplan.runtime.forms.reference import Components, expand

NAME = QUANTIZATION
CAPABILITY = 80
"""Compute capability, times 10, from which on the kernels' bfloat16 products exist."""
OTHER_EXPERTS = SimpleNamespace(weight_loader=lambda **_: False)
"""Stands for a weight that is packed where experts of other ranks are loaded: it takes none."""
CODES = "gpt_oss_mxfp4"
"""vLLM's own method for gpt-oss, whose experts are stored as MXFP4."""
PARTS = (
    Component.WEIGHT,
    Component.EXPONENT,
    Component.BASE,
    Component.PATCHES,
    Component.PATCH_BLOCKS,
)

# vLLM writes only what loggers below its own say
logger = logging.getLogger("vllm.offplan")


def register() -> None:
    """Make ``--quantization offplan_packed`` known to vLLM, of a version that it was tried with.

    Another version gets a warning instead: vLLM then refuses the name.
    """
    if vllm_version.partition("+")[0] in WORKER_VERSIONS:
        register_quantization_config(NAME)(PackedConfig)
        return
    logger.warning(
        "offplan: found vLLM %s; --quantization %s was tried with %s alone, and is left out",
        vllm_version,
        NAME,
        ", ".join(WORKER_VERSIONS),
    )


class PackedConfig(QuantizationConfig):
    """The layers that hold packed weights: all that vLLM multiplies, if their sizes allow it.

    If offplan's worker runs a plan, they are those that the plan packs and no other.
    """

    taken: Taken | None = None
    """Weights that a plan takes of the model, and those of them that it packs."""

    def __init__(self, beside: QuantizationConfig | None = None) -> None:
        """``beside`` holds routed experts as their checkpoint stores them; None if it is
        plain."""
        super().__init__()
        self._beside = beside

    def get_name(self) -> str:
        """Return the name for ``--quantization``, or that by which vLLM loads experts of codes."""
        return NAME if self._beside is None else CODES

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Return bfloat16: packing takes the bits of bfloat16 apart."""
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the compute capability from which on the kernels run."""
        return CAPABILITY

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return none: a plain bfloat16 checkpoint is all that it takes."""
        return []

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Return the name where it was asked for: vLLM takes a checkpoint's own method else."""
        return NAME if user_quant == NAME else None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "PackedConfig":
        """Refuse a checkpoint that is quantised already, but for gpt-oss; raises ExportError."""
        if not config:
            return cls()
        if config.get("quant_method") == CODES:
            return cls(get_quantization_config(CODES).from_config(config))
        raise ExportError(
            f"--quantization {NAME} packs plain bfloat16 weights: found a checkpoint that is "
            f"quantised already ({config.get('quant_method', 'by its config')}); leave the flag out"
        )

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return what holds and multiplies a layer's weights; None for what vLLM keeps plain."""
        if self.taken is not None:
            is_head = isinstance(layer, ParallelLMHead)
            if not (self.taken.packs_head if is_head else self.taken.packs(prefix)):
                return _hold_plain(layer)
        if isinstance(layer, RoutedExperts):
            return self._of_experts(layer, prefix)
        if isinstance(layer, LinearBase | ParallelLMHead):
            return PackedLinear(prefix)
        return None

    def _of_experts(self, layer: RoutedExperts, prefix: str) -> QuantizeMethodBase | None:
        if self._beside is not None:
            _say_plain(prefix, "the checkpoint has its experts as MXFP4")
            return self._beside.get_quant_method(layer, prefix)
        moe = layer.moe_config
        if moe.moe_parallel_config.dp_size > 1:
            raise ExportError(
                f"--quantization {NAME} does not multiply routed experts under data parallelism: "
                "leave out --data-parallel-size; --tensor-parallel-size divides each expert"
            )
        hidden, inner = moe.hidden_dim, moe.intermediate_size_per_partition
        if moe.has_bias:
            # of gpt-oss, which vLLM writes into its parameters past their loaders
            _say_plain(prefix, "its experts have biases")
            return UnquantizedFusedMoEMethod(moe)
        if not can_pack((moe.w13_num_shards * inner, hidden)) or not can_pack((hidden, inner)):
            _say_sizes(prefix, (moe.w13_num_shards * inner, hidden))
            return UnquantizedFusedMoEMethod(moe)
        return PackedExperts(moe, prefix)


class PackedLinear(OnlineLinearBase):
    """A linear layer, or an output head, by packed weights: whole, or a rank's shard of it."""

    activation_quant_key = None

    def __init__(self, prefix: str) -> None:
        """``prefix`` is the layer's name."""
        super().__init__()
        self._loads = _Loads(prefix)

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Create the weight, [out, in], on the meta device; plain where it cannot be packed."""
        sizes = input_size_per_partition, output_partition_sizes, input_size, output_size
        shape = sum(output_partition_sizes), input_size_per_partition
        if can_pack(shape) and params_dtype == torch.bfloat16:
            self._device = torch.get_default_device()
            if isinstance(layer, ParallelLMHead):
                loader = extra_weight_attrs["weight_loader"]
                extra_weight_attrs["weight_loader"] = _loading_on_host(layer, loader)
            super().create_weights(layer, *sizes, params_dtype, **extra_weight_attrs)
            return
        _say_sizes(self._loads.prefix, shape)
        layer.quant_method = plain = _hold_plain(layer)
        assert plain is not None
        plain.create_weights(layer, *sizes, params_dtype, **extra_weight_attrs)

    def tie_weights(self, layer: torch.nn.Module, embed_tokens: torch.nn.Module) -> torch.nn.Module:
        """Leave a head plain that shares the embedding's weight, whose rows are looked up."""
        get_layerwise_info(layer).reset()
        layer.quant_method = plain = UnquantizedEmbeddingMethod()
        return plain.tie_weights(layer, embed_tokens)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack the weight, and let go of its values."""
        if "weight" in layer._parameters:
            self._loads.require(layer, "weight")
            _hold(layer, "weight", pack_in_runs(layer.weight.data, self._device))

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return ``x``, [..., in], times the weight, and the bias: [..., out]."""
        parts = _held(layer, "weight")
        if not x.is_cuda:
            return torch.nn.functional.linear(x, expand(PACKED, parts, x.dtype), bias)
        from offplan.runtime.forms import operators  # needs triton

        return operators.linear_of_any(PACKED, parts, x, bias)


class PackedExperts(OnlineMoEMethodBase):
    """A layer's routed experts by packed weights: a rank's own, whole or its shard of each."""

    def __init__(self, moe: Any, prefix: str) -> None:
        """``prefix`` is the layer's name."""
        super().__init__(moe)
        self._loads = _Loads(prefix)

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> Any:
        """Return that of plain weights: what their activation is computed with."""
        return UnquantizedFusedMoEMethod.get_fused_moe_quant_config(self, layer)

    @property
    def supports_eplb(self) -> bool:
        """False: vLLM may not move experts between ranks."""
        return False

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack the experts' weights, and let go of their values."""
        names = [name for name in ("w13_weight", "w2_weight") if name in layer._parameters]
        self._loads.require(layer, *names)
        for name in names:
            _hold(layer, name, _pack_each(getattr(layer, name).data))
            if layer.expert_map is not None:
                # vLLM goes on with the experts of other ranks, and looks the weight up by its name
                setattr(layer, name, OTHER_EXPERTS)

    def apply(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """Send tokens, [tokens, hidden], through their experts, [tokens, k]: [tokens, hidden].

        vLLM multiplies shared experts apart, and adds what ranks make of their own experts.
        """
        num_tokens, num_chosen = topk_ids.shape
        if layer.apply_router_weight_on_input:
            x = x * topk_weights.to(x.dtype)  # of families that choose one expert a token
            topk_weights = torch.ones_like(topk_weights)
        experts = topk_ids.reshape(-1)
        if layer.expert_map is not None:
            own = layer.expert_map[experts.long()]
            # behind all of this rank, where no kernel looks
            experts = torch.where(own < 0, layer.local_num_experts, own)
        multiply = _multiplier(layer, experts)
        made = multiply("w13", x)
        inner = made.shape[1] // (2 if layer.activation.is_gated else 1)
        config = ApplyMoEActivationConfig.from_configs(
            self.moe, self.get_fused_moe_quant_config(layer)
        )
        activated = made.new_empty(len(made), inner)
        apply_moe_activation(layer.activation, activated, made, activation_config=config)
        made = multiply("w2", activated)
        weighted = made.view(num_tokens, num_chosen, -1) * topk_weights.unsqueeze(-1)
        if layer.expert_map is not None:  # what no kernel wrote may be anything
            is_own = (experts < layer.local_num_experts).view(num_tokens, num_chosen, 1)
            weighted = torch.where(is_own, weighted, 0)
        return weighted.sum(1).to(x.dtype)


def _loading_on_host(layer: ParallelLMHead, loader: Callable[..., None]) -> Callable[..., None]:
    """Return a loader by which a head is filled in host memory, from where it is packed.

    It is a model's largest matrix, and is loaded last. Unpacked on the GPU, it alone would have
    loading take more memory than all that runs there afterwards. vLLM asks the loader, on the meta
    device, what there is to load before it makes the weight.
    """

    @wraps(loader)
    def load(*args: Any, **kwargs: Any) -> None:
        get_layerwise_info(layer).restore_device = torch.device("cpu")
        loader(*args, **kwargs)

    return load


def _hold_plain(layer: torch.nn.Module) -> QuantizeMethodBase | None:
    """Return what holds and multiplies a layer's weights as they are stored."""
    if isinstance(layer, RoutedExperts):
        return UnquantizedFusedMoEMethod(layer.moe_config)
    if isinstance(layer, VocabParallelEmbedding):
        return UnquantizedEmbeddingMethod()
    return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None


def _multiplier(
    layer: RoutedExperts, experts: torch.Tensor
) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """Return what multiplies rows, each for as many pairs, by the expert of each pair, [pairs].

    It is given the name of a weight, ``w13`` or ``w2``. Pairs of an expert beyond the last one are
    not multiplied. Weights in host memory are read as the runtime reads them. Few experts are
    copied first, and of many nothing crosses twice where it need not.
    """
    if experts.is_cuda:
        from offplan.runtime.forms import operators  # needs triton
        from offplan.runtime.forms.gather import gather, sort_pairs

        pairs = sort_pairs(experts, layer.local_num_experts)
        _, order, starts = pairs
        # pairs of other ranks' experts are in no order
        is_gathered = layer.expert_map is None
        is_gathered = is_gathered and are_gathered(len(experts), layer.local_num_experts)

    def multiply(name: str, x: torch.Tensor) -> torch.Tensor:
        parts = _held(layer, f"{name}_weight")
        if x.is_cuda:
            begins, in_place = starts, hasattr(parts[Component.WEIGHT], READ_IN_PLACE)
            if in_place and is_gathered:
                in_place = False
                parts, begins = gather(parts, *pairs)
            return operators.multiply(PACKED, parts, x, order, begins, in_place=in_place)
        rows = x.repeat_interleave(len(experts) // len(x), 0)
        values = expand(PACKED, parts, x.dtype)[experts.clamp(max=layer.local_num_experts - 1)]
        return torch.einsum("pi,poi->po", rows, values)

    return multiply


def _pack_each(matrices: torch.Tensor) -> Components:
    """Pack those of experts, [experts, out, in]; each has room for the most patches of one."""
    held: Components = {}
    patches = []
    for number, values in enumerate(matrices):
        parts = pack_in_runs(values)
        patches.append(parts.pop(Component.PATCHES))
        for part, value in parts.items():
            if part not in held:
                held[part] = value.new_empty(len(matrices), *value.shape)
            held[part][number] = value
    reserve = max(map(len, patches))
    rooms = [(0, 0, 0, reserve - len(each)) for each in patches]
    held[Component.PATCHES] = torch.stack([*map(torch.nn.functional.pad, patches, rooms)])
    return held


def _hold(layer: torch.nn.Module, name: str, parts: Components) -> None:
    """Hold a weight by its parts, in place of its values."""
    del layer._parameters[name]
    parts = _move_together(parts)
    for part in PARTS:
        packed = torch.nn.Parameter(parts[part], requires_grad=False)
        layer.register_parameter(name_part(name, part), packed)
    # an offloader that knows packed weights takes them before the next layer is loaded
    if (take := getattr(get_offloader(), "take_packed", None)) is not None:
        take(layer, [name_part(name, part) for part in PARTS])


def _move_together(parts: Components) -> Components:
    """Move parts to memory of their own, out of what packing has left.

    torch gives back whole segments alone, and parts lie in segments that values of other sizes
    were in. Qwen3-8B in 12.7 GiB held 1.1 GiB more on an H100 than its plan says.
    """
    if not parts[Component.WEIGHT].is_cuda:
        return parts
    torch.cuda.empty_cache()
    return {part: value.clone() for part, value in parts.items()}


def _held(layer: torch.nn.Module, name: str) -> Components:
    return {part: getattr(layer, name_part(name, part)) for part in PARTS}


class _Loads:
    """The check that vLLM's loader filled the weights of a layer before they are packed.

    A model may write its weights past the loaders of parameters, or their file lacks them.
    """

    def __init__(self, prefix: str) -> None:
        """``prefix`` is the layer's name; vLLM is building the model."""
        self.prefix = prefix
        self._is_made_up = get_current_vllm_config().load_config.load_format == "dummy"

    def require(self, layer: torch.nn.Module, *names: str) -> None:
        """Raise ExportError if weights of the layer are missing; vLLM pads heads alone.

        ``names`` are those of its parameters that are to be packed.
        """
        loaded = get_layerwise_info(layer).load_numel
        expected = sum(layer.get_parameter(name).numel() for name in names)
        is_filled = loaded if isinstance(layer, ParallelLMHead) else loaded >= expected
        if not is_filled and not self._is_made_up:
            raise ExportError(
                f"vLLM loaded {loaded} of {expected} weights of {self.prefix} by the loaders of "
                f"its parameters, and packs no others: leave out --quantization {NAME}, or plan "
                "again with --no-packing"
            )


def _say_plain(name: str, why: str) -> None:
    """List a layer that stays as it is stored."""
    logger.info("offplan: %s stays as it is stored: %s", name, why)


def _say_sizes(name: str, shape: tuple[int, int]) -> None:
    """List a layer that stays as it is stored for its sizes."""
    rows, size = shape
    _say_plain(
        name,
        f"{rows} rows of {size} bfloat16 weights cannot be packed, which takes rows by 64 and "
        "weights of a row by 8",
    )

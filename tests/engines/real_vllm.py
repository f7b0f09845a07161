"""vLLM's own classes, built of tiny configs on the meta device: no GPU, no weights, no kernels."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.runtime.families import OWN_SIZES, SIZES, VISION

Parameters = dict[str, int]
"""Bytes of a layer's parameters by their names."""

OTHER_SIZES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"topk_method": "noaux_tc"},
    "deepseek_v32": {"topk_method": "noaux_tc"},
    "falcon": {"ffn_hidden_size": 4 * SIZES["hidden_size"]},
    "glm_moe_dsa": {"topk_method": "noaux_tc"},
    "gpt2": {"activation_function": "gelu"},
    "kimi_k25": {"projection_hidden_size": 16, "tie_word_embeddings": False},
    "kimi_k25_text": {"topk_method": "noaux_tc"},
    "minimax_m2": {"scoring_func": "sigmoid", "use_routing_bias": True},
    "qwen3_moe": {"shared_expert_intermediate_size": 0},
    "qwen3_vl_moe_text": {"norm_topk_prob": True, "shared_expert_intermediate_size": 0},
}
"""What vLLM wants beside what transformers does."""
WITH_TOWERS = {
    "Gemma3ForConditionalGeneration": "gemma3",
    "Llama4ForConditionalGeneration": "llama4",
    "Mistral3ForConditionalGeneration": "mistral3",
    "KimiK25ForConditionalGeneration": "kimi_k25",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
}
"""The model types of architectures that read images, too."""


@cache
def families() -> dict[str, str]:
    """The model type of each architecture, of those that are text alone where there are several."""
    found: dict[str, str] = {}
    for family, classes in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        name = classes if isinstance(classes, str) else classes[0]
        if name not in found or family.endswith("_text"):
            found[name] = family
    return found | {"LlamaForCausalLM": "llama", "GPT2LMHeadModel": "gpt2"}


def breakable_architectures() -> frozenset[str]:
    """List those that vLLM captures in breakable CUDA graphs by default."""
    from vllm.config import vllm

    found: frozenset[str] = vllm.DEFAULT_BREAKABLE_CUDAGRAPH_ARCHITECTURES
    return found


def next_filled(turn: int, prefetch_step: int, num_turns: int) -> int:
    """The turn whose layer vLLM copies once that of a turn has run."""
    from vllm.model_executor.offloader import prefetch

    found: int = prefetch._get_next_prefetch_index(turn, prefetch_step, num_turns)
    return found


def write_config(folder: Path, architecture: str) -> Path:
    """Write the config of a tiny model of an architecture."""
    family = {**families(), **WITH_TOWERS}[architecture]
    has_towers = architecture in WITH_TOWERS
    # with an index DeepSeek-V2's attention is sparse, too
    indexed = family in ("deepseek_v32", "glm_moe_dsa")
    sizes = {k: v for k, v in SIZES.items() if indexed or not k.startswith("index_")}
    sizes |= OWN_SIZES.get(f"{family}_text" if has_towers else family, {})
    sizes = {name: size for name, size in sizes.items() if size is not None}
    if has_towers:
        # no published Qwen3.5 has layers of its tower merged by themselves
        merged = [] if "qwen3_5" in family else VISION["deepstack_visual_indexes"]
        sizes |= OTHER_SIZES.get(f"{family}_text", {})
        vision = {**VISION, "deepstack_visual_indexes": merged}
        sizes = {"text_config": sizes, "vision_config": vision}
    # of some families vLLM registers a config of its own, for all of the process
    CONFIG_MAPPING._extra_content.pop(family, None)
    config = CONFIG_MAPPING[family](**sizes)
    data = {**config.to_dict(), **OTHER_SIZES.get(family, {})}
    data |= {"architectures": [architecture], "dtype": "bfloat16", "model_type": family}
    path = folder / "config.json"
    path.write_text(json.dumps(data, default=str))
    return path


def parse_command(words: Sequence[str]) -> Any:
    """Read the words after ``vllm`` with vLLM's own parser and validation of its config."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.common.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    # where a config file names the model, ``serve`` itself is read as a tag
    rest = words if "--config" in words else words[1:]
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(list(rest))
    if parsed.model_tag not in (None, "serve"):
        parsed.model = parsed.model_tag
    arguments = EngineArgs.from_cli_args(parsed)
    arguments.skip_tokenizer_init, arguments.enforce_eager = True, True
    return arguments.create_engine_config()


def build(
    config: Any, offloader: Any, folder: Path, stage: int = 0, rank: int | None = None
) -> Any:
    """Build the model of an engine's config, whose layers the offloader is given; return it.

    It is what the first rank of a stage has, played by this process with nobody else there; or that
    of a ``rank``, where all that divide the model are built at once, each by a process of its own.
    """
    from vllm.model_executor.model_loader.utils import initialize_model

    moves = torch.nn.Module.to
    # Kimi's tower is moved once it is built, and what is on the meta device cannot be
    torch.nn.Module.to = lambda module, *_, **__: module  # type: ignore[method-assign, assignment]
    try:
        with playing_a_rank(config, folder, stage, rank, offloader), torch.device("meta"):
            return initialize_model(vllm_config=config)
    finally:
        torch.nn.Module.to = moves  # type: ignore[method-assign]


def load(
    config: Any, folder: Path, rank: int | None = None, offloader: Any = None, stage: int = 0
) -> Any:
    """Load a checkpoint's weights by vLLM's own loader, on the CPU; return the model."""
    from vllm.model_executor.model_loader import get_model_loader

    config.device_config.device = torch.device("cpu")
    torch.accelerator.empty_cache = lambda: None  # there is none
    with playing_a_rank(config, folder, stage, rank, offloader):
        loader = get_model_loader(config.load_config)
        return loader.load_model(vllm_config=config, model_config=config.model_config)


@contextmanager
def playing_a_rank(
    config: Any, folder: Path, stage: int = 0, rank: int | None = None, offloader: Any = None
) -> Iterator[None]:
    """Have vLLM take this process for a rank of a config, as ``build`` says."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        init_distributed_environment,
        initialize_model_parallel,
        parallel_state,
    )
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as experts
    from vllm.model_executor.layers.fused_moe.oracle.int_wna16 import WNA16MoEBackend
    from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import map_mxfp4_backend
    from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.model_executor.layers.quantization import modelopt, mxfp4
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_wna16 as wna16,
    )
    from vllm.model_executor.offloader import set_offloader
    from vllm.platforms.cpu import CpuPlatform

    def get_attention(
        cls: Any, backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> Any:
        # there is no sparse attention for the CPU, and it has no say in names
        return choose(cls, backend, attn_selector_config._replace(use_sparse=False), num_heads)  # type: ignore[misc]

    choose = getattr(CpuPlatform.get_attn_backend_cls, "chosen", None)
    choose = choose or CpuPlatform.get_attn_backend_cls.__func__
    get_attention.chosen = choose  # type: ignore[attr-defined]

    def select_backend(*_: Any, **__: Any) -> tuple[Any, None]:
        return UnquantizedMoeBackend.TRITON, None  # which has no say in names, and needs a GPU

    experts.select_unquantized_moe_backend = select_backend
    chosen = config.kernel_config.moe_backend
    backend = map_mxfp4_backend("marlin" if chosen == "auto" else chosen)[0]  # on any GPU's behalf
    mxfp4.select_mxfp4_moe_backend = lambda *_, **__: (backend, None)
    modelopt.select_nvfp4_moe_backend = lambda **_: (NvFp4MoeBackend.MARLIN, None)
    modelopt.init_nvfp4_linear_kernel = lambda **_: SimpleNamespace(input_quant_key=lambda *_: None)
    wna16.select_wna16_moe_backend = lambda **_: (WNA16MoEBackend.TRITON, None)
    CpuPlatform.get_attn_backend_cls = classmethod(get_attention)
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            ranks = 1 if rank is None else config.parallel_config.world_size
            store, own = f"file://{folder / 'store'}", rank or 0
            init_distributed_environment(ranks, own, store, own, backend="gloo")
            initialize_model_parallel(ranks, 1)
        if parallel_state._EP is None and rank is None:  # the first model had no experts
            parallel_state._EP = parallel_state.init_model_parallel_group(
                [[0]], 0, "gloo", group_name="ep"
            )
        if rank is None:
            become_rank(config.parallel_config, stage)
        torch.set_default_dtype(torch.bfloat16)
        set_offloader(offloader)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)
            set_offloader(None)


def lay_out_by_triton(num_rows: int, num_columns: int) -> list[int]:
    """Bytes of a matrix of MXFP4 and its scales in Triton's layouts for Hopper and Blackwell."""
    from vllm.utils.import_utils import import_triton_kernels

    import_triton_kernels()
    from triton_kernels.tensor_details import layout

    codes = torch.zeros(1, num_rows, num_columns // 2, dtype=torch.uint8)
    scales = torch.zeros(1, num_rows, num_columns // 32, dtype=torch.uint8)
    padded = torch.nn.functional.pad(scales, (0, -scales.shape[-1] % 4))  # on Hopper, by vLLM
    hopper, values = layout.HopperMXScaleLayout, layout.HopperMXValueLayout
    laid_out = (
        (values(codes.mT.shape, mx_axis=1), codes, hopper(padded.mT.shape, mx_axis=1), padded),
        (
            *(layout.BlackwellMXValueLayout(codes.mT.shape), codes),
            *(layout.BlackwellMXScaleLayout(scales.mT.shape), scales),
        ),
    )
    return [
        of_codes.swizzle_data(each.mT).nbytes + of_scales.swizzle_data(beside.mT).nbytes
        for of_codes, each, of_scales, beside in laid_out
    ]


def become_rank(parallel_config: Any, stage: int) -> None:
    """Have vLLM take this process for the first rank of a stage, with nobody else there."""
    from vllm.distributed import parallel_state

    tensor, stages = parallel_state._TP, parallel_state._PP
    tensor.world_size = parallel_config.tensor_parallel_size
    stages.world_size = parallel_config.pipeline_parallel_size
    stages.rank_in_group = stage
    stages.ranks = [number - stage for number in range(stages.world_size)]  # ours is 0


def record_layers(config: Any, folder: Path, rank: int | None = None) -> list[Parameters]:
    """List what vLLM calls the parameters of each layer that an offloader would be given."""
    return record_stage(config, folder, 0, rank)[0]


def record_stage(
    config: Any, folder: Path, stage: int, rank: int | None = None
) -> tuple[list[Parameters], int]:
    """List them for a rank of a stage, and count the bytes outside them, what is tied once."""
    from vllm.model_executor.offloader import BaseOffloader

    found: list[Parameters] = []

    class Recorder(BaseOffloader):  # type: ignore[misc]
        def wrap_modules(self, modules_generator: Any, prefix: str = "") -> list[Any]:
            modules = list(modules_generator)
            found.extend({n: p.nbytes for n, p in m.named_parameters()} for m in modules)
            return modules

    named = build(config, Recorder(), folder, stage, rank).named_parameters()
    return found, sum(each.nbytes for name, each in named if ".layers." not in f".{name}")


def record_ranks(folder: Path, ranks: int) -> list[list[Parameters]]:
    """List the same for each of the ranks that divide the model in a folder."""
    words = ["serve", str(folder), "--tensor-parallel-size", str(ranks), "--max-model-len", "64"]
    code = (
        "import json, sys\nfrom pathlib import Path\n"
        "from tests.engines.real_vllm import parse_command, record_layers\n"
        "words, folder, rank = json.loads(sys.argv[1])\n"
        "layers = record_layers(parse_command(words), Path(folder), rank)\n"
        "print(json.dumps(layers), flush=True)"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, json.dumps([words, str(folder), rank])],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        for rank in range(ranks)
    ]
    said = [process.communicate(timeout=300)[0] for process in started]
    return [json.loads(text.splitlines()[-1]) for text in said]


def record_moved(config: Any, folder: Path, stage: int = 0) -> list[list[str]]:
    """List, layer by layer, the parameters that vLLM's own offloader takes for a config."""
    from vllm.model_executor import offloader as offloaders
    from vllm.model_executor.offloader import prefetch, uva

    layers: list[Any] = []
    taken: dict[int, list[str]] = {}

    class ModuleOffloader:
        def __init__(self, *, module: Any, whitelist_param_names: list[str], **_: Any) -> None:
            taken[id(module)] = whitelist_param_names

    streams = torch.cuda.Stream
    replaced = prefetch._ModuleOffloader, uva.get_accelerator_view_from_cpu_tensor
    torch.cuda.Stream = object  # type: ignore[assignment, misc]
    prefetch._ModuleOffloader = ModuleOffloader
    uva.get_accelerator_view_from_cpu_tensor = torch.Tensor.to
    offloader = offloaders.create_offloader(config.offload_config)
    torch.cuda.Stream = streams  # type: ignore[misc]
    with suppress(AttributeError):
        offloader.uva_offloading = True
    wrap = offloader.wrap_modules
    moves = torch.Tensor.to

    def wrap_modules(modules: Any, prefix: str = "") -> Any:
        layers.extend(wrap(modules, prefix))
        return layers

    offloader.wrap_modules = wrap_modules
    # a meta tensor's bytes stay where they are
    torch.Tensor.to = lambda tensor, *_, **__: tensor  # type: ignore[method-assign, assignment]
    try:
        build(config, offloader, folder, stage)
    finally:
        torch.Tensor.to = moves  # type: ignore[method-assign]
        prefetch._ModuleOffloader, uva.get_accelerator_view_from_cpu_tensor = replaced
    for layer in layers:
        marked = [n for n, p in layer.named_parameters() if hasattr(p, "_vllm_is_uva_offloaded")]
        taken.setdefault(id(layer), marked)
    return [taken[id(layer)] for layer in layers]

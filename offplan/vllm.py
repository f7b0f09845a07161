"""A worker of vLLM that runs a plan itself, any that vLLM's flags cannot say included.

::

    vllm serve MODEL --worker-cls offplan.vllm.Worker --additional-config '{"offplan": "plan.yaml"}'

Before the model is built it sets an offloader that drives vLLM's own two, parameter by parameter;
after loading it holds what lies where against the plan, and vLLM does not start where they differ.
This module alone imports vllm, and no other imports it.

Source: vLLM 0.33.0, ``model_executor/offloader`` and ``v1/worker``.
"""

import logging
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from vllm import __version__ as vllm_version
from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.distributed import get_pp_group
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.offloader import (
    PrefetchOffloader,
    UVAOffloader,
    prefetch,
    set_offloader,
    should_pin_memory,
)
from vllm.v1.worker.gpu_worker import Worker as GPUWorker

from offplan.capabilities.ranks import Ranks
from offplan.checkpoint.open import open_model
from offplan.checkpoint.tables import INPUT_EMBEDDINGS
from offplan.checkpoint.tensors import CONFIG_NAME
from offplan.engines.names import name_part
from offplan.engines.taken import IN_FORCE, QUANTIZATION, READ_IN_PLACE, Taken, TakenParameter
from offplan.engines.vllm import WORKER_VERSIONS
from offplan.engines.worker import find_taken
from offplan.errors import DriftError, ExportError
from offplan.forms.form import Component
from offplan.library.planned import open_planned_model
from offplan.plan import Backend, Plan, load_plan

ALL = 2**62
TOLD = 5
"""Differences that an error tells in full."""
PLACES = {Backend.PREFETCH: "copied through the ring", Backend.UVA: "read in place"}
RESIDENT = "resident"

# vLLM writes only what loggers below its own say
logger = logging.getLogger("vllm.offplan")


class Worker(GPUWorker):
    """vLLM's worker for a GPU, with the plan that ``--additional-config`` names in force."""

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load the model as the plan has it.

        Raises PlanError and DriftError for a plan that is not this model's, and ExportError for
        what vLLM cannot do. Raises DriftError if the model was not loaded as the plan says.
        """
        config = self.vllm_config
        stages = config.parallel_config.pipeline_parallel_size
        taken = take_plan(config, get_pp_group().rank_in_group if stages > 1 else 0)
        self._streams = taken.streams
        # Compiled layers hold the waits for their copies, and vLLM keeps them on disk by what its
        # config says: another plan under the same name must not find them.
        config.additional_config["offplan_sha256"] = taken.fingerprint
        if taken.packs_any:
            config.quant_config.taken = taken
        offloader = PlanOffloader(taken, lambda: self.model_runner.get_model())
        set_offloader(offloader)
        with offloader.moving_embedding():
            super().load_model(load_dummy_weights=load_dummy_weights)
        offloader.verify()
        # or the room of an embedding that was moved would stay torch's, part of it in use
        torch.cuda.empty_cache()
        logger.info("%s%s", IN_FORCE, taken.describe())

    def determine_available_memory(self) -> int:
        """Compile and run the model once; what that took goes back before a KV cache lies in it."""
        available: int = super().determine_available_memory()
        torch.cuda.empty_cache()
        return available

    def compile_or_warm_up_model(self) -> Any:
        """Warm up and capture; by now attention may have had vLLM choose other graphs."""
        require_whole_graphs(self.vllm_config, self._streams)
        return super().compile_or_warm_up_model()

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """Refuse to load other weights, which would be written into slots of the ring."""
        raise ExportError("reload_weights would write into the ring of the plan: start vLLM again")


class PlanOffloader(PrefetchOffloader):
    """Leaves in host memory what a plan takes, and nothing else.

    vLLM's prefetching offloader takes of each layer what the plan does. Its ring, its stream and
    its events, which captured graphs hold, are used as they are. vLLM's other offloader moves what
    is read in place. Packed weights have parts to take only once vLLM has packed them, each as soon
    as it is loaded.
    """

    def __init__(self, taken: Taken, find_model: Callable[[], torch.nn.Module]) -> None:
        """``taken`` is what this rank leaves in host memory."""
        super().__init__(group_size=1, num_in_group=1, prefetch_step=max(1, taken.num_slots))
        self._taken, self._find_model = taken, find_model
        self._layers: list[torch.nn.Module] = []
        self._homes: dict[torch.nn.Module, tuple[int, str]] = {}
        self._copied: dict[int, Any] = {}
        self._packs_head = False
        self._embedding: torch.nn.Module | None = None

    def wrap_modules(
        self, modules_generator: Iterable[torch.nn.Module], prefix: str = ""
    ) -> list[torch.nn.Module]:
        """Take what the plan takes of each decoder layer as it is built."""
        if self._layers:
            raise ExportError("the model has a second stack of layers, which no plan knows of")
        for index, layer in enumerate(modules_generator):
            if index >= len(self._taken.layers):
                raise DriftError(f"vLLM builds more layers than the plan's {index}")
            self._layers.append(layer)
            self._take(index, layer)
        for number, each in enumerate(self.module_offloaders):
            self._hook_module_forward(number, each.module)
        return self._layers

    def _take(self, index: int, layer: torch.nn.Module) -> None:
        """Take what is there of a layer that was built; ``take_packed`` is given the rest."""
        wanted, built = self._taken.layers[index], dict(layer.named_parameters())
        if self._taken.packed:
            self._homes |= {m: (index, path) for path, m in layer.named_modules()}
        _refuse(self._find_misfits(index, built, is_whole=False))
        _read_in_place(p for n, p in built.items() if n in wanted and _is_read(wanted[n]))
        device = next((p.device for p in built.values() if not p.is_meta), None)
        if copied := [name for name, each in wanted.items() if not _is_read(each)]:
            self.module_offloaders.append(
                prefetch._ModuleOffloader(
                    mode=self.mode,
                    module=layer,
                    copy_stream=self.copy_stream,
                    whitelist_param_names=[name for name in built if name in copied],
                    layer_idx=len(self.module_offloaders),
                )
            )
            self._copied[index] = self.module_offloaders[-1]
            if device is not None:  # the first parameter may have none before it is packed
                self._copied[index].device = device

    def take_packed(self, module: torch.nn.Module, names: Iterable[str]) -> None:
        """Take what the plan takes of a weight's parts, as soon as vLLM has packed it.

        ``names`` are those of the module's parameters. Raises DriftError for parts of other sizes,
        which a weight has that needs more patches than the plan has room for.
        """
        if module not in self._homes:
            self._packs_head = True  # nothing else is packed outside the layers, or taken there
            return
        index, path = self._homes[module]
        layer, wanted = self._layers[index], self._taken.layers[index]
        whole = {f"{path}.{name}": module.get_parameter(name) for name in names}
        _refuse(
            f"{each} (a weight that needs more patches than a plan has room for stays as it is "
            f"stored by --leave-unpacked {self._taken.first_layer + index}.{path})"
            for each in self._find_misfits(index, whole, only=whole)
        )
        taken = [name for name in whole if name in wanted]
        _read_in_place(whole[name] for name in taken if _is_read(wanted[name]))
        for name in taken:
            if not _is_read(wanted[name]):
                held = prefetch._CpuParamOffloader(module=layer, param_name=name)
                self._copied[index]._param_offloaders[name] = held

    def _find_misfits(
        self,
        index: int,
        held: Mapping[str, torch.Tensor],
        *,
        is_whole: bool = True,
        only: Container[str] | None = None,
    ) -> Iterator[str]:
        """Compare what a layer holds; parts of packed weights only once ``is_whole``."""
        packed = self._taken.packed[index] if self._taken.packed else {}
        plain = {n: each.nbytes for n, each in self._taken.layers[index].items() if n not in packed}
        for name, nbytes in {**plain, **(packed if is_whole else {})}.items():
            if only is not None and name not in only:
                continue
            if name not in held:
                yield f"layer {index} has no {name}"
            elif (found := held[name].nbytes) != nbytes:
                yield f"{name} of layer {index} takes {found} bytes, expected {nbytes}"
        for name in held:
            if name.endswith(name_part("", Component.WEIGHT)) and name not in packed:
                yield f"{name} of layer {index} is packed, expected it as it is stored"

    @contextmanager
    def moving_embedding(self) -> Iterator[None]:
        """Have the input embedding leave the GPU as soon as it is built, if the plan takes it.

        Else it would lie there beside all that is loaded after it, and loading would take more
        memory than the plan has.
        """
        if self._taken.embedding is None:
            yield
            return

        def move(_: torch.nn.Module, name: str, built: torch.nn.Module | None) -> None:
            if name in INPUT_EMBEDDINGS and isinstance(built, VocabParallelEmbedding):
                UVAOffloader(ALL, {"weight"}).wrap_modules(iter([built]))

        hook = register_module_module_registration_hook(move)
        try:
            yield
        finally:
            hook.remove()

    def post_init(self) -> None:
        """Move the embedding, then allocate the ring and start its first copies."""
        if self._taken.embedding is not None:
            self._embedding = self._move_embedding(self._taken.embedding.nbytes)
        super().post_init()

    def _move_embedding(self, num_bytes: int) -> torch.nn.Module:
        modules = self._find_model().named_modules(remove_duplicate=False)
        named = [(name, m) for name, m in modules if isinstance(m, VocabParallelEmbedding)]
        inputs = {m for name, m in named if name.rpartition(".")[2] in INPUT_EMBEDDINGS}
        if len(inputs) != 1:
            raise ExportError(
                f"found {len(inputs)} input embeddings in vLLM's model, expected the one that the "
                "plan has on the host; plan with the embedding on the device"
            )
        (found,) = inputs
        weight = found.weight
        for name, module in named:
            is_input = name.rpartition(".")[2] in INPUT_EMBEDDINGS
            # a head that is packed has no weight
            if not is_input and getattr(module, "weight", None) is weight:
                raise ExportError(
                    f"vLLM has tied {name} to the input embedding, which the plan has on the host: "
                    "each step would read all of it over the link"
                )
        if weight.nbytes != num_bytes:
            raise DriftError(
                f"the input embedding takes {weight.nbytes} bytes in vLLM, expected {num_bytes}"
            )
        UVAOffloader(ALL, {"weight"}).wrap_modules(iter([found]))
        return found

    def verify(self) -> None:
        """Raise DriftError unless each parameter of the layers lies where the plan has it."""
        _refuse(self._find_differences())

    def _find_differences(self) -> Iterator[str]:
        if len(self._layers) != len(self._taken.layers):
            yield f"the offloader was given {len(self._layers)} of {len(self._taken.layers)} layers"
        snapshot = torch.cuda.memory_snapshot()
        blocks = [range(b["address"], b["address"] + b["total_size"]) for b in snapshot]
        copied = {
            (id(each.module), name): held
            for each in self.module_offloaders
            for name, held in each._param_offloaders.items()
        }
        for index, layer in enumerate(self._layers):
            held = dict(layer.named_parameters())
            yield from self._find_misfits(index, held)
            for name, parameter in held.items():
                wanted = self._taken.layers[index].get(name)
                found = find_place(parameter, copied.get((id(layer), name)), blocks)
                if found != (expected := PLACES[wanted.backend] if wanted else RESIDENT):
                    yield f"{name} of layer {index} is {found}, expected {expected}"
        ring_bytes = self.buffer_pool.total_bytes if self.buffer_pool else 0
        if ring_bytes != self._taken.ring_bytes:
            yield f"the ring takes {ring_bytes} bytes, expected {self._taken.ring_bytes}"
        if self._packs_head != self._taken.packs_head:
            yield f"the output head is {'' if self._packs_head else 'not '}packed"
        if self._taken.embedding is not None:
            moved = self._embedding
            found = "not found" if moved is None else find_place(moved.weight, None, blocks)
            if found != PLACES[Backend.UVA]:
                yield f"the input embedding is {found}, expected {PLACES[Backend.UVA]}"


def take_plan(config: VllmConfig, stage: int = 0) -> Taken:
    """Read the plan that vLLM was given, and what it takes of what a rank of a stage builds.

    Raises ExportError for what vLLM, as it was started, cannot do, PlanError and DriftError for a
    plan that is not this model's.
    """
    version = vllm_version.partition("+")[0]
    if version not in WORKER_VERSIONS:
        raise ExportError(
            f"found vLLM {vllm_version}, expected one that offplan's worker was tried with: "
            f"{', '.join(WORKER_VERSIONS)}; install that, or use flags (offplan export --engine "
            "vllm)"
        )
    given = config.additional_config
    if not isinstance(given, dict) or not isinstance(given.get("offplan"), str):
        raise ExportError(
            "offplan's worker needs a plan, and was given none: expected --additional-config "
            '\'{"offplan": "plan.yaml"}\''
        )
    plan = load_plan(Path(given["offplan"]))
    source, revision = config.model_config.model, config.model_config.revision
    if Path(source).exists():
        is_config = config.load_config.load_format == "dummy"
        source, revision = str(Path(source) / CONFIG_NAME) if is_config else source, None
    model = open_planned_model(plan, open_model(source, revision=revision))
    parallel = config.parallel_config
    tensor, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    divides_experts = parallel.enable_expert_parallel and model.experts is not None
    ranks = Ranks(tensor, stages, tensor if divides_experts else 1)
    taken = find_taken(plan, model, WORKER_VERSIONS[version], ranks, stage)
    require_known_config(config, plan, taken)
    require_whole_graphs(config, taken.streams)
    return taken


def require_known_config(config: VllmConfig, plan: Plan, taken: Taken) -> None:
    """Raise ExportError for what vLLM was asked to do that the plan could not survive."""
    parallel, model, offload = config.parallel_config, config.model_config, config.offload_config
    ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    moe_backend = config.kernel_config.moe_backend
    dtype = str(model.dtype).removeprefix("torch.")
    stored = getattr(model.hf_config, "quantization_config", None)
    packs = taken.packs_any
    by_option = model.quantization == QUANTIZATION
    by_plan = packs and by_option
    quantises = model.quantization and (stored is None or by_option) and not by_plan
    quantises = quantises or model.quantization_config is not None
    refused = {
        "data or context parallelism": parallel.world_size_across_dp != ranks
        or parallel.decode_context_parallel_size > 1,
        "EPLB, which writes experts into slots of the ring": parallel.enable_eplb,
        "micro-batches (DBO)": parallel.use_ubatching,
        "speculative decoding, whose draft has layers of its own": config.speculative_config,
        "LoRA, which renames what it wraps": config.lora_config,
        "sleep mode": model.enable_sleep_mode,
        "weight transfer": config.weight_transfer_config,
        "quantisation while loading, which replaces parameters": quantises,
        f"no --quantization {QUANTIZATION}, by which the plan packs": packs and not by_plan,
        "offloading by vLLM's own flags beside the plan": offload.uva.cpu_offload_gb
        or offload.prefetch.offload_group_size,
        "host memory that is not page-locked": not should_pin_memory(),
        "reading in place switched off": not UVAOffloader(0).uva_offloading,
        f"--dtype {dtype}, expected {plan.model.dtype}": dtype != plan.model.dtype,
        # other kernels want weights laid out anew, or read them more than once
        f"--moe-backend {moe_backend}, expected triton where experts are read in place": (
            taken.reads_experts and moe_backend != "triton"
        ),
    }
    for what, is_found in refused.items():
        if is_found:
            raise ExportError(f"vLLM was started with {what}: the plan cannot be run with that")


def require_whole_graphs(config: VllmConfig, streams: bool) -> None:
    """Raise ExportError, naming the phase, where graphs in pieces would end each copy early."""
    mode = config.compilation_config.cudagraph_mode
    if not streams or not mode:
        return
    pieces = {"decode": mode.decode_mode(), "prefill": mode.mixed_mode()}
    found = [phase for phase, of in pieces.items() if of == CUDAGraphMode.PIECEWISE]
    if found or is_breakable_cudagraph_enabled():
        raise ExportError(
            f"vLLM would capture {' and '.join(found) or 'prefill'} in pieces (cudagraph_mode "
            f"{mode.name}), and joins the copies under way at the end of each: expected whole "
            "graphs, or none; start it with --compilation-config "
            '\'{"cudagraph_mode": "FULL_DECODE_ONLY"}\' and VLLM_USE_BREAKABLE_CUDAGRAPH=0'
        )


def _read_in_place(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Have vLLM's other offloader move parameters, which looks where a module's first one lies."""
    beside = torch.nn.ParameterList(parameters)
    if len(beside):
        UVAOffloader(ALL).wrap_modules(iter([beside]))


def _is_read(parameter: TakenParameter) -> bool:
    return parameter.backend is Backend.UVA


def find_place(parameter: Any, held: Any, blocks: list[range]) -> str:
    """Say where a parameter lies: ``held`` by the ring, or in ``blocks`` of the GPU's memory."""
    address = parameter.data_ptr()
    on_device = not parameter.nbytes or any(address in block for block in blocks)
    if held is not None:
        stored, slot = held._cpu_storage, held._gpu_buffer
        if stored is None or slot is None or not on_device or address != slot.data_ptr():
            return "no longer in the ring"
        is_whole = stored.device.type == "cpu" and stored.nbytes == parameter.nbytes
        locked = is_whole and stored.is_pinned()
        return PLACES[Backend.PREFETCH] if locked else "not in page-locked memory"
    if on_device:
        return RESIDENT
    # a view of host memory is on the GPU as tensors go, and torch did not allocate it there
    is_view = getattr(parameter, READ_IN_PLACE, False) and parameter.device.type != "cpu"
    return PLACES[Backend.UVA] if is_view else f"on {parameter.device}"


def _refuse(differences: Iterable[str]) -> None:
    if wrong := [*differences]:
        more = f" and {len(wrong) - TOLD} more" if len(wrong) > TOLD else ""
        raise DriftError(
            f"vLLM does not hold the model as the plan has it: {'; '.join(wrong[:TOLD])}{more}. It "
            "is not started: plan for the model that it is given, without what it moves"
        )

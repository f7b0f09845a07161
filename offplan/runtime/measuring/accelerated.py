"""The same model under accelerate's CPU offloading: what a user would otherwise have."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from offplan.errors import InputError
from offplan.held.held import hold
from offplan.held.runtimes import RUNTIMES
from offplan.progress import Progress, Stages, silent
from offplan.runtime.device import on_device
from offplan.runtime.executors import EXECUTORS
from offplan.runtime.faults import memory_limits
from offplan.runtime.loading.capability import find_passes
from offplan.runtime.loading.loaded import assign, find_places, materialise_buffers
from offplan.runtime.loading.loader import load_weights
from offplan.runtime.loading.prepared import fit
from offplan.runtime.loading.skeleton import decoder_layers
from offplan.runtime.measuring.bench import Bench, Measurement, PhaseCost, Spread, time_requests
from offplan.transformers_private import name_cache, rescale_layers


def require_accelerate() -> Any:
    """Return accelerate's ``cpu_offload``; raises InputError if it is not installed."""
    try:
        from accelerate import cpu_offload
    except ImportError:
        raise InputError(
            "comparing with accelerate needs the package accelerate: pip install accelerate"
        ) from None
    return cpu_offload


@memory_limits("running the model under accelerate")
def bench_accelerate(bench: Bench, on_stage: Stages = silent) -> Measurement:
    """Measure transformers' model whose offloaded modules accelerate brings in.

    The modules are those that hold the plan's offloaded parameters, whole decoder layers where
    all of a layer is offloaded. The first request is not timed.

    Raises InputError if accelerate is not installed, MemoryLimitError, and what loading raises.
    """
    cpu_offload, passes = require_accelerate(), find_passes(EXECUTORS, bench.way)
    if bench.model.architecture.index_topk is not None and passes is None:
        others = " or ".join(f"`{way.name}=True`" for way in RUNTIMES if not way.is_own)
        raise InputError(
            f"{bench.model.source} has sparse attention, whose indexers transformers needs and "
            f"offplan leaves out: leave accelerate out, or plan with {others}"
        )
    with on_device(bench.device):
        module, offloaded = _load(bench, on_stage("loading"))
    for part in _largest_modules(module, offloaded):
        cpu_offload(part, execution_device=bench.device)
    prompt, cache = bench.prompt.to(bench.device), name_cache(module)

    def begin() -> tuple[torch.Tensor, Any]:
        if passes is None:
            return step(prompt, None)
        text = passes.begin_texts(module, prompt, bench.context + 1)
        return text.prefill(0, prompt.shape[1]).argmax(-1), text

    def step(tokens: torch.Tensor, kept: Any) -> tuple[torch.Tensor, Any]:
        if passes is not None:
            return kept.decode(tokens).argmax(-1, keepdim=True), kept
        output = module(input_ids=tokens, use_cache=True, logits_to_keep=1, **{cache: kept})
        return output.logits[:, -1].argmax(-1, keepdim=True), output[cache]

    with torch.inference_mode(), on_device(bench.device):
        prefill_s, step_s = time_requests(
            bench,
            begin,
            lambda state: step(*state),
            bench.num_repeats + 1,
            on_stage("measuring"),
        )
    return Measurement(
        prefill=PhaseCost(Spread.of(prefill_s[1:]), None, None),
        decode=PhaseCost(Spread.of(step_s[bench.num_steps :]), None, None),
    )


def _load(bench: Bench, on_progress: Progress) -> tuple[Any, set[nn.Parameter]]:
    """Load transformers' model; also return its offloaded parameters: they are on the CPU."""
    # it holds every weight as it is stored
    decision = bench.offload.recoded_by(None)
    fitted = fit(hold(bench.model, way=bench.way), decision, EXECUTORS, bench.device)
    module, on_host = fitted.module, {n for n, (layer, _) in fitted.offloaded.items() if layer >= 0}
    if bench.way.is_own:
        module.set_attn_implementation("sdpa")
    parameters = {
        name: nn.Parameter(
            torch.empty_like(value, device="cpu" if name in on_host else bench.device),
            requires_grad=False,
        )
        for name, value in fitted.wanted.items()
    }
    materialise_buffers(module, bench.device, fitted.targets)
    load_weights(bench.folder, fitted.targets, parameters, on_progress)
    assign(find_places(module), parameters)
    rescale_layers(module)
    return module, {parameters[name] for name in on_host}


def _largest_modules(module: Any, offloaded: set[nn.Parameter]) -> Iterator[nn.Module]:
    """Find the largest modules of the decoder all of whose parameters are offloaded.

    One that has parameters of both kinds for its own is taken whole: accelerate cannot split it.
    """
    pending: list[nn.Module] = list(decoder_layers(module))
    while pending:
        part = pending.pop(0)
        parameters = set(part.parameters())
        if (parameters and parameters <= offloaded) or offloaded & set(part._parameters.values()):
            yield part
        elif offloaded & parameters:
            pending += part.children()

"""A prediction layer brought to the device, whole and as it is stored."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from offplan.capabilities.drafts import MOST_DRAFTED
from offplan.checkpoint.model import Model
from offplan.checkpoint.prediction import PredictionLayers, find_prediction_layers
from offplan.plan import Offload
from offplan.progress import Progress
from offplan.runtime.executors import EXECUTORS
from offplan.runtime.loading.capability import Prepared
from offplan.runtime.loading.loaded import LoadedModel
from offplan.runtime.loading.prepared import prepare
from offplan.runtime.memory.gpu_memory import PeakMemory
from offplan.runtime.passes.link import CpuLink, CudaLink
from offplan.runtime.passes.runner import ModelRunner
from offplan.runtime.prediction.predictor import Predictor
from offplan.runtime.prediction.skeleton import build_prediction


def prepare_prediction(model: Model, offload: Offload, device: torch.device) -> Prepared | None:
    """Prepare the layer that a plan drafts by, as ``prepare`` does; None if it drafts by none.

    ``list_draft_refusals`` has refused models without one.
    """
    if offload.draft is None or not offload.draft.uses_layers:
        return None
    layers = find_prediction_layers(model)
    assert isinstance(layers, PredictionLayers), layers
    decision = Offload(prefill_chunk=offload.prefill_chunk)
    return prepare(
        layers.model, decision, device, EXECUTORS, build=lambda _: build_prediction(layers)
    )


def load_predictor(
    prepared: Prepared,
    main: PreTrainedModel,
    memory: PeakMemory,
    *,
    folder: Path | None,
    context: int,
    capture: bool,
    on_progress: Progress | None = None,
) -> Predictor:
    """Load a prepared layer behind ``main``, with a KV cache of ``context`` tokens.

    Raises what LoadedModel raises, whatever was taken until then being given back.
    """
    loaded = LoadedModel(prepared, folder, on_progress)
    try:
        link_type = CudaLink if prepared.device.type == "cuda" else CpuLink
        runner = ModelRunner(
            *(loaded, link_type(loaded.store.slots, loaded.store.slabs), memory),
            context=context,
            chunk=prepared.offload.prefill_chunk,
            capture=capture,
            drafted=MOST_DRAFTED,
        )
        return Predictor(loaded, runner, main, context)
    except BaseException:
        loaded.close()
        raise

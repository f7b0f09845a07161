"""A prediction layer loaded as it is stored, where its plan has it."""

from pathlib import Path

from transformers import PreTrainedModel

from offplan.capabilities.drafts import MOST_DRAFTED
from offplan.capabilities.table import decide_prediction
from offplan.checkpoint.model import Model
from offplan.checkpoint.prediction import PredictionLayers, find_prediction_layers
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


def prepare_prediction(model: Model, beside: Prepared) -> Prepared | None:
    """Prepare the layer that a plan drafts by, as ``prepare`` does; None if it drafts by none.

    ``beside`` is the prepared model, whose plan it is. ``list_draft_refusals`` has refused models
    without such a layer.
    """
    offload = beside.offload
    if offload.draft is None or not offload.draft.uses_layers:
        return None
    layers = find_prediction_layers(model)
    assert isinstance(layers, PredictionLayers), layers
    return prepare(
        layers.model,
        decide_prediction(offload.draft, offload.prefill_chunk),
        beside.device,
        EXECUTORS,
        build=lambda _: build_prediction(layers),
        beside=beside,
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

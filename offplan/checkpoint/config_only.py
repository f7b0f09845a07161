"""A model known from its ``config.json`` alone, built by transformers on the meta device.

That takes seconds, most of them to import torch: offplan keeps what was built on disk.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from offplan.checkpoint.architecture import read_architecture
from offplan.checkpoint.assemble import assemble
from offplan.checkpoint.folder import is_file, read_config, read_generation, read_index
from offplan.checkpoint.jsontext import quote
from offplan.checkpoint.model import Model
from offplan.checkpoint.parameter import Parameter
from offplan.checkpoint.published import as_published
from offplan.checkpoint.quantise import BuiltTensors, Use, quantise, require_read
from offplan.checkpoint.quiet import quietly
from offplan.checkpoint.tensors import (
    DTYPE_BITS,
    INDEX_NAME,
    TORCH_NAMES,
    Stored,
    TensorInfo,
    Tensors,
    split_expert,
)
from offplan.disk_cache import KeptAnswers, installed_versions
from offplan.errors import CheckpointError
from offplan.progress import Progress

if TYPE_CHECKING:
    import torch


_MAX_LAYERS = 1_000
"""Most layers of a stack, past any model's: transformers builds an object for each of its parts."""
_MAX_EXPERTS = 100_000
"""Most experts over all layers, past any model's: each becomes a tensor of the checkpoint."""
_LAYER_COUNT = re.compile(r"(layers?|depth|blocks|parts)$")
"""Keys that say, in the configs of transformers' architectures, how many layers a stack has, or
parts a table (Qwen3.8)."""


def read_config_only(path: Path, on_progress: Progress, dtype: str | None = None) -> Model:
    """Size the model that a ``config.json`` describes, as ``size_config`` does.

    An index beside the file is used to check the total size.
    """
    model = size_config(read_config(path), str(path), on_progress, dtype)
    seen = "sizes come from the config alone: no weights were seen"
    notes = (seen, *_compare_with_index(path, model), *model.notes)
    # without one, it may be among the weights
    return replace(model, notes=notes, generation=read_generation(path.parent) or None)


def size_config(
    config: Mapping[str, Any], where: str, on_progress: Progress, dtype: str | None = None
) -> Model:
    """Build the model that a config describes, and size the checkpoint that it would save.

    offplan keeps it on disk. ``where`` names the config in errors. ``dtype`` takes the place of the
    type that the config states: of all that is stored in no form that its ``quantization_config``
    names. Never runs code from the config.
    ``on_progress`` hears that the model is being built, if it is not kept, and that it is done.
    Raises CheckpointError when transformers does not know or cannot build the architecture.
    """
    key = sized_key(config, dtype)
    model = SIZED.find(key)
    if model is None:
        model = assemble(where, _find_stored(config, where, on_progress, dtype))
        SIZED.keep(key, model)
    return replace(model, source=where)


def _find_stored(
    config: Mapping[str, Any], where: str, on_progress: Progress, dtype: str | None
) -> Stored:
    """Return what the checkpoint of the model that a config describes would store."""
    architecture = read_architecture(config)
    num_experts = architecture.routing.num_experts or 0
    for what, most, found in (
        ("layers or parts", _MAX_LAYERS, max(_layer_counts(config), default=0)),
        ("experts in all layers", _MAX_EXPERTS, num_experts * (architecture.num_layers or 1)),
    ):
        if found > most:
            raise CheckpointError(
                f"{where}: found {quote(found)} {what}, expected {most} at most; correct the file"
            )
    require_read(architecture.quantisation, where)
    notes = []
    if dtype not in (None, architecture.dtype):
        stated = architecture.dtype or "no dtype"
        notes.append(f"sized as stored in {dtype}; the config names {stated}")
        config = with_dtype(config, str(dtype))
        architecture = read_architecture(config)
    elif architecture.dtype is None:
        # What is not quantised of a quantised checkpoint is stored in 16 bits, named or not.
        taken = "bfloat16" if architecture.quantisation is not None else "float32"
        notes.append(f"the config names no dtype: took {taken}")
    # Parts that state a type of their own keep it; transformers reads the others' from the top.
    named = {**config, "dtype": architecture.dtype or taken}
    on_progress(0, 1)
    built = as_published(_build_tensors(named, where), architecture, config)
    on_progress(1, 1)
    tensors = quantise(built, architecture, where)
    if architecture.quantisation is not None and architecture.quantisation.note is not None:
        notes.append(architecture.quantisation.note)
    if architecture.num_prediction_layers and not any(t.name.startswith("mtp.") for t in tensors):
        notes.append("layers that predict further tokens, if stored, are not counted")
    return Stored(config, tensors, notes=tuple(notes))


def with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return a config whose every part states this type."""
    parts = {
        key: with_dtype(value, dtype) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key != "torch_dtype"
    }
    return {**parts, "dtype": dtype} if "model_type" in config or "dtype" in config else parts


def _layer_counts(config: Mapping[str, Any]) -> Iterator[float]:
    """List the numbers of layers, or parts of a table, that a config or a part of it states."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _layer_counts(value)
        # Above zero, which also leaves out what is no number.
        elif isinstance(value, (int, float)) and value > 0 and _LAYER_COUNT.search(key):
            yield value


def _build_tensors(config: Mapping[str, Any], where: str) -> BuiltTensors:
    """Return the tensors that ``save_pretrained`` would write unquantised, and their use.

    They are named as in the checkpoint.
    """
    import transformers

    from offplan.checkpoint.transformers_config import build_config, cannot_build
    from offplan.transformers_private import build_eager, list_saved, on_meta

    with quietly(transformers.logging), on_meta():
        built = build_config(config, where)
        model_class = _model_class(built, where)
        try:
            model = build_eager(model_class, built)
            marks = _mark_uses(model)
            saved = list_saved(model)
        except Exception as error:
            raise cannot_build(where, error) from error
    types = {f"torch.{name}": dtype for dtype, name in TORCH_NAMES.items()}
    found = []
    for name, tensor in saved.items():
        dtype, use = marks.get(tensor.dtype, (tensor.dtype, Use.OTHER))
        found.append((TensorInfo(name, types[str(dtype)], tuple(tensor.shape)), use))
    return found


def _mark_uses(model: Any) -> "dict[torch.dtype, tuple[torch.dtype, Use]]":
    """Give weights a type that tells their use, and return what it stands for.

    The type outlasts all that is done to a weight's name and shape on the way to the checkpoint.
    """
    import torch
    from torch import nn

    from offplan.transformers_private import Conv1D

    present = {tensor.dtype for tensor in model.state_dict().values()}
    spare = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.bool]
    spare += [torch.complex32, torch.complex64, torch.complex128]
    spare = [dtype for dtype in spare if dtype not in present]
    marks: dict[tuple[torch.dtype, Use], torch.dtype] = {}
    for name, module in model.named_modules():
        linear = isinstance(module, (nn.Linear, Conv1D))
        for part, parameter in module.named_parameters(recurse=False):
            is_routed = name.endswith("experts") and parameter.ndim == 3
            if is_routed:
                use = Use.EXPERTS
            elif linear and part == "weight":
                use = Use.PRODUCT
            elif isinstance(module, nn.Embedding):
                use = Use.LOOKUP
            else:
                continue
            if parameter.dtype in marks.values():  # tied to one that was marked
                continue
            mark = marks.setdefault((parameter.dtype, use), spare[len(marks)])
            parameter.requires_grad_(False).data = parameter.data.to(mark)
    return {mark: original for original, mark in marks.items()}


def _model_class(built: Any, where: str) -> Any:
    """Return the class that wrote the checkpoint, or else the language model of its config.

    A published class may have another name than transformers': ``model_type`` decides then.
    Raises CheckpointError for a config that no language model has.
    """
    import transformers

    for name in built.architectures or ():
        stated = getattr(transformers, str(name), None)
        if getattr(stated, "config_class", None) is type(built):
            return stated
    mappings = (
        getattr(transformers, f"MODEL_FOR_{kind}_MAPPING", {})
        for kind in ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")
    )
    known = [each[type(built)] for each in mappings if each.get(type(built), None) is not None]
    if known:
        # of a whole model the first may be the class of its text part (Qwen3.5, Llama 4)
        return next((each for each in known if each.config_class is type(built)), known[0])
    raise CheckpointError(
        f"{where}: found model_type {quote(built.model_type)}, of which transformers "
        f"{transformers.__version__} has no causal language model, expected one; offplan plans "
        "models that write text token by token"
    )


def _compare_with_index(path: Path, model: Model) -> list[str]:
    """Return notes when an index lies beside the config and speaks of other sizes or names."""
    beside = path.parent / INDEX_NAME
    if not is_file(beside):
        return []
    index = read_index(beside)
    total_bytes = model.total_bytes
    notes = []
    if index.total_size is not None and index.total_size != total_bytes:
        notes.append(
            f"{INDEX_NAME} beside the config says {index.total_size} bytes, the config alone "
            f"{total_bytes}: the index has {index.total_size - total_bytes:+} bytes"
        )
    built = {tensor.name for tensor in model.tensors}
    for names, where in (
        (index.weight_map.keys() - built, f"in {INDEX_NAME} and not in"),
        (built - index.weight_map.keys(), f"not in {INDEX_NAME} but in"),
    ):
        if names:
            notes.append(
                f"{len(names)} tensors are {where} the model that the config describes, the first "
                f"is {quote(min(names))}"
            )
    if notes:
        notes.append("name the folder or the Hub id to plan with what is stored")
    return notes


_FIRST = ".experts.0."
"""The part of the name of a layer's first expert that has its index."""


def sized_key(config: Mapping[str, Any], dtype: str | None) -> dict[str, Any]:
    """Name what the model depends on that is sized from ``config``, stored in ``dtype``."""
    return {"config": json.dumps(config), "dtype": dtype, **installed_versions()}


def _encode(model: Model) -> bytes:
    # as text: JSON's own numbers leave out the infinities that configs have
    as_text = replace(model, config={"": json.dumps(model.config)})
    return _adapter().dump_json(_with_tensors(as_text, _fold))


def _decode(content: bytes) -> Model:
    model = _adapter().validate_json(content, strict=True)
    if not all(map(_is_sound, model.tensors)):
        raise ValueError("these are no tensors of a model")
    return _with_tensors(replace(model, config=json.loads(model.config[""])), _unfold)


@cache
def _adapter() -> TypeAdapter[Model]:
    return TypeAdapter(Model)


def _with_tensors(model: Model, change: Callable[[Tensors], Tensors]) -> Model:
    """Return the model with the tensors changed that its layers' parameters are stored in."""

    def change_one(parameter: Parameter) -> Parameter:
        beside = tuple((part, change(tensors)) for part, tensors in parameter.beside)
        return replace(parameter, tensors=change(parameter.tensors), beside=beside)

    return replace(
        model,
        layers=tuple(
            replace(layer, parameters=tuple(map(change_one, layer.parameters)))
            for layer in model.layers
        ),
    )


def _fold(tensors: Tensors) -> Tensors:
    """Return the first and the last tensor of experts that are alike, else all."""
    ends = (tensors[0], tensors[-1])
    return ends if _unfold(ends) == tensors else tensors


def _unfold(tensors: Tensors) -> Tensors:
    """Return the tensors of all experts of which these are the first and the last."""
    first, last = tensors[0], tensors[-1]
    before, found, after = first.name.partition(_FIRST)
    if not found or len(tensors) != 2:
        return tensors
    number, _ = split_expert(last.name) or (0, "")
    names = (f"{before}.experts.{index}.{after}" for index in range(number + 1))
    alike = tuple(TensorInfo(name, first.dtype, first.shape) for name in names)
    return alike if alike[-1] == last else tensors


def _is_sound(tensor: TensorInfo) -> bool:
    sizes = (size >= 0 for size in tensor.shape)
    return tensor.name.isprintable() and tensor.dtype in DTYPE_BITS and all(sizes)


SIZED = KeptAnswers("sized", 2**26, _encode, _decode)
"""By ``sized_key``; no model takes so many bytes, with the first and the last of its experts."""

"""Transformers' own config of a model. It is slow to import, so it is imported where it is used."""

from collections.abc import Mapping
from typing import Any

import transformers

from offplan.checkpoint.config import class_type, read_model_type
from offplan.checkpoint.jsontext import describe, quote
from offplan.checkpoint.model import Model
from offplan.checkpoint.model_types import SINCE
from offplan.checkpoint.own_code import CONFIG_CLASS, load_own_class, names_code, refuse_code
from offplan.errors import CheckpointError

_DROPPED = {"auto_map", "quantization_config", "return_dict"}
_DROPPED |= {"output_attentions", "output_hidden_states", "output_router_logits"}


def build_config(config: Mapping[str, Any], where: str) -> transformers.PreTrainedConfig:
    """Build transformers' config of a ``config.json``'s values; never runs code that they name.

    Raises CheckpointError, naming ``where`` they come from, for an architecture that transformers
    does not know and for values that it refuses.
    """
    model_type = read_model_type(config)
    if model_type not in transformers.CONFIG_MAPPING:
        lacking = (
            f"{where}: found model_type {quote(model_type)}, which transformers "
            f"{transformers.__version__} does not have"
        )
        if names_code(config):
            raise CheckpointError(f"{lacking}; {refuse_code(where, config)}")
        since = SINCE.get(model_type)
        newer = f"to {since} or newer, which has it" if since else "if a newer one has it"
        raise CheckpointError(
            f"{lacking}; update transformers {newer}, or, to plan, name the folder or the Hub id "
            "of the checkpoint"
        )
    built_type = transformers.CONFIG_MAPPING[class_type(model_type, config)]
    try:
        built = built_type.from_dict(_sanitise(config))
    except Exception as error:
        raise cannot_build(where, error) from error
    if not isinstance(built.get_text_config(), transformers.PreTrainedConfig):
        raise cannot_build(where, ValueError("it has a part for text that its class does not know"))
    return built


def runs_own_code(model: Model) -> bool:
    """Whether a model is built by code of the checkpoint's own, which the caller lets run."""
    return model.code is not None and model.model_type not in transformers.CONFIG_MAPPING


def build_config_of(model: Model) -> transformers.PreTrainedConfig:
    """Do what ``build_config`` does for a model, by its own code where the caller lets that run."""
    if not runs_own_code(model):
        return build_config(model.config, model.source)
    own_class = load_own_class(model, CONFIG_CLASS)
    try:
        built: transformers.PreTrainedConfig = own_class.from_dict(_sanitise(model.config))
    except Exception as error:
        raise cannot_build(model.source, error) from error
    return built


def cannot_build(where: str, error: Exception) -> CheckpointError:
    """Say what stopped transformers: a value in the config, its own code or a missing package."""
    why = f"it finds no {error}" if isinstance(error, KeyError) else describe(error, 300)
    is_lacking = isinstance(error, ImportError)
    help_ = "install what it names" if is_lacking else "compare its config with the published one"
    return CheckpointError(
        f"{where}: transformers {transformers.__version__} cannot build this model ({why}); "
        f"{help_}, or, to plan, name the folder or the Hub id of the checkpoint"
    )


def _sanitise(value: Any) -> Any:
    """Drop, at every depth, what could make transformers fetch code or change the stored types, and
    what asks it to return more than logits, or in another way.

    Infinity, which is no JSON number, is decoded.
    Source: transformers 5.23 saves it as ``{"__float__": "Infinity"}``.
    """
    if isinstance(value, list):
        return [_sanitise(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    if value.keys() == {"__float__"}:
        return float(value["__float__"])
    return {
        key: _sanitise(each)
        for key, each in value.items()
        if key not in _DROPPED and "_implementation" not in key
    }

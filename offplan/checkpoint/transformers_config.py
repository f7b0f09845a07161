"""Transformers' own config of a model. It is slow to import, so it is imported where it is used."""

from collections.abc import Mapping
from typing import Any

import transformers

from offplan.checkpoint.config import class_type, read_model_type
from offplan.checkpoint.jsontext import describe, quote
from offplan.checkpoint.model import Model
from offplan.checkpoint.model_types import SINCE
from offplan.checkpoint.own_code import (
    CONFIG_CLASS,
    load_own_class,
    name_packages,
    names_code,
    refuse_code,
)
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
        raise CheckpointError(_describe_unknown(model_type, config, where))
    built_type = transformers.CONFIG_MAPPING[class_type(model_type, config)]
    try:
        built = built_type.from_dict(_sanitise(config))
    except Exception as error:
        raise cannot_build(where, error) from error
    if not isinstance(built.get_text_config(), transformers.PreTrainedConfig):
        raise cannot_build(where, ValueError("it has a part for text that its class does not know"))
    return built


def _describe_unknown(model_type: str, config: Mapping[str, Any], where: str) -> str:
    """Say that transformers lacks a model type, which version has it, and what to do."""
    version, since = transformers.__version__, SINCE.get(model_type)
    newest = max(SINCE.values(), key=_number)
    found = f"{where}: found model_type {quote(model_type)}, which transformers {version}"
    if since:
        found += f" does not have; update transformers to {since} or newer, which has it"
    elif _number(version) < _number(newest):
        found += f" does not have, nor has {newest}, the newest that offplan knows"
    else:
        found += " does not have; update transformers if a newer one has it"
    to_run = f". To run it: {refuse_code(config)}" if names_code(config) else ""
    return found + _say_how_to_plan(where) + to_run


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())


def _say_how_to_plan(where: str) -> str:
    """Say that headers are enough for a plan, where a ``config.json`` alone was named."""
    named = "name the folder or the Hub id of the checkpoint, which needs no class of transformers"
    return f". To plan, {named}" if where.endswith(".json") else ""


def runs_own_code(model: Model) -> bool:
    """Return True if a model is built by code of the checkpoint's own, which may run."""
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
    missing = name_packages(error)
    why = f"it finds no {error}" if isinstance(error, KeyError) else describe(error, 300)
    if isinstance(error, AttributeError) and isinstance(error.obj, transformers.PreTrainedConfig):
        why = f"it finds no {quote(error.name)}, of which {type(error.obj).__name__} has no default"
    help_ = f" ({why}); compare its config with the published one"
    if missing is not None:
        help_ = f": {missing}"
    elif isinstance(error, ImportError):
        help_ = f" ({why}); install what it names"
    return CheckpointError(
        f"{where}: transformers {transformers.__version__} cannot build this model{help_}"
        f"{_say_how_to_plan(where)}"
    )


def _sanitise(value: Any) -> Any:
    """Drop, at every depth, what could make transformers fetch code or change the stored types.
    Drop also what asks it to return more than logits, or in another way.

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

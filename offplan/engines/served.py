"""What engines serve at all, whatever is offloaded."""

from offplan.checkpoint.model import Model
from offplan.engines.engine import Engine
from offplan.engines.vllm import FACTS
from offplan.errors import ExportError


def require_served(model: Model, context: int, engine: Engine) -> None:
    """Raise ExportError for a context or a type with which an engine does not start."""
    longest = model.architecture.engine_context
    if longest is not None and context > longest:
        raise ExportError(
            f"{engine.title} does not start with a context of {context} tokens: the config of "
            f"{model.source} states {longest} positions; lower --context"
        )
    types = {str(model.config.get("model_type")), model.architecture.model_type}
    if engine.family == "vllm" and model.dtype == "float16" and types & {*FACTS["no_float16"]}:
        raise ExportError(
            f"{engine.title} does not compute {model.architecture.model_type} in float16, in which "
            f"{model.source} is stored; take a checkpoint in bfloat16"
        )

"""The engines that offplan exports to, by name."""

from dataclasses import replace

from offplan.engines.engine import Engine, Version
from offplan.engines.sglang import SGLANG
from offplan.engines.vllm import VLLM
from offplan.errors import ExportError

WORKER = replace(
    VLLM,
    name="vllm-worker",
    title="offplan's worker in vLLM",
    oldest=(0, 33, 0),
    demand_rule=None,
)
ENGINES = {engine.name: engine for engine in (VLLM, WORKER, SGLANG)}


def find_engine(text: str) -> tuple[Engine, Version]:
    """Find an engine and its version, the newest that is known unless the text names one.

    Raises ExportError for one that offplan does not export to.
    """
    name, _, version = text.partition("==")
    if name not in ENGINES:
        raise ExportError(f"no engine {name!r}: offplan exports to {', '.join(ENGINES)}")
    engine = ENGINES[name]
    return engine, engine.parse_version(version) if "==" in text else engine.newest

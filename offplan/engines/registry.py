"""The engines that offplan exports to, by name."""

from dataclasses import replace

from offplan.engines.engine import Engine, Version
from offplan.engines.sglang import (
    MAX_BYTES_UNIT,
    SGLANG_PASSES,
    demand_resident_sglang,
    demand_rule_sglang,
    divide_sglang,
    find_padded_sglang,
    serve_sglang,
)
from offplan.engines.vllm import (
    VLLM_PASSES,
    demand_resident_vllm,
    demand_rule_vllm,
    divide_vllm,
    find_padded_vllm,
    serve_vllm,
)
from offplan.errors import ExportError

_VLLM = Engine(
    name="vllm",
    title="vLLM",
    oldest=(0, 25, 0),
    newest=(0, 33, 0),
    pass_rules=VLLM_PASSES,
    demand_rule=demand_rule_vllm,
    demand_resident=demand_resident_vllm,
    find_padded=find_padded_vllm,
    serve=serve_vllm,
    divide=divide_vllm,
    command=("vllm", "serve"),
    image="vllm/vllm-openai",
    port=8000,
    bind={"numa-bind": ()},
)
ENGINES = {
    "vllm": _VLLM,
    "vllm-worker": replace(
        _VLLM,
        name="vllm-worker",
        title="offplan's worker in vLLM",
        oldest=(0, 33, 0),
        demand_rule=None,
    ),
    "sglang": Engine(
        name="sglang",
        title="SGLang",
        oldest=(0, 5, 23),
        newest=(0, 5, 23),
        pass_rules=SGLANG_PASSES,
        demand_rule=demand_rule_sglang,
        demand_resident=demand_resident_sglang,
        find_padded=find_padded_sglang,
        serve=serve_sglang,
        divide=divide_sglang,
        command=("python3", "-m", "sglang.launch_server", "--model-path"),
        image="lmsysorg/sglang",
        port=30000,
        bind={},
        max_bytes_unit=MAX_BYTES_UNIT,
    ),
}


def find_engine(text: str) -> tuple[Engine, Version]:
    """Find an engine and its version, the newest that is known unless the text names one.

    Raises ExportError for one that offplan does not export to.
    """
    name, _, version = text.partition("==")
    if name not in ENGINES:
        raise ExportError(f"no engine {name!r}: offplan exports to {', '.join(ENGINES)}")
    engine = ENGINES[name]
    return engine, engine.parse_version(version) if "==" in text else engine.newest

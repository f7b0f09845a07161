"""The words of the command line for what errors name: options in place of arguments."""

import re

_OPTIONS = {
    **{
        name: f"--{name.replace('_', '-')}"
        for name in (
            *("gpu_memory", "host_memory", "batch", "prompt_tokens", "output_tokens", "context"),
            *("model", "machine", "dtype", "revision", "trust_remote_code", "dummy_weights"),
            *("device", "store", "stock", "cached_experts", "parts", "host_cores", "host_threads"),
            *("leave_unpacked", "routing", "record_routing", "record_weights"),
        )
    },
    "packing=False": "--no-packing",
    "engine": "--for",
    "tensor_parallel": "--tp",
    "pipeline_parallel": "--pp",
    "expert_parallel": "--ep",
    "num_steps": "--steps",
    "num_tokens": "--max-new-tokens",
}
"""Options by the arguments that do the same in the library."""
_ARGUMENT = re.compile(r"`(\w+)(?:=([^`]*))?`")


def name_options(text: str) -> str:
    """Name options where a text of the library names arguments in backquotes."""
    return _ARGUMENT.sub(_name_option, text)


def _name_option(found: re.Match[str]) -> str:
    name, value = found[1], found[2]
    option = _OPTIONS.get(found[0].strip("`")) or _OPTIONS.get(name)
    if option is None:
        return found[0]
    return option if value in (None, "True", "False") else f"{option} {value}"

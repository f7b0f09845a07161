"""The words of the command line for what errors name: options in place of arguments."""

import re

_OPTIONS = {
    **{
        name: f"--{name.replace('_', '-')}"
        for name in (
            *("gpu_memory", "host_memory", "batch", "prompt_tokens", "output_tokens", "context"),
            *("model", "machine", "dtype", "revision", "trust_remote_code", "dummy_weights"),
            *("device", "store", "routing", "record_routing", "record_weights"),
            *("acceptance", "record_drafts", "gguf", "llama_bench"),
        )
    },
    "engine": "--for",
    "tensor_parallel": "--tp",
    "pipeline_parallel": "--pp",
    "expert_parallel": "--ep",
    "num_steps": "--steps",
    "num_tokens": "--max-new-tokens",
}
"""Options by the arguments that do the same in the library, but those of capabilities."""
_ARGUMENT = re.compile(r"`(\w+)(?:=([^`]*))?`")


def name_options(text: str) -> str:
    """Name options where a text of the library names arguments in backquotes."""
    return _ARGUMENT.sub(_name_option, text)


def _name_option(found: re.Match[str]) -> str:
    from offplan.capabilities.table import USUAL  # which few commands need

    name, value = found[1], found[2]
    option = _OPTIONS.get(name)
    is_off = value == "False"
    if option is None and name in USUAL and (is_off or USUAL[name] is not True):
        option = f"--{'no-' * is_off}{name.replace('_', '-')}"
    if option is None:
        return found[0]
    return option if value in (None, "True", "False") else f"{option} {value}"

"""A command that knows options of other programs, and names its own in their place."""

import typer
from typer.core import TyperCommand

_MEMORY = "write the machine's memory behind its name: --machine rtx4090,ram=64GiB"
_CONTEXT = "write --context 8192"
_OWN = {
    "--ram": _MEMORY,
    "--memory": _MEMORY,
    "--vram": "write --gpu-memory 8GiB, or what the GPU has: --machine rtx4090,vram=24GiB",
    "--gpu": "write --machine rtx4090",
    **dict.fromkeys(("--ctx", "--ctx-size", "--num-ctx", "--max-model-len"), _CONTEXT),
    **dict.fromkeys(("--max-tokens", "--n-predict"), "write --max-new-tokens 256"),
    **dict.fromkeys(
        ("--ngl", "--n-gpu-layers", "--gpu-layers", "--num-gpu"),
        "offplan chooses what the GPU holds; --gpu-memory 8GiB bounds it",
    ),
}
"""Options as people know them of llama.cpp, Ollama and vLLM, and what to write here."""


class Command(TyperCommand):
    """A command whose error for an unknown option says how offplan calls it."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Read the arguments; raises what click raises."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            # typer has a click of its own: its errors are no public names
            help_ = _OWN.get(str(getattr(error, "option_name", "")))
            named = [word.split()[0] for word in (help_ or "").split("--")[1:]]
            known = {name for each in self.params for name in each.opts}
            if help_ is not None and {f"--{name}" for name in named} <= known:
                error.message = f"{error.message.rstrip('.')}; {help_}"  # type: ignore[attr-defined]
                error.possibilities = None  # type: ignore[attr-defined]
            raise

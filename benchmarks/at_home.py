"""What plans for a desktop are predicted to do with and without the host's cores.

    python -m benchmarks.at_home

Prints the table of docs/host-cores.md. Models are the configs of benchmarks/models; those in 4 bits
are stored as compressed-tensors stores whole numbers in groups of 128, all but the output head and
a dense MLP of the first layer.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from offplan.checkpoint.open import open_model
from offplan.errors import InfeasibleError
from offplan.library.asking import ask
from offplan.library.machines import load_machine
from offplan.planner.make import make_plan

MODELS = Path(__file__).parent / "models"


class Stored(NamedTuple):
    """A model as it is stored."""

    name: str
    folder: str
    quantization: str | None = "as the config says"
    """The folder whose ``quantization_config`` it has, None for none."""
    num_layers: int | None = None
    machine: str = "rtx4090,ram=96GiB"


AS_INT4 = "qwen3-32b-w4a16"
STORED = (
    Stored("gpt-oss-120b (MXFP4)", "gpt-oss-120b"),
    Stored("Qwen3-30B-A3B (bf16)", "qwen3-30b-a3b-fp8", None),
    Stored("Qwen3-30B-A3B (FP8)", "qwen3-30b-a3b-fp8"),
    Stored("Qwen3-30B-A3B (4 bits)", "qwen3-30b-a3b-fp8", AS_INT4),
    Stored("Mixtral-8x7B (bf16)", "mixtral-8x7b"),
    Stored("GLM-4.5-Air (4 bits)", "glm-4.5-air", AS_INT4),
    Stored(
        "DeepSeek-V3 (4 bits, 512 GiB)",
        "deepseek-v3-8-layers",
        AS_INT4,
        61,
        "rtx4090,ram=512GiB",
    ),
)


def read_config(folder: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((MODELS / folder / "config.json").read_text("utf-8"))
    return config


def predict(stored: Stored, *, host_cores: bool) -> str:
    """Predict tokens a second, of the plan that the search finds."""
    config = read_config(stored.folder)
    if stored.num_layers is not None:
        config["num_hidden_layers"] = stored.num_layers
    if stored.quantization is None:
        del config["quantization_config"]
    elif stored.quantization == AS_INT4:
        config["quantization_config"] = read_config(AS_INT4)["quantization_config"]
        # GLM's first layer has 10,944 inner columns, which are no whole groups
        config["quantization_config"]["ignore"].append(
            "re:.*layers\\.0\\.mlp\\.(gate|up|down)_proj"
        )
    with TemporaryDirectory() as folder:
        path = Path(folder, "config.json")
        path.write_text(json.dumps(config), "utf-8")
        model = open_model(str(path))
    try:
        plan = make_plan(ask(model, load_machine(stored.machine), host_cores=host_cores)).plan
    except InfeasibleError:
        return "does not fit"
    return f"{1 / plan.prediction.decode.step_s:.1f}"


if __name__ == "__main__":
    print("| model | tokens a second without the cores | with them |\n|---|---|---|")
    for each in STORED:
        without, with_cores = (predict(each, host_cores=cores) for cores in (False, True))
        print(f"| {each.name} | {without} | {with_cores} |", flush=True)

"""Write the page of speeds that others published, beside estimates: ``docs/published-speeds.md``.

    python docs/make_speeds.py

``tests/test_docs.py`` holds the file to what is written here, and estimates to the factors.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from offplan.checkpoint.open import open_model
from offplan.costs.compute import ModelCompute
from offplan.costs.work import PassShape, prefill_shapes
from offplan.held.held import hold
from offplan.held.stage import Stage
from offplan.machine.profile import load_profile
from offplan.placement import Phase
from offplan.plan import Workload

PAGE = Path(__file__).with_name("published-speeds.md")
ROOT = PAGE.parent.parent

SAME_FORM, OTHER_FORM, PROMPTS = 1.2, 1.5, 2.3
"""Factors within which tokens a second are of their estimates: of steps that read the same bytes,
of those of GGUF files, and of prompts."""


class Source(NamedTuple):
    """A page of published speeds."""

    name: str
    date: str
    url: str
    is_gguf: bool


def _smeltcore(name: str, date: str) -> Source:
    url = f"https://smeltcore.com/recipes/gpt-oss-20b-on-{name}-via-ollama-or-vllm"
    return Source("llama.cpp", date, url, is_gguf=True)


SPARK = Source(
    "llama.cpp",
    "2025-10-15",
    "https://jetsonhacks.com/wp-content/uploads/2025/10/spark-llamacpp-bench.html",
    is_gguf=True,
)
SPARK_120B = Source(
    "llama.cpp",
    "2025-12-19",
    "https://forums.developer.nvidia.com/t/llama-cpp-experimental-native-mxfp4-support-for-blackwell-pr/355639",
    is_gguf=True,
)
VLLM_4090 = Source(
    "vLLM", "2026-09-15", "https://github.com/AlexsJones/llmfit/pull/1046", is_gguf=False
)
VLLM_H100 = Source(
    "vLLM 0.30", "2026-09-24", "https://github.com/tgarg01/silybench-data", is_gguf=False
)
SGLANG = Source(
    "SGLang 0.5.8",
    "2026-02-26",
    "https://treeru.com/en/blog/awq-quantization-speed-comparison",
    is_gguf=False,
)


class Speed(NamedTuple):
    """A published speed, in tokens a second of one sequence."""

    model: str
    form: str
    machine: str
    context: int
    """Tokens in the cache of the steps, and of the prompt."""
    decode: float
    prompt: float | None
    source: Source

    @property
    def stage(self) -> Stage:
        """The model, wholly on one GPU."""
        folders = (ROOT / "benchmarks" / "models", ROOT / "tests" / "models")
        return _read(next(each / self.model for each in folders if (each / self.model).exists()))

    @property
    def estimates(self) -> tuple[float, float]:
        """Tokens a second of steps and of the prompt that offplan estimates."""
        compute = ModelCompute(self.stage, load_profile(self.machine))
        step = compute.price(PassShape(Phase.DECODE, 1, 1, self.context))
        workload = Workload(prompt_tokens=self.context, context=self.context + 256)
        prompt = compute.price(*prefill_shapes(workload, 8192))
        return 1e12 / step.resident_ps, self.context * 1e12 / prompt.resident_ps


OSS = "gpt-oss-20b"
SPEEDS = (
    Speed(OSS, "MXFP4", "rtx3090-pcie4", 4096, 147.5, None,
          _smeltcore("rtx-3090-mxfp4-chat-at-147-tok-s", "2026-05-22")),
    Speed(OSS, "MXFP4", "rtx4080-super-pcie4", 4096, 139.1, 6364,
          _smeltcore("rtx-4080-super-mxfp4-chat-at-139-tok-s", "2026-06-02")),
    Speed(OSS, "MXFP4", "rtx4090-pcie4", 4096, 190.6, 8369.3,
          _smeltcore("rtx-4090-mxfp4-chat", "2026-05-20")),
    Speed(OSS, "MXFP4", "rtx5090-pcie5", 4096, 298.2, 9443.8,
          _smeltcore("rtx-5090-mxfp4-chat-at-298-tok-s", "2026-05")),
    Speed(OSS, "MXFP4", "gb10-c2c", 2048, 79.74, 3610.56, SPARK),
    Speed("gpt-oss-120b", "MXFP4", "gb10-c2c", 2048, 59.05, 1937.39, SPARK_120B),
    Speed("qwen3-8b", "bfloat16", "rtx4090-pcie4", 300, 58.7, None, VLLM_4090),
    Speed("qwen3-8b", "bfloat16", "rtxpro6000-pcie5", 512, 90.8, None, SGLANG),
    Speed("qwen3-32b-w4a16", "4 bits", "rtxpro6000-pcie5", 512, 70.2, None, SGLANG),
    Speed("qwen3-8b-fp8", "FP8", "h100-pcie5", 2048, 208.5, 40_716, VLLM_H100),
)  # fmt: skip

HEAD = f"""\
# Published speeds

`python docs/make_speeds.py` makes this page; do not edit it by hand. Others measured these speeds
of one sequence, all weights on the GPU. offplan estimates its own runtime, with profiles that
nobody measured.

A step is within a factor of {SAME_FORM} of its estimate where the engine reads the same bytes. GGUF
files hold attention, embedding and head in 8 bits, so their steps read 0.7 of the bytes: they are
within {OTHER_FORM}. Prompts are within {PROMPTS}. llama.cpp multiplies codes themselves, and
offplan makes 16-bit values of them first. Its estimates are faster than llama.cpp on GeForce
cards, and slower on GB10. vLLM's prompt is that of the 95th percentile of its first tokens.

No such figures were found of one sequence on an A100 or an L4.

| model | form | machine | context | decode | estimated | prompt | estimated | engine | date |
|---|---|---|---|---|---|---|---|---|---|
"""


@cache
def _read(folder: Path) -> Stage:
    return hold(open_model(str(folder / "config.json")))


def _list_rows() -> Iterator[str]:
    for each in SPEEDS:
        decode, prompt = each.estimates
        cells = [each.model, each.form, f"`{each.machine.split('-p')[0].split('-c')[0]}`"]
        cells += [f"{each.context:,}", f"{each.decode:.0f}", f"{decode:.0f}"]
        cells += ["", ""] if each.prompt is None else [f"{each.prompt:,.0f}", f"{prompt:,.0f}"]
        cells += [f"[{each.source.name}]({each.source.url})", each.source.date]
        yield f"| {' | '.join(cells)} |"


def render_page() -> str:
    """Return the whole page."""
    return HEAD + "\n".join(_list_rows()) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render_page(), "utf-8")

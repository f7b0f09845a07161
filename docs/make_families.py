"""Makes ``docs/families.md``: what `offplan run` does with each family that transformers has.

    python docs/make_families.py > docs/families.md

Needs the tests' helpers, so it runs from a clone's root; ten minutes on two cores.
"""

import os
import re
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.runtime.families import Outcome, compare

VARIANTS = ("plain", "windows")
INTRODUCTION = f"""\
# Families

What `offplan run` does with each family of causal language models that transformers has, as
`python docs/make_families.py` found with transformers {transformers.__version__}: tiny models of
random float32 weights, every second layer offloaded, prompts whole and in chunks, past a sliding
window where the family knows one, each compared with stock transformers token by token.

Stored types that run: BF16, F16 and F32. Quantised checkpoints (FP8, MXFP4, NVFP4, INT4 of any
kind, bitsandbytes, torchao, MLX) are read and planned, and refused by `run` before anything is
loaded. `offplan analyze` says in a line whether a model can be run, and why not.

Rotary embeddings that change with the text's length (longrope, dynamic NTK) run in all of these
families that have them, at any length, as transformers' `generate` has them: keys keep the
frequencies of the pass that they were made in, and Phi-3 and Phi-3.5-MoE read a text again once it
outgrows `original_max_position_embeddings`.

Layers may have full or sliding attention, or the linear attention of Gated DeltaNet (Qwen3-Next,
Qwen3.5, OLMo-Hybrid). Other linear attentions, state spaces and convolutions are refused.
"""


def _judge(family: str) -> tuple[str, Outcome]:
    """Return the worst outcome of a family's variants."""
    outcomes = [compare(family, variant) for variant in VARIANTS]
    order = ("wrong", "refused", "not built", "exact")
    return family, min(outcomes, key=lambda outcome: order.index(outcome.kind))


def _shorten(family: str, why: str) -> str:
    """Keep the reason of a refusal, without the model's name or what follows."""
    why = why.split("; `run`")[0].split(". Its plan")[0].split(" (expected")[0].split("\n")[0]
    why = re.sub(r"^(what attention )?(?:of )?[A-Z]\w+ ", lambda found: found[1] or "", why)
    return why.removeprefix(family).strip(" :")[:120]


def main() -> None:
    """Print the page."""
    found: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        for family, outcome in pool.map(_judge, sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)):
            why = _shorten(family, outcome.why) if outcome.kind == "refused" else ""
            found[outcome.kind, why].append(family)
    exact = found["exact", ""]
    print(f"{INTRODUCTION}\n## Exact: {len(exact)} families\n\n{', '.join(exact)}\n")
    print("## Refused before anything is loaded\n\n| families | why |\n|---|---|")
    for (kind, why), families in sorted(found.items()):
        if kind == "refused":
            print(f"| {', '.join(families)} | {why.replace('|', '/')} |")
    print("\n## Not tried\n\nTransformers itself builds or runs no tiny one of these here:")
    print(f"{', '.join(found['not built', ''])}")
    if wrong := found["wrong", ""]:
        print(f"\n## Wrong\n\n{', '.join(wrong)}")


if __name__ == "__main__":
    main()

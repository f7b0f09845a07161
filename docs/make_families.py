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

from tests.runtime.families import TEXT_PARTS, Outcome, compare

VARIANTS = ("plain", "windows")
INTRODUCTION = f"""\
# Families

This page lists what `offplan run` does with each family of causal language models that transformers
has. `python docs/make_families.py` made this page with transformers {transformers.__version__}. It
builds tiny models of random float32 weights with every second layer offloaded. Prompts run whole
and in chunks, and past a sliding window where the family has one. Each model is compared with stock
transformers token by token.

`offplan analyze` reports in one line whether `run` can execute a model, or the reason why not.
Weights may be BF16, F16, F32 or [quantised](stored-forms.md).

**Rotary embeddings** that change with the text's length (longrope, dynamic NTK) run in all of these
families that have them, at any length, as in transformers' `generate`. Keys keep the frequencies of
the pass that made them. Phi-3 and Phi-3.5-MoE read a text again once it outgrows
`original_max_position_embeddings`.

**Attention** may be full, sliding, within chunks of the text (Llama 4), or the linear attention of
Gated DeltaNet (Qwen3-Next, Qwen3.5, OLMo-Hybrid). `run` refuses other linear attentions, state
spaces and convolutions.

**Sparse attention** whose indexers choose the tokens that each token sees (DeepSeek-V3.2, GLM-5)
runs on texts of at most `index_topk` tokens (2,048 unless the config gives another number): of such
a text the indexers choose all tokens. offplan makes plans of a longer context, and `run` refuses
them.

**Youtu**: where the config has a `pad_token_id`, stock transformers zeroes the padding token's row
of the input embedding after loading, whatever the checkpoint stores there. offplan keeps the row as
stored. Unless the stored row is zero, stock's logits differ from offplan's behind a padding token
in the text. Where the head is tied to the embedding, they also differ for that token at every
position: stock's are 0. This page's comparison leaves `pad_token_id` out.
"""


TEXT_PARTS_INTRODUCTION = """\
The text part alone runs, for the types in a list that tests check. `run` neither builds nor loads
the towers that read images or sound, and refuses a prompt with a token that stands for an image.
Each model is compared with stock transformers' whole model on text. The brackets hold the compared
model types of the text part. A family of several modalities that is not here is refused.
"""


def _judge(family: str, text: str | None = None) -> Outcome:
    """Return the worst outcome of a family's variants; ``text`` is as in ``compare``."""
    outcomes = [compare(family, variant, text=text) for variant in VARIANTS]
    order = ("wrong", "refused", "not built", "exact")
    return min(outcomes, key=lambda outcome: order.index(outcome.kind))


def _shorten(family: str, why: str) -> str:
    """Keep the reason of a refusal, without the model's name or what follows."""
    why = why.split("; `run`")[0].split(". Its plan")[0].split(" (expected")[0].split("\n")[0]
    why = re.sub(r"^(what attention )?(?:of )?[A-Z]\w+ ", lambda found: found[1] or "", why)
    return why.removeprefix(family).strip(" :")[:120]


def _print_text_parts(outcomes: dict[tuple[str, str], Outcome]) -> None:
    """Print the section on the text parts of multimodal families."""
    kinds: defaultdict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for (family, text), outcome in outcomes.items():
        kinds[outcome.kind][family].append(text)
    print(f"## Vision-language models, the text part\n\n{TEXT_PARTS_INTRODUCTION}")
    for kind in sorted(kinds):  # exact first
        named = (f"{family} ({', '.join(texts)})" for family, texts in kinds[kind].items())
        print(f"{kind.capitalize()}: {', '.join(named)}\n")


def main() -> None:
    """Print the page."""
    found: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    families = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        for family, outcome in zip(families, pool.map(_judge, families), strict=True):
            why = _shorten(family, outcome.why) if outcome.kind == "refused" else ""
            found[outcome.kind, why].append(family)
        judged = pool.map(_judge, *zip(*TEXT_PARTS, strict=True))
        text_parts = dict(zip(TEXT_PARTS, judged, strict=True))
    exact = found["exact", ""]
    print(f"{INTRODUCTION}\n## Exact: {len(exact)} families\n\n{', '.join(exact)}\n")
    _print_text_parts(text_parts)
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

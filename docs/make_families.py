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

What `offplan run` does with each family of causal language models that transformers has, as
`python docs/make_families.py` found with transformers {transformers.__version__}: tiny models of
random float32 weights, every second layer offloaded, prompts whole and in chunks, past a sliding
window where the family knows one, each compared with stock transformers token by token.

Stored types that run: BF16, F16 and F32, and quantised checkpoints as they are stored (FP8, MXFP4,
NVFP4, compressed-tensors, GPTQ, AWQ, bitsandbytes: [stored forms](stored-forms.md) has the table).
`offplan analyze` says in a line whether a model can be run, and why not.

Rotary embeddings that change with the text's length (longrope, dynamic NTK) run in all of these
families that have them, at any length, as transformers' `generate` has them: keys keep the
frequencies of the pass that they were made in, and Phi-3 and Phi-3.5-MoE read a text again once it
outgrows `original_max_position_embeddings`.

Layers may have full or sliding attention, attention within chunks of the text (Llama 4), or the
linear attention of Gated DeltaNet (Qwen3-Next, Qwen3.5, OLMo-Hybrid). Other linear attentions,
state spaces and convolutions are refused.

Sparse attention whose indexers choose the tokens that each one sees (DeepSeek-V3.2, GLM-5) runs on
texts of no more tokens than they choose (`index_topk`, 2,048 unless the config says another
number): of such a text they choose all. Plans of a longer context are made, and `run` refuses them.

Stock transformers changes a weight of Youtu where the config has a `pad_token_id`. It zeroes the
padding token's row of the input embedding after loading, whatever the checkpoint stores there.
offplan keeps the row as stored. Unless the stored row is zero, stock's logits differ from offplan's
behind a padding token in the text. Where the head is tied to the embedding, they also differ for
that token at every position: stock's are 0. This page's comparison leaves `pad_token_id` out.
"""


TEXT_PARTS_INTRODUCTION = """\
The text part alone runs, by a list that tests hold: the towers that read images or sound are
neither built nor loaded, and a prompt with a token that stands for an image is refused. Each is
compared with stock transformers' whole model on text; in brackets are the model types of the text
part that were. A family of several modalities that is not here is refused.
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

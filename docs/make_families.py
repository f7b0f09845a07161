"""Makes ``docs/families.md``: what `offplan run` does with each family that transformers has.

    python docs/make_families.py > docs/families.md

Needs the tests' helpers, so it runs from a clone's root; ten minutes on two cores.
"""

import os
import re
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from offplan.checkpoint.model_types import STOCK_CHUNKS, STOCK_CHUNKS_WITHOUT_WINDOW
from tests.runtime.families import TEXT_PARTS, Outcome, compare, compare_stock

VARIANTS = ("plain", "windows")
WHOLE = "FAMILIES WHOSE PROMPTS RUN WHOLE"
"""What stands in the introduction for their list."""
INTRODUCTION = f"""\
# Families

This page lists what `offplan run` does with each family of causal language models that transformers
has. `python docs/make_families.py` made this page with transformers {transformers.__version__}. It
builds tiny models of random float32 weights on the CPU, with every second layer offloaded and
copies at the latest legal moment.

offplan runs a model in one of two ways. The plan, the answer and `--json` name the way
(`goal: {{stock: true}}` is the second one):

- **offplan's own passes**: its caches and attention, captured as CUDA graphs. The page compares
  them with stock transformers token by token: whole prompts, prompts in chunks, and texts past a
  sliding window where the family has one.
- **Transformers' own passes**: the passes that `generate` runs, with its own cache, masks and
  positions. offplan moves the weights around each layer's call. It replaces only products with
  weights that are held as codes, and captures nothing. `plan`, `analyze`, `run` and `bench` take
  this way with `--stock`; `plan` and `analyze` also take it wherever the first way refuses a model.
  The page compares logits with stock's `generate` to the last bit, with one and with two slots in
  the ring. On an H200 two hybrids, resident and offloaded, gave the same bits as each other.

`offplan analyze` reports in one line whether `run` can execute a model, or the reason why not.
Weights may be BF16, F16, F32 or [quantised](stored-forms.md).

**Rotary embeddings** that change with the text's length (longrope, dynamic NTK) run in all of these
families that have them, at any length, as in transformers' `generate`. Keys keep the frequencies of
the pass that made them. Phi-3 and Phi-3.5-MoE read a text again once it outgrows
`original_max_position_embeddings`.

**Attention** in offplan's own passes may be full, sliding, within chunks of the text (Llama 4), or
the linear attention of Gated DeltaNet (Qwen3-Next, Qwen3.5, OLMo-Hybrid). Other linear attentions,
state spaces and convolutions run by transformers' own passes.

**Sparse attention** whose indexers choose the tokens that each token sees (DeepSeek-V3.2, GLM-5)
runs by offplan's own passes on texts of at most `index_topk` tokens (2,048 unless the config gives
another number): of such a text the indexers choose all tokens. Plans of a longer context are for
transformers' own passes.

**Prompts** in transformers' own passes: a plan's chunk is at least its prompt. A longer prompt runs
in chunks where a test has shown the same result, and the weights cross the link once for each
chunk. `run` refuses a longer prompt of these families: {WHOLE}. Some families attend to
all tokens whatever `sliding_window` says; where the config names one, `run` refuses theirs, too.

**Code of a checkpoint** (`auto_map`) runs by transformers' own passes, only with
`--trust-remote-code` on the command line of `plan`, `analyze`, `measure`, `replan`, `run`, `bench`,
`serve` or `chat`.

**Shared weights**: where several layers read the same weights (the attention blocks of Zamba and
Zamba 2), these stay on the GPU, once.

**Refused** in transformers' own passes are weights that are packed without loss, a layer that calls
another layer, weights that are read outside their layer, shared weights that are stored as codes or
stored twice, `--record-routing`, `--cached-experts`, and exports to engines.

**Youtu**: where the config has a `pad_token_id`, stock transformers zeroes the padding token's row
of the input embedding after loading, whatever the checkpoint stores there. offplan keeps the row as
stored. Unless the stored row is zero, stock's logits differ from offplan's behind a padding token
in the text. Where the head is tied to the embedding, they also differ for that token at every
position: stock's are 0. This page's comparison leaves `pad_token_id` out.
"""


TEXT_PARTS_INTRODUCTION = """\
The text part alone runs, for the types in a list that tests check. `run` loads no tower that reads
images or sound, and refuses a prompt with a token that stands for an image. Each model is compared
with stock transformers' whole model on text. The brackets hold the compared model types of the text
part. `run` refuses other families of several modalities. ERNIE-VL's experts stay on the GPU.
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


_WAYS = {True: "offplan's own passes alone", False: "transformers' own passes alone"}


def _print_text_parts(judged: Iterable[tuple[tuple[str, str], Outcome, Outcome]]) -> None:
    """Print the section on the text parts of multimodal families."""
    kinds: defaultdict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for (family, text), own, stock in judged:
        is_own, is_stock = own.kind == "exact", stock.kind == "exact"
        way = "both ways" if is_own and is_stock else _WAYS[is_own]
        outcome = own if is_own else stock
        kinds[f"{outcome.kind.capitalize()} by {way}"][family].append(text)
    print(f"## Vision-language models, the text part\n\n{TEXT_PARTS_INTRODUCTION}")
    for kind in sorted(kinds):  # exact first
        named = (f"{family} ({', '.join(texts)})" for family, texts in kinds[kind].items())
        print(f"{kind}: {', '.join(named)}\n")


def _judge_stock(family: str, text: str | None = None) -> Outcome:
    """Return the worst outcome of transformers' own passes, with one slot and with two."""
    outcomes = [
        compare_stock(family, each, slots=n, text=text, tells_chunks=True)
        for each in VARIANTS
        for n in (1, 2)
    ]
    order = ("wrong", "refused", "not built", "exact")
    return min(outcomes, key=lambda outcome: order.index(outcome.kind))


Found = dict[tuple[str, str], list[str]]
"""Families by the kind of their outcome, and by why they are refused."""


def _sort(families: list[str], outcomes: Iterable[Outcome]) -> Found:
    found: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for family, outcome in zip(families, outcomes, strict=True):
        why = _shorten(family, outcome.why) if outcome.kind == "refused" else ""
        found[outcome.kind, why].append(family)
    return found


def _print_refused(found: Found) -> None:
    print("| families | why |\n|---|---|")
    for (kind, why), families in sorted(found.items()):
        if kind == "refused":
            print(f"| {', '.join(families)} | {why.replace('|', '/')} |")


def main() -> None:
    """Print the page."""
    families = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        own = _sort(families, pool.map(_judge, families))
        stock = _sort(families, pool.map(_judge_stock, families))
        own_texts = pool.map(_judge, *zip(*TEXT_PARTS, strict=True))
        stock_texts = pool.map(_judge_stock, *zip(*TEXT_PARTS, strict=True))
        judged = [*zip(TEXT_PARTS, own_texts, stock_texts, strict=True)]
    by_own, by_stock = own.get(("exact", ""), []), stock.get(("exact", ""), [])
    added = [family for family in by_stock if family not in by_own]
    whole = [each for each in by_stock if each not in STOCK_CHUNKS | STOCK_CHUNKS_WITHOUT_WINDOW]
    print(INTRODUCTION.replace(WHOLE, ", ".join(whole)))
    print(f"## Exact: {len(by_own) + len(added)} families\n")
    print(f"By offplan's own passes, {len(by_own)}:\n{', '.join(by_own)}\n")
    print(f"By transformers' own passes alone, {len(added)} more:\n{', '.join(added)}\n")
    others = [family for family in by_own if family not in by_stock]
    both = len(by_stock) - len(added)
    print(f"By both, {both}: all of the first list but {', '.join(others) or 'none'}.\n")
    _print_text_parts(judged)
    print("## Refused by offplan's own passes\n")
    _print_refused(own)
    print("\n## Refused by transformers' own passes\n")
    _print_refused(stock)
    print("\n## Not tried\n\nTransformers itself builds or runs no tiny one of these here:")
    print(f"{', '.join(own.get(('not built', ''), []))}")
    for way, found in (("offplan's own", own), ("transformers' own", stock)):
        if wrong := found.get(("wrong", "")):
            print(f"\n## Wrong by {way} passes\n\n{', '.join(wrong)}")


if __name__ == "__main__":
    main()

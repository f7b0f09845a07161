"""Makes ``docs/families.md``: what offplan does with each family that transformers has.

    python docs/make_families.py [judge] > docs/families.md

The page is made of ``docs/families.yaml``, which ``judge`` writes anew: it builds and runs a tiny
model of each family, ten minutes on two cores. Needs the tests' helpers, so it runs from a clone's
root.
"""

import os
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from offplan.checkpoint.model_types import SINCE, STOCK_CHUNKS, STOCK_CHUNKS_WITHOUT_WINDOW
from offplan.errors import CheckpointError
from tests.checkpoint.test_every_type import judge, truth
from tests.runtime.families import TEXT_PARTS, Outcome, compare, compare_stock

FOUND = Path(__file__).with_name("families.yaml")
HEAD = "# What `make_families.py judge` found of each family. docs/families.md is made of it.\n"
VARIANTS = ("plain", "windows")
WHOLE = "FAMILIES WHOSE PROMPTS RUN WHOLE"
"""What stands in the introduction for their list."""
INTRODUCTION = """\
# Families

This page lists what offplan does with each family of causal language models that transformers has.
`python docs/make_families.py judge` tried them with transformers VERSION. It builds tiny models
of random float32 weights on the CPU, with every second layer offloaded and copies at the latest
legal moment. A number behind a family is the first version of transformers that has it, where 5.17
does not.

offplan runs a model in one of two ways. The plan, the answer and `--json` name the way
(`goal: {stock: true}` is the second one):

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
chunk. `run` refuses a longer prompt of these families: FAMILIES WHOSE PROMPTS RUN WHOLE.
Some families attend to all tokens whatever `sliding_window` says; where the config names one,
`run` refuses theirs, too.

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

TABLE_INTRODUCTION = """\
## Families

**Planned**: `analyze` gives a config the size of transformers' module. **Passes**: exact is equal
to stock. **Stored forms** that come out exact: all that [run](stored-forms.md), or all but weights
packed without loss. Not built: transformers makes or runs no tiny one of it here.
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
    return min(outcomes, key=lambda outcome: ORDER.index(outcome.kind))


def _judge_plan(family: str) -> Outcome:
    """Compare the size of a family's config with that of transformers' module of it."""
    try:
        config, *expected = truth(family)
    except pytest.skip.Exception as skipped:
        return Outcome("not built", str(skipped))
    try:
        with tempfile.TemporaryDirectory() as folder:
            is_right = judge(Path(folder), config) == pytest.approx(expected, rel=0.01)
    except CheckpointError as error:
        return Outcome("refused", str(error))
    return Outcome("exact" if is_right else "wrong")


def _shorten(family: str, why: str) -> str:
    """Keep the reason of a refusal, without the model's name or what follows."""
    why = why.split("; `run`")[0].split(". Its plan")[0].split(" (expected")[0].split("\n")[0]
    why = re.sub(r"^(what attention )?(?:of )?[A-Z]\w+ ", lambda found: found[1] or "", why)
    return why.removeprefix(family).strip(" :")[:120]


def _judge_stock(family: str, text: str | None = None) -> Outcome:
    """Return the worst outcome of transformers' own passes, with one slot and with two."""
    outcomes = [
        compare_stock(family, each, slots=n, text=text, tells_chunks=True)
        for each in VARIANTS
        for n in (1, 2)
    ]
    return min(outcomes, key=lambda outcome: ORDER.index(outcome.kind))


ORDER = ("wrong", "refused", "not built", "exact")
"""Kinds of outcomes, the worst first."""
Found = dict[str, Any]
"""Families by the kind of their outcome; of refused ones, by why they are."""


def _sort(families: list[str], outcomes: Iterable[Outcome]) -> Found:
    found: defaultdict[str, Any] = defaultdict(list)
    refused: defaultdict[str, list[str]] = defaultdict(list)
    for family, outcome in zip(families, outcomes, strict=True):
        if outcome.kind == "refused":
            refused[_shorten(family, outcome.why)].append(family)
        else:
            found[outcome.kind].append(family)
    return {**found, "refused": dict(refused)} if refused else dict(found)


def _judge_all() -> None:
    """Try each family, and write what was found."""
    families = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    names = [f"{family} {text}" for family, text in TEXT_PARTS]
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        found = {
            "transformers": transformers.__version__,
            "planned": _sort(families, pool.map(_judge_plan, families)),
            "own": _sort(families, pool.map(_judge, families)),
            "stock": _sort(families, pool.map(_judge_stock, families)),
            "text_parts": {
                "own": _sort(names, pool.map(_judge, *zip(*TEXT_PARTS, strict=True))),
                "stock": _sort(names, pool.map(_judge_stock, *zip(*TEXT_PARTS, strict=True))),
            },
        }
    FOUND.write_text(HEAD + yaml.safe_dump(found, sort_keys=False, width=100))


def _kinds(found: Found) -> Mapping[str, str]:
    """Return the kind of each family's outcome."""
    refused = (family for families in found.get("refused", {}).values() for family in families)
    return {
        **{family: kind for kind in found if kind != "refused" for family in found[kind]},
        **dict.fromkeys(refused, "refused"),
    }


def _name(families: Iterable[str]) -> str:
    return ", ".join(f"{each} {SINCE[each]}" if each in SINCE else each for each in families)


def _print_families(found: Found) -> None:
    """Print the table of all families that do anything, alike ones in one row."""
    planned, own, stock = (_kinds(found[way]) for way in ("planned", "own", "stock"))
    rows: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for family in sorted(own):
        sized = planned.get(family, "not built").replace("exact", "right")
        rows[sized, own[family], stock.get(family, "not built")].append(family)
    print("| number | planned | own passes | transformers' | stored forms | families |")
    print("|---|---|---|---|---|---|")
    ranks = {kind: rank for rank, kind in enumerate(("exact", "right", "wrong", "refused"))}
    for kinds, families in sorted(
        rows.items(), key=lambda row: [ranks.get(kind, 9) for kind in (*row[0][1:], row[0][0])]
    ):
        forms = "all" if kinds[1] == "exact" else "not packed" if "exact" in kinds else "none"
        print(f"| {len(families)} | {' | '.join(kinds)} | {forms} | {_name(families)} |")


_WAYS = {True: "offplan's own passes alone", False: "transformers' own passes alone"}


def _print_text_parts(found: Found) -> None:
    """Print the section on the text parts of multimodal families."""
    print(f"## Vision-language models, the text part\n\n{TEXT_PARTS_INTRODUCTION}")
    own, stock = _kinds(found["own"]), _kinds(found["stock"])
    texts: defaultdict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in own:
        family, text = name.split()
        is_own, is_stock = own[name] == "exact", stock[name] == "exact"
        way = "both ways" if is_own and is_stock else _WAYS[is_own]
        texts[f"{(own if is_own else stock)[name].capitalize()} by {way}"][family].append(text)
    for kind in sorted(texts):  # exact first
        named = (f"{_name([each])} ({', '.join(texts[kind][each])})" for each in texts[kind])
        print(f"{kind}: {', '.join(named)}\n")


def _print_refused(found: Found) -> None:
    print("| families | why |\n|---|---|")
    for why, families in sorted(found.get("refused", {}).items()):
        print(f"| {', '.join(families)} | {why.replace('|', '/')} |")


def main() -> None:
    """Print the page."""
    if "judge" in sys.argv:
        _judge_all()
    found = yaml.safe_load(FOUND.read_text())
    by_stock = found["stock"]["exact"]
    whole = [each for each in by_stock if each not in STOCK_CHUNKS | STOCK_CHUNKS_WITHOUT_WINDOW]
    named = INTRODUCTION.replace(WHOLE, ", ".join(whole))
    print(named.replace("VERSION", found["transformers"]))
    print(TABLE_INTRODUCTION)
    _print_families(found)
    print()
    _print_text_parts(found["text_parts"])
    for way, title in (("own", "offplan's own"), ("stock", "transformers' own")):
        print(f"## Refused by {title} passes\n")
        _print_refused(found[way])
        print()


if __name__ == "__main__":
    main()

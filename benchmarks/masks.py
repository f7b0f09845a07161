"""Time the masks of answers that follow a grammar, on the CPU, and print them as JSON.

    python -m benchmarks.masks TOKENIZER_FOLDER [--repeats 20] [--steps 200]

For each form: the time to compile it, and for each token of an answer of that form the time to go
on by it and to find which tokens may follow (``mask``), and the time to leave these tokens alone in
the logits of a row, with torch on the CPU (``apply``). The server makes the first while the device
makes a step, and the second on the device. ``cut`` is the time to cut 7 right drafts, before a pass
that checks them, and ``masks`` that to make the masks of such a pass. ``open_s`` is the time that
the first such request of a server takes for the tokenizer. Needs the extra ``serve``; the tokenizer
is that of any model.

``--steps`` also times so many steps of random weights of Qwen3-8B's sizes (``--layers`` of them, or
another ``--config``), of 1 text and of ``--texts``: all plain, and all with a grammar. ``share`` is
the part of a step that the grammars add, on the device that is there.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from benchmarks.serve import NUM_PROMPT, QWEN3_8B, time_texts
from offplan.capabilities.drafts import MOST_DRAFTED
from offplan.checkpoint.open import open_model
from offplan.plan import Offload
from offplan.runtime.device import find_device
from offplan.runtime.joined import Continued, JoinedTexts
from offplan.runtime.masks import RowMask
from offplan.runtime.rows import Rows
from offplan.runtime.session import Session
from offplan.runtime.texts import Text
from offplan.serve.formats import FORMATS
from offplan.serve.grammars import Grammars
from offplan.serve.requests import ChatRequest, CompletionRequest, Request, parse_request

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "born": {"type": "string", "format": "date"},
        "height_m": {"type": "number", "minimum": 0, "maximum": 3},
        "languages": {"type": "array", "items": {"enum": ["de", "en", "fr", "ja"]}},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "number": {"type": "integer"}},
            "required": ["street", "number"],
            "additionalProperties": False,
        },
        "about": {"type": "string", "maxLength": 400},
    },
    "required": ["name", "born", "height_m", "languages", "address", "about"],
    "additionalProperties": False,
}
ABOUT = (
    "She has written three books on the history of bridges, and teaches at the university of a "
    "town that has none. Her students know her for long walks, and for answers that begin with why."
)
ANSWER = json.dumps(
    {
        "name": "Anna Müller",
        "born": "1971-03-14",
        "height_m": 1.72,
        "languages": ["de", "fr", "ja"],
        "address": {"street": "Am Alten Hafen", "number": 12},
        "about": ABOUT,
    },
    ensure_ascii=False,
    indent=2,
)
TOOL = {"type": "function", "function": {"name": "save", "parameters": PERSON}}
CALL = f'<tool_call>\n{{"name": "save", "arguments": {ANSWER}}}\n</tool_call>'
CALLING: dict[str, Any] = {
    "messages": [{"role": "user", "content": "a"}],
    "tool_choice": "required",
}
WORDS = 'root ::= word (" " word)* "."\nword ::= [a-zA-Z,]+'
FORMS: dict[str, tuple[Request, str]] = {
    "schema": (parse_request(CompletionRequest, {"prompt": "a", "json_schema": PERSON}), ANSWER),
    "any JSON": (parse_request(CompletionRequest, {"prompt": "a", "json_schema": {}}), ANSWER),
    "regex": (parse_request(CompletionRequest, {"prompt": "a", "regex": "[a-zA-Z ,.]+"}), ABOUT),
    "grammar": (parse_request(CompletionRequest, {"prompt": "a", "grammar": WORDS}), ABOUT[:86]),
    "call": (parse_request(ChatRequest, {**CALLING, "tools": [TOOL]}), CALL),
}


def time_form(grammars: Grammars, tokenizer: Any, form: str, repeats: int) -> dict[str, Any]:
    request, answer = FORMS[form]
    tokens = tokenizer(answer, add_special_tokens=False).input_ids
    compiled, masked, applied = list[float](), list[float](), list[float]()
    cut, made = list[float](), list[float]()
    logits = torch.randn(1, grammars.vocabulary)
    for _ in range(repeats):
        began = time.perf_counter()
        (matcher,) = grammars.list_matchers(request, "a", 1)
        mask = RowMask(matcher, torch.device("cpu"), 0, MOST_DRAFTED)
        compiled.append(time.perf_counter() - began)
        for number, token in enumerate(tokens):
            began = time.perf_counter()
            mask.follow(number, token)
            mask.refresh(number + 1)
            masked.append(time.perf_counter() - began)
            assert mask.error is None, tokenizer.decode(tokens[: number + 1])
            began = time.perf_counter()
            mask(torch.empty(1, number + 1), logits)
            applied.append(time.perf_counter() - began)
            drafts = tokens[number + 1 : number + 1 + MOST_DRAFTED]
            if len(drafts) == MOST_DRAFTED:
                began = time.perf_counter()
                drafts = mask.cut(drafts)
                cut.append(time.perf_counter() - began)
                began = time.perf_counter()
                mask.prepare(drafts)
                made.append(time.perf_counter() - began)
    return {
        "form": form,
        "tokens": len(tokens),
        "compile_s": statistics.median(compiled),
        "mask_us": spread(masked),
        "apply_us": spread(applied),
        "cut_us": spread(cut),
        "masks_us": spread(made),
    }


def time_steps(grammars: Grammars, tokenizer: Any, given: Any) -> Iterator[dict[str, Any]]:
    """Yield the times of steps with and without grammars."""
    config = QWEN3_8B if given.config is None else json.loads(given.config.read_text())
    config |= {"num_hidden_layers": given.layers, "vocab_size": grammars.vocabulary}
    request = parse_request(
        CompletionRequest, {"prompt": "a", "json_schema": {"type": "string", "minLength": 10**5}}
    )
    decision = Offload(prefetch_step=1, prefill_chunk=64, embeddings="device", store="host")
    context = NUM_PROMPT + given.steps + 8
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        model = open_model(str(path))
        with Session(model, decision, context=context, device=find_device(None)) as session:
            rows = Rows(session, given.texts)
            rows.warm_up(NUM_PROMPT)
            for number in sorted({1, given.texts}):
                times = dict[str, float]()
                for way in ("plain", "formed"):
                    matchers: list[Any] = [None] * number
                    if way == "formed":
                        matchers = grammars.list_matchers(request, "a", number)
                    texts = JoinedTexts(rows)
                    texts.join(
                        [
                            Continued(
                                Text(
                                    tokenizer, [*range(9, 9 + NUM_PROMPT)], num_tokens=given.steps
                                ),
                                matcher=matcher,
                            )
                            for matcher in matchers
                        ]
                    )
                    times[way] = time_texts(texts)
                share = 1 - times["plain"] / times["formed"]
                yield {"texts": number, "steps": given.steps, **times, "share": share}


def spread(times_s: Sequence[float]) -> dict[str, float]:
    """Return the mean, the median, and the longest of all but a hundredth, in microseconds."""
    most = sorted(times_s)[int(0.99 * len(times_s))]
    means = {"mean": statistics.mean(times_s), "median": statistics.median(times_s), "p99": most}
    return {name: round(1e6 * value, 1) for name, value in means.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokenizer")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--config", type=Path)
    given = parser.parse_args()
    tokenizer: Any = AutoTokenizer.from_pretrained(given.tokenizer)
    hermes = next(each for each in FORMATS if each.name == "hermes")
    grammars = Grammars(tokenizer, {tokenizer.eos_token_id}, len(tokenizer), hermes, False)
    began = time.perf_counter()
    grammars.list_matchers(FORMS["regex"][0], "a", 1)
    opened = {"vocabulary": len(tokenizer), "open_s": time.perf_counter() - began}
    print(json.dumps({**opened, "threads": torch.get_num_threads()}), flush=True)
    for form in FORMS:
        print(json.dumps(time_form(grammars, tokenizer, form, given.repeats)), flush=True)
    if given.steps:
        for told in time_steps(grammars, tokenizer, given):
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()

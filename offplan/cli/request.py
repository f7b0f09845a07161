"""Prompts that ``run`` continues, in their order, and how each of them ends."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from offplan.checkpoint.model import Model
from offplan.cli.inputs import read_input
from offplan.cli.lines import Line
from offplan.cli.output import printing_to_stderr
from offplan.cli.run_options import RunOptions
from offplan.errors import InputError
from offplan.library.sessions import check_context
from offplan.plan import Plan
from offplan.runtime.joined import Continued
from offplan.runtime.prompts import (
    load_tokenizer,
    read_chat,
    read_prompt,
    read_rendered,
    tokenizer_sha256,
)
from offplan.runtime.rendering import Renderer
from offplan.runtime.rules import TokenRules, read_rules
from offplan.runtime.sampling import Sampling
from offplan.runtime.texts import Text
from offplan.serve.errors import ApiError
from offplan.serve.reading import DRAWN, change_rules, read_drawing
from offplan.serve.requests import ChatRequest
from offplan.serve.showing import Showing

_END = re.compile(r"\r?\n\Z")
Chat = Sequence[Mapping[str, Any]]
"""Messages: what was said, by whom."""


@dataclass(frozen=True)
class GenerationRequest:
    """Prompts, and all that the texts behind them depend on beside a plan's model."""

    prompts: Sequence[tuple[str, str | Chat]]
    """Name of each prompt in errors, and the prompt: a text to be continued, or messages to be
    answered."""
    chat: bool
    """True if a prompt is a user's message; messages are answered in any case."""
    num_tokens: int
    """Tokens of each text, at most."""
    stop_strings: Sequence[str]
    sampling: Sampling | None
    """Way in which tokens are drawn; None for greedy generation."""
    lines: Sequence[Line] = ()
    """Lines of a file that the prompts stand in, none for others; what one names is its own."""

    @property
    def shown(self) -> list[str]:
        """Texts printed before each continuation: its prompt, or nothing before an answer."""
        return [prompt if isinstance(prompt, str) else "" for _, prompt in self.prompts]

    def read_texts(self, plan: Plan, model: Model) -> list[Text]:
        """Turn the prompts into tokens of a plan's model, ready to be continued.

        Raises InputError, which names the prompt, for what cannot be read or does not fit the
        context, and HubError.
        """
        if not self.prompts:
            return []
        with printing_to_stderr():
            tokenizer = load_tokenizer(model)
        rules, renderer = read_rules(model, tokenizer), Renderer()
        showing, texts = Showing(model, tokenizer, renderer), []
        for number, (name, prompt) in enumerate(self.prompts):
            asked = self.lines[number].request if self.lines else None
            num_tokens = (asked and asked.num_tokens) or self.num_tokens
            try:
                if isinstance(prompt, str):
                    found = read_prompt(model, tokenizer, prompt)
                elif isinstance(asked, ChatRequest):
                    found = read_rendered(model, tokenizer, showing.render(asked))
                else:
                    found = read_chat(model, tokenizer, renderer, prompt)
                tokens = found[0].tolist()
                check_context(plan, len(tokens), num_tokens)
                own_rules = change_rules(asked, rules, model) if asked else rules
            except (InputError, ApiError) as error:
                why = f"{name}: {error}" if len(self.prompts) > 1 else str(error)
                raise InputError(why) from None
            text = Text(
                tokenizer,
                tokens,
                num_tokens=num_tokens,
                rules=own_rules,
                stop_strings=self.stop_strings if not asked or asked.stop is None else asked.stop,
                number=number,
            )
            texts.append(text)
        return texts

    def continue_text(self, text: Text) -> Continued:
        """Say how a text is continued: as its line says, and else as the command does.

        Raises InputError for a line by which nothing can be drawn.
        """
        if not self.lines:
            return Continued(text, self.sampling)
        asked = self.lines[text.number].request
        named = [key for key in (*DRAWN, "seed") if getattr(asked, key) is not None]
        if not named:
            return Continued(text, self.sampling, asked.num_logprobs)
        usual = self.sampling or Sampling(1.0 if {*DRAWN[1:]} & {*named} else 0)
        own = {key: value for key in DRAWN if (value := getattr(usual, key)) is not None}
        try:
            drawing = read_drawing(asked, own)
        except ApiError as error:
            raise InputError(error.message) from None
        if drawing is None:
            return Continued(text, None, asked.num_logprobs)
        if asked.seed is None:
            return Continued(text, replace(drawing, seed=usual.seed), asked.num_logprobs)
        return Continued(text, drawing, asked.num_logprobs, 0)

    def fingerprint(self, model: Model, rules: TokenRules, *, dummy_weights: bool) -> str:
        """Sum up in twelve digits what the texts depend on beside their prompts.

        Raises HubError.
        """
        ruled = {**asdict(rules), "end_tokens": sorted(rules.end_tokens)}
        sampling = None if self.sampling is None else asdict(self.sampling)
        parts = [model.source, model.revision, model.headers_sha256, model.config, dummy_weights]
        asked = [self.num_tokens, [*self.stop_strings], sampling, self.chat]
        return hashlib.sha256(
            json.dumps([parts, asked, ruled, tokenizer_sha256(model)]).encode()
        ).hexdigest()[:12]


def make_request(given: RunOptions, lines: Sequence[Line], plan: Plan) -> GenerationRequest:
    """Ask for what the options of ``run`` ask for; ``lines`` are those of its file of prompts.

    Raises InputError for a file that cannot be read, and for values that cannot be drawn with.
    """
    return GenerationRequest(
        list_prompts(given.prompt or (), given.prompt_file or (), lines, chat=given.chat),
        given.chat,
        given.max_new_tokens or plan.workload.output_tokens,
        given.stop_strings or (),
        read_sampling(given.temperature, given.top_k, given.top_p, given.seed),
        lines,
    )


def list_prompts(
    typed: Sequence[str], files: Sequence[Path], lines: Sequence[Line], *, chat: bool
) -> list[tuple[str, str | Chat]]:
    """List all prompts behind what an error calls them; in a ``chat`` a text is what a user said.

    A file's last line break, of either kind, is not part of its prompt. Raises InputError for a
    file that cannot be read.
    """

    def say(text: str) -> str | Chat:
        return [{"role": "user", "content": text}] if chat else text

    return [
        *((f"--prompt {number}", say(text)) for number, text in enumerate(typed, start=1)),
        *(
            (f"--prompt-file {path}", say(_END.sub("", read_input(path, "prompt"))))
            for path in files
        ),
        *((f"line {line.number}", line.messages or say(line.prompt)) for line in lines),
    ]


def read_sampling(
    temperature: float | None, top_k: int | None, top_p: float | None, seed: int | None
) -> Sampling | None:
    """Return how tokens are drawn: None, greedily, where nothing is named to draw by.

    Raises InputError for a value that cannot be drawn with, and for one that greedy generation
    does not use.
    """
    if temperature == 0 or (temperature, top_k, top_p) == (None, None, None):
        if (top_k, top_p, seed) != (None, None, None):
            raise InputError(
                "greedy generation draws nothing: leave --top-k, --top-p and --seed out, or name a "
                "--temperature above 0"
            )
        return None
    return Sampling(1.0 if temperature is None else temperature, top_k, top_p, seed or 0)

"""A request as texts that are to be continued: tokens, rules and limits of the served model."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from offplan.checkpoint.model import Model
from offplan.errors import InputError
from offplan.runtime.prompts import read_prompt, read_rendered
from offplan.runtime.rendering import Renderer
from offplan.runtime.rules import TokenRules
from offplan.runtime.sampling import MAX_SEED, Sampling
from offplan.runtime.texts import Text
from offplan.serve.answers import CallParser
from offplan.serve.errors import ApiError, refuse_length, refuse_token
from offplan.serve.formats import Divider, find_divider, find_format, list_hidden
from offplan.serve.grammars import Grammars
from offplan.serve.requests import ChatRequest, CompletionRequest, Request
from offplan.serve.schemas import name_types
from offplan.serve.showing import Showing


@dataclass(frozen=True)
class Reader:
    """Turns requests into texts of one model."""

    model: Model
    """The model, whose ``source`` errors name: a name that clients may see."""
    tokenizer: Any
    rules: TokenRules
    context: int
    """Tokens that a prompt and its text may have together."""
    renderer: Renderer
    drawing: Mapping[str, float] = field(default_factory=dict)
    """Values by which tokens are drawn where a request names none, by the names of its fields."""
    divider: Divider = field(init=False)
    """What divides answers into text, thoughts and calls."""
    hidden: frozenset[int] = field(init=False)
    """Special tokens that no answer shows."""
    showing: Showing = field(init=False)
    grammars: Grammars = field(init=False)

    def __post_init__(self) -> None:
        """Find how the model thinks and calls tools."""
        found = find_divider(self.tokenizer, self.model.model_type)
        object.__setattr__(self, "divider", found)
        object.__setattr__(self, "hidden", list_hidden(self.tokenizer, found.template))
        showing = Showing(self.model, self.tokenizer, self.renderer)
        object.__setattr__(self, "showing", showing)
        grammars = Grammars(
            self.tokenizer,
            self.rules.end_tokens,
            self.model.architecture.vocabulary_size or 0,
            find_format(self.tokenizer),
            showing.thinks,
        )
        object.__setattr__(self, "grammars", grammars)

    @classmethod
    def of(
        cls,
        model: Model,
        tokenizer: Any,
        rules: TokenRules,
        context: int,
        name: str,
        renderer: Renderer,
        drawing: Mapping[str, float] | None = None,
    ) -> "Reader":
        """Make a reader whose errors call the model ``name``, and name no path."""
        return cls(replace(model, source=name), tokenizer, rules, context, renderer, drawing or {})

    def render(self, request: ChatRequest) -> str:
        """Return a chat as the model's template has it; raises ApiError with 400."""
        try:
            return self.showing.render(request)
        except InputError as error:
            raise ApiError(400, error.facts) from None

    def tokenize(self, text: str, adds_special: bool) -> list[int]:
        """Return the tokens of a text; raises ApiError with 400."""
        if not text:
            return []
        try:
            found = read_prompt(self.model, self.tokenizer, text, add_special_tokens=adds_special)
        except InputError as error:
            raise ApiError(400, error.facts) from None
        tokens: list[int] = found[0].tolist()
        return tokens

    @property
    def capabilities(self) -> list[str]:
        """What the model does, in Ollama's words."""
        calls = self.divider.finds_calls and self.showing.has_tools
        return ["completion", *["tools"] * calls, *["thinking"] * self.showing.thinks]

    @property
    def notes(self) -> list[str]:
        """What whoever starts the server should know of tools."""
        if not self.showing.template:
            return []
        notes = []
        if lacks := self.showing.lacks:
            notes.append(
                f"the chat template does not show {' and '.join(lacks)}: requests with them get "
                "status 400"
            )
        if self.showing.has_tools and not self.divider.finds_calls:
            notes.append("calls of tools stay in the text, since their format is not known")
        return notes

    def read(self, request: Request, rendered: str = "") -> list[Text]:
        """Return the texts that a request asks for, ``n`` for each of its prompts.

        ``rendered`` is what ``render`` made of a chat. Raises ApiError with 400 for what cannot be
        read, and beyond the context.
        """
        try:
            prompts = self._read_prompts(request, rendered)
            rules = change_rules(request, self.rules, self.model)
        except InputError as error:
            raise ApiError(400, error.facts) from None
        return [
            self._make_text(request, rules, number * request.n + again, each)
            for number, each in enumerate(prompts)
            for again in range(request.n)
        ]

    def read_echo(self, request: Request, text: Text) -> str | None:
        """Return the prompt as the answer shows it before a text; None if it does not."""
        if not isinstance(request, CompletionRequest) or not request.echo:
            return None
        asked = request.prompt[text.number // request.n]
        return asked if isinstance(asked, str) else str(self.tokenizer.decode(asked))

    def divides(self, request: Request) -> bool:
        """Return True if the server divides an answer into text, thoughts and calls."""
        return self.divider.template is not None and isinstance(request, ChatRequest)

    def make_call_parser(self, request: Request, text: Text) -> CallParser | None:
        """Return what divides the answer to a request; None if it stays as it is."""
        if not self.divides(request):
            return None
        return CallParser(
            self.divider.template,
            self.tokenizer.decode(text.prompt),
            _list_tools(request),
            has_short_ids=self.divider.has_short_ids,
        )

    def _read_prompts(self, request: Request, rendered: str) -> list[list[int]]:
        if isinstance(request, ChatRequest):
            return [read_rendered(self.model, self.tokenizer, rendered)[0].tolist()]
        assert isinstance(request, CompletionRequest), "there are two kinds"
        return [self._read_prompt(number, each) for number, each in enumerate(request.prompt)]

    def _read_prompt(self, number: int, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            tokens: list[int] = read_prompt(self.model, self.tokenizer, prompt)[0].tolist()
            return tokens
        known = self.model.architecture.vocabulary_size
        if known is not None and (largest := max(prompt)) >= known:
            raise refuse_token(largest, known, "prompt", f"prompt.{number}")
        return list(prompt)

    def _make_text(
        self, request: Request, rules: TokenRules, number: int, prompt: list[int]
    ) -> Text:
        room, asked = self.context - len(prompt), request.num_tokens
        if request.caps_tokens and asked is not None:
            asked = min(asked, max(room, 1))
        if room < (1 if asked is None else asked):
            raise refuse_length(self.context, len(prompt), asked)
        return Text(
            self.tokenizer,
            prompt,
            # the token that follows an echoed prompt costs nothing, and is not shown
            num_tokens=max(1, min(room, request.usual_tokens or room) if asked is None else asked),
            rules=rules,
            stop_strings=request.stop or (),
            number=number,
            keeps_special=self.divides(request),
            hidden=self.hidden,
        )


def _list_tools(request: Request) -> list[dict[str, Any]]:
    """Return the tools that a request shows to the model, as the parser of calls knows them."""
    tools = (isinstance(request, ChatRequest) and request.shown_tools) or []
    for tool in tools:
        function = tool["function"]
        function["parameters"] = name_types(function.get("parameters"))
    return tools


def change_rules(request: Request, rules: TokenRules, model: Model) -> TokenRules:
    """Return a model's rules as a request changes them; raises InputError for unknown tokens."""
    known = model.architecture.vocabulary_size or 0
    biases = {int(token): bias for token, bias in (request.logit_bias or {}).items()}
    for token in (*biases, *(request.stop_token_ids or ())):
        if token >= known:  # of a bias, a pass would fail
            raise InputError(f"there is no token {token}: the model's last one is {known - 1}")
    named: dict[str, Any] = {
        "repetition_penalty": request.repetition_penalty,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "min_new_tokens": request.min_tokens,
        "logit_bias": tuple(biases.items()) or None,
    }
    if request.ignore_eos:
        named |= {"end_tokens": frozenset(), "stop_strings": ()}
    if request.stop_token_ids:
        ends = named.get("end_tokens", rules.end_tokens)
        named["end_tokens"] = ends | {*request.stop_token_ids}
    changed = {key: value for key, value in named.items() if value is not None}
    return replace(rules, **changed) if changed else rules


DRAWN = ("temperature", "top_k", "top_p", "min_p", "typical_p")
"""Fields by which a request says how its tokens are drawn."""


def read_drawing(request: Request, usual: Mapping[str, float] | None = None) -> Sampling | None:
    """Return how a request's tokens are drawn: None, greedily, for a temperature of 0.

    ``usual`` is for what a request does not name, and then OpenAI's temperature of 1. Without a
    seed each request draws anew. Raises ApiError with 400 for what cannot be drawn with.
    """
    named = {key: value for key in DRAWN if (value := getattr(request, key)) is not None}
    drawn: dict[str, Any] = {"temperature": 1.0, **(usual or {}), **named}
    if request.do_sample and "temperature" not in named:
        drawn["temperature"] = drawn["temperature"] or 1.0
    if drawn["temperature"] == 0:
        return None
    if drawn.get("top_k") in (0, -1):
        del drawn["top_k"]
    # -1 as llama.cpp and vLLM have it
    named_seed = None if request.seed == -1 else request.seed
    seed = secrets.randbelow(MAX_SEED) if named_seed is None else named_seed % MAX_SEED
    try:
        # the texts of a request take the seeds behind its own
        return Sampling(**drawn, seed=min(seed, MAX_SEED - 2**16))
    except InputError as error:
        raise ApiError(400, str(error)) from None

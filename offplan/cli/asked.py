"""What ``run`` is asked to continue: prompts in their order, and how each of them ends."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from offplan.checkpoint.model import Model
from offplan.cli.inputs import read_input
from offplan.cli.lines import Line
from offplan.errors import InputError
from offplan.plan import Plan
from offplan.prompts import find_end_tokens, load_tokenizer, read_chat, read_prompt
from offplan.runtime.sampling import Sampling
from offplan.sessions import check_context
from offplan.texts import Text

Chat = Sequence[Mapping[str, str]]
"""Messages: what was said, by whom."""


@dataclass(frozen=True)
class Asked:
    """Prompts, and all that the texts behind them depend on beside a plan's model."""

    prompts: Mapping[str, str | Chat]
    """What is to be continued, by what an error calls it."""
    lines: Sequence[Line]
    """The lines that they stand in, where they come from a file of prompts."""
    num_tokens: int
    """Tokens of each text, at most."""
    stop_strings: Sequence[str]
    sampling: Sampling | None
    """None for greedy generation."""

    @property
    def shown(self) -> list[str]:
        """What is printed before each text: what it continues; nothing before an answer."""
        return [prompt if isinstance(prompt, str) else "" for prompt in self.prompts.values()]

    def read_texts(self, plan: Plan, model: Model) -> list[Text]:
        """Turn the prompts into tokens of a plan's model, ready to be continued.

        Raises InputError, which names the prompt, for what cannot be read or does not fit the
        context, and HubError.
        """
        if not self.prompts:
            return []
        tokenizer = load_tokenizer(model)
        end_tokens = find_end_tokens(model, tokenizer)
        texts = []
        for number, (name, prompt) in enumerate(self.prompts.items()):
            read: Any = read_prompt if isinstance(prompt, str) else read_chat
            try:
                tokens = read(model, tokenizer, prompt)[0].tolist()
                check_context(plan, len(tokens), self.num_tokens)
            except InputError as error:
                raise InputError(f"{name}: {error}" if len(self.prompts) > 1 else error) from None
            text = Text(
                tokenizer,
                tokens,
                num_tokens=self.num_tokens,
                end_tokens=end_tokens,
                stop_strings=self.stop_strings,
                number=number,
            )
            texts.append(text)
        return texts

    def fingerprint(self, model: Model, *, dummy_weights: bool) -> str:
        """Sum up what the texts depend on, in twelve digits."""
        sampling = None if self.sampling is None else asdict(self.sampling)
        chats = [not isinstance(prompt, str) for prompt in self.prompts.values()]
        parts = [model.source, model.revision, model.headers_sha256, model.config, dummy_weights]
        asked = [self.num_tokens, list(self.stop_strings), sampling, chats]
        return hashlib.sha256(json.dumps([parts, asked]).encode()).hexdigest()[:12]


def list_prompts(
    typed: Sequence[str], files: Sequence[Path], lines: Sequence[Line], *, chat: bool
) -> dict[str, str | Chat]:
    """List all prompts by what an error calls them; in a ``chat`` a text is what a user said.

    A file's last line break is not part of its prompt. Raises InputError for a file that cannot be
    read.
    """
    prompts: dict[str, str | Chat] = {}
    for number, text in enumerate(typed, start=1):
        prompts[f"--prompt {number}"] = text
    for path in files:
        prompts[f"--prompt-file {path}"] = read_input(path, "prompt").removesuffix("\n")
    for line in lines:
        prompts[f"line {line.number}"] = line.messages or line.prompt
    if chat:
        for name, prompt in prompts.items():
            if isinstance(prompt, str):
                prompts[name] = [{"role": "user", "content": prompt}]
    return prompts


def read_sampling(
    temperature: float | None, top_k: int | None, top_p: float | None, seed: int
) -> Sampling | None:
    """Return how tokens are drawn: None, greedily, where nothing is named to draw by.

    Raises InputError for a value that cannot be drawn with.
    """
    if (temperature, top_k, top_p) == (None, None, None) or temperature == 0:
        return None
    return Sampling(1.0 if temperature is None else temperature, top_k, top_p, seed)

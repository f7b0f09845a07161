"""Rules of a model's files on which tokens may follow, and which of them end a text."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from offplan.checkpoint.config import GENERATION_NAME as _FILE
from offplan.checkpoint.jsontext import describe, quote
from offplan.checkpoint.model import Model
from offplan.checkpoint.weights import find_small_files
from offplan.errors import InputError

_NOT_SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "constraints": (),
    "force_words_ids": (),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "guidance_scale": (1,),
    "sequence_bias": (),
    "encoder_repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "bad_words_ids": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "watermarking_config": (),
    "token_healing": (False,),
    "assistant_ensemble_weight": (),
    "max_time": (),
}
"""Other settings that change greedy texts, with the values beside null that leave them as they are.

Source: transformers 5.23, ``_get_logits_processor``, ``_get_stopping_criteria`` and
``get_generation_mode``. Settings of drawing, the length or the cache are not among these.
"""
_MOST_TOKEN = 2**31
"""Beyond any token, of either sign, and within what tensors of numbers hold."""


class MadePenalty(LogitsProcessor):
    """Lowers the logits of tokens that a text has, its prompt not counted.

    Source: OpenAI's API, "Frequency and presence penalties"; transformers has none.
    """

    def __init__(self, prompt_tokens: int, presence: float, frequency: float) -> None:
        """Lower by ``presence`` once, and by ``frequency`` for each time that a token was made."""
        self._begin, self._presence, self._frequency = prompt_tokens, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores, float32 of [texts, vocabulary]; the host waits for nothing."""
        made = input_ids[:, self._begin :]
        counts = torch.zeros_like(scores).scatter_add_(
            1, made, torch.ones_like(made, dtype=scores.dtype)
        )
        return scores - self._frequency * counts - self._presence * (counts > 0)


@dataclass(frozen=True)
class TokenRules:
    """The rules on which tokens may follow and what ends a text, by transformers' names."""

    end_tokens: frozenset[int] = frozenset()
    """Tokens that end a text."""
    stop_strings: tuple[str, ...] = ()
    """Strings that end a text."""
    repetition_penalty: float = 1.0
    """Divides the logits above 0, and multiplies the others, of tokens that were there before."""
    suppress_tokens: tuple[int, ...] = ()
    """Tokens that are never made."""
    begin_suppress_tokens: tuple[int, ...] = ()
    """Tokens that do not begin what follows a prompt."""
    min_length: int = 0
    """Tokens of prompt and text before which no token ends the text."""
    min_new_tokens: int = 0
    """Tokens of the text before which none ends it."""
    presence_penalty: float = 0.0
    """Lowers the logits of tokens that the text has."""
    frequency_penalty: float = 0.0
    """Lowers the logits of tokens for each time that the text has them."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Tokens of the vocabulary, and what is added to the logit of each."""

    def make_processors(self, prompt_tokens: int, device: torch.device) -> LogitsProcessorList:
        """Return what changes the logits of a text behind so many tokens, in stock's order.

        Runs on the current stream of ``device``.
        """
        processors = LogitsProcessorList()
        if self.logit_bias:
            biases = {(token,): bias for token, bias in self.logit_bias}
            processors.append(SequenceBiasLogitsProcessor(biases))
        if self.repetition_penalty != 1:
            processors.append(RepetitionPenaltyLogitsProcessor(self.repetition_penalty))
        if self.presence_penalty or self.frequency_penalty:
            processors.append(
                MadePenalty(prompt_tokens, self.presence_penalty, self.frequency_penalty)
            )
        ends, on = sorted(self.end_tokens), str(device)
        if ends and self.min_length > 0:
            processors.append(MinLengthLogitsProcessor(self.min_length, ends, on))
        if ends and self.min_new_tokens > 0:
            processors.append(
                MinNewTokensLengthLogitsProcessor(prompt_tokens, self.min_new_tokens, ends, on)
            )
        if self.suppress_tokens:
            processors.append(SuppressTokensLogitsProcessor(self.suppress_tokens, on))
        if self.begin_suppress_tokens:
            processors.append(
                SuppressTokensAtBeginLogitsProcessor(self.begin_suppress_tokens, prompt_tokens, on)
            )
        return processors


_DRAWN = {
    "temperature": "a number from 0 on",
    "top_k": "a number of tokens",
    "top_p": "a number above 0 and up to 1",
    "min_p": "a number from 0 to 1",
    "typical_p": "a number above 0 and up to 1",
}
"""Settings of drawing that are used, and what each is to be."""
_NOT_DRAWN: Mapping[str, tuple[float, ...]] = {
    "top_h": (),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
}
"""Settings of drawing that are not, with the values beside null that leave it as it is."""


def read_recommended(model: Model) -> dict[str, float]:
    """Read how a model's generation config draws tokens, by the names of ``Sampling``.

    ``do_sample: false`` is a temperature of 0. What the file does not name is not there, and
    transformers' own default of 50 for ``top_k`` is not either. Raises InputError for a value that
    cannot be drawn with, and for a setting that is not supported. Raises HubError.
    """
    found, where = _read(model)
    if told := next(_list_changes(found, _NOT_DRAWN), None):
        raise InputError(
            f"{where} has {told}, by which offplan does not draw: serve without the file's drawing "
            "(generation config `none`)"
        )
    drawn = {}
    for key, expected in _DRAWN.items():
        value = getattr(found, key, None)
        if value is None:
            continue
        kind = int if key == "top_k" else (int, float)
        least = 0 if key in ("temperature", "min_p") else 1e-9
        most = math.inf if key in ("temperature", "top_k") else 1
        is_off = key == "top_k" and value == 0
        if not _is(value, kind) or not (is_off or (least <= value <= most and value < math.inf)):
            raise _wrong(key, value, expected, where)
        if not is_off:
            drawn[key] = value
    if getattr(found, "do_sample", None) is False:
        return {"temperature": 0.0}
    return drawn


def read_rules(model: Model, tokenizer: Any) -> TokenRules:
    """Read the rules of a model's generation config, or where it has none of its config.

    End tokens are those of the generation config, or else of the config, and the tokenizer's own.

    Raises InputError for a file that cannot be read, and for a value that is none. Raises
    InputError for what would change a greedy text and is not supported. Raises HubError.
    """
    found, where = _read(model)
    if told := next(_list_changes(found, _NOT_SUPPORTED), None):
        raise InputError(
            f"{where} has {told}, which `run` does not support and which would change the text: "
            "copy the model's folder, take the key out, and plan the copy"
        )
    ends = _list(found.eos_token_id, int, "eos_token_id", where)
    if not ends:
        ends = model.architecture.end_tokens
    ends += _list(tokenizer.eos_token_id, int, "the tokenizer's eos_token_id", model.source)
    penalty = found.repetition_penalty
    if penalty is not None and not (_is(penalty, (int, float)) and 0 < penalty < math.inf):
        raise _wrong("repetition_penalty", penalty, "a number above 0", where)
    lengths: dict[str, Any] = {}
    for key in ("min_length", "min_new_tokens"):
        lengths[key] = getattr(found, key) or 0
        if not _is(lengths[key], int):
            raise _wrong(key, lengths[key], "a number of tokens", where)
    strings = _list(found.stop_strings, str, "stop_strings", where)
    begin = _list(found.begin_suppress_tokens, int, "begin_suppress_tokens", where)
    return TokenRules(
        end_tokens=frozenset(ends),
        stop_strings=tuple(filter(None, strings)),
        repetition_penalty=1.0 if penalty is None else float(penalty),
        suppress_tokens=_list(found.suppress_tokens, int, "suppress_tokens", where),
        begin_suppress_tokens=begin,
        **lengths,
    )


def _list_changes(found: Any, neutral: Mapping[str, tuple[Any, ...]]) -> Iterator[str]:
    """Yield keys with their values, of those that are named, whose values change something."""
    for key, values in neutral.items():
        value = getattr(found, key, None)
        if value is not None and value not in values:
            yield f"{key} {quote(value)}"


def _list(value: Any, kind: type, key: str, where: str) -> tuple[Any, ...]:
    """Return the values of a key that may have one or a list; null is none."""
    values = value if isinstance(value, list) else [value]
    for each in values:
        if each is not None and not _is(each, kind):
            expected = "the number of a token" if kind is int else "a text"
            raise _wrong(key, each, expected, where)
    return tuple(each for each in values if each is not None)


def _is(value: Any, kind: type | tuple[type, ...]) -> bool:
    is_huge = isinstance(value, int) and abs(value) >= _MOST_TOKEN
    return isinstance(value, kind) and not isinstance(value, bool) and not is_huge


def _wrong(key: str, value: Any, expected: str, where: str) -> InputError:
    return InputError(
        f"{where}: found {quote(value)} as {key}, expected {expected}; correct it, or fetch it "
        "again"
    )


def _read(model: Model) -> tuple[Any, str]:
    """Read the generation config, or what the config says in its place; and name the file.

    Source: transformers 5.23, ``GenerationMixin.adjust_generation_fn``.
    """
    folder = find_small_files(model, (_FILE,))
    where = str(folder / _FILE)
    try:
        if (folder / _FILE).is_file():
            return GenerationConfig.from_pretrained(str(folder), local_files_only=True), where
        where = f"the config of {model.source}"
        return GenerationConfig.from_model_config(dict(model.config)), where
    # what stands in the files may be anything, and so are the errors
    except Exception as error:
        raise InputError(
            f"{where} cannot be read ({describe(error)}); correct it, or fetch it again"
        ) from None

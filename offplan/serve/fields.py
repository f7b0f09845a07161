"""The table of fields that requests may have: which the server uses, ignores and refuses.

Source: OpenAI's API reference; vLLM 0.33 (``ChatCompletionRequest``), llama.cpp's server
(``server-schema.cpp``) and SGLang 0.5.23 (``protocol.py``), transformers' and TGI's names for the
same.
"""

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from offplan.serve.errors import FieldError

Path = Literal["chat", "completions"]
BOTH: tuple[Path, ...] = ("chat", "completions")
_LIKENESS = 0.86
"""Likeness of two names, as difflib has it, from which one counts as a typo of the other."""


@dataclass(frozen=True)
class Field:
    """A field of a request's top level."""

    name: str
    does: str
    """What the field does, or the name of the field that does it here."""
    status: Literal["used", "refused", "ignored"]
    """Refused fields may be null or one of ``neutral``; ignored ones may be anything."""
    neutral: tuple[Any, ...] = ()
    """Values that leave a text as it is, where the field is not used."""
    paths: tuple[Path, ...] = BOTH
    """Paths that the row holds for."""
    means: str = ""
    """Field that a neutral value sets, lest the model's files do; empty for none."""


def _use(name: str, does: str, *paths: Path, neutral: tuple[Any, ...] = ()) -> Field:
    return Field(name, does, "used", neutral, paths or BOTH)


def _refuse(
    name: str, does: str, *neutral: Any, paths: tuple[Path, ...] = BOTH, means: str = ""
) -> Field:
    return Field(name, does, "refused", neutral, paths, means)


def _ignore(does: str, *names: str) -> list[Field]:
    return [Field(name, does, "ignored") for name in names]


FIELDS: tuple[Field, ...] = (
    _use("model", "the name that `/v1/models` lists"),
    _use("messages", "the chat so far", "chat", neutral=([],)),
    _use("prompt", "a text, tokens, or up to 64 of either", "completions", neutral=("", [])),
    _use("max_tokens", "tokens of an answer, at most; 0 with `echo`"),
    _use("max_completion_tokens", "the same", "chat"),
    _use("min_tokens", "tokens before which no end token ends the text"),
    _use("ignore_eos", "true goes on behind end tokens, to `max_tokens`"),
    _use("stop", "up to 16 strings that end a text, and are left out"),
    _use("stop_token_ids", "more tokens that end a text"),
    _use("n", "texts for each prompt, up to the plan's batch"),
    _use("seed", "fixes what is drawn; further texts have the next numbers"),
    _use("temperature", "0 is greedy"),
    _use("top_p", "draw from the likeliest of this probability together; 1 is off"),
    _use("top_k", "draw from so many; 0 and -1 are off"),
    _use("min_p", "draw from what has this part of the likeliest's probability; 0 is off"),
    _use("typical_p", "transformers' typical sampling; 1 is off"),
    _use("repetition_penalty", "divides logits of tokens of prompt and text; 1 is off"),
    _use("presence_penalty", "-2 to 2, once for each token that the text has"),
    _use("frequency_penalty", "-2 to 2, for each time that the text has the token"),
    _use("logit_bias", "-100 to 100, by the token's number"),
    _use("logprobs", "chat: true; completions: likeliest tokens to show, up to 20"),
    _use("top_logprobs", "likeliest tokens to show, up to 20", "chat", neutral=(0,)),
    _use("echo", "the prompt before the text, with its logprobs", "completions", neutral=(False,)),
    _use("stream", "chunks as they come"),
    _use("stream_options", "`include_usage`, `continuous_usage_stats`"),
    _use("tools", "functions that the template shows", "chat", neutral=([],)),
    _use(
        "tool_choice",
        "`auto`, `none`, `required`, or a tool by name",
        "chat",
        neutral=("auto", "none"),
    ),
    _use("parallel_tool_calls", "false makes one call where `tool_choice` is `required`", "chat"),
    _use("response_format", "`json_object` or `json_schema`: the answer is of this form"),
    _use("structured_outputs", "one of `json`, `regex`, `choice`, `grammar`, `json_object`"),
    _use("guided_json", "a JSON schema, as an object or a text"),
    _use("json_schema", "the same"),
    _use("guided_regex", "a regular expression of the whole answer"),
    _use("regex", "the same"),
    _use("guided_choice", "the texts that the answer may be"),
    _use("guided_grammar", "a grammar in GBNF or Lark"),
    _use("grammar", "the same"),
    _use("ebnf", "the same"),
    _use("user", "names a client"),
    _use("safety_identifier", "names a client"),
    _use("prompt_cache_key", "names a client"),
    _use("cache_salt", "names a client"),
    _refuse("best_of", "`n`", 0, 1),
    _refuse("suffix", "text behind the answer", ""),
    _refuse("functions", "`tools`", []),
    _refuse("function_call", "`tool_choice`", "none", "auto"),
    _refuse("modalities", "answers other than text", ["text"]),
    _refuse("audio", "answers other than text"),
    _refuse("prediction", "predicted output"),
    _use("reasoning_effort", "how long the model thinks, by the chat template", "chat"),
    _refuse("reasoning", "how long the model thinks", {}),
    _refuse("thinking", "how long the model thinks", {}),
    _refuse("think", "how long the model thinks"),
    _refuse("enable_thinking", "how long the model thinks"),
    _refuse("thinking_token_budget", "how long the model thinks"),
    _refuse("reasoning_budget_tokens", "how long the model thinks", -1),
    _refuse("verbosity", "how long the answer is", "medium"),
    _refuse("web_search_options", "search"),
    _refuse("extra_body", "the client's option: its fields belong beside the others", {}),
    _refuse("options", "Ollama's options: name the API's fields", {}),
    _refuse("max_new_tokens", "`max_tokens`"),
    _refuse("max_output_tokens", "`max_tokens`"),
    _refuse("max_length", "`max_tokens`"),
    _refuse("n_predict", "`max_tokens`", -1),
    _refuse("num_predict", "`max_tokens`", -1),
    _refuse("min_new_tokens", "`min_tokens`", 0, means="min_tokens"),
    _refuse("n_cmpl", "`n`", 1),
    _refuse("n_indent", "text that is indented", 0),
    _refuse("t_max_predict_ms", "a time after which texts end", -1),
    _refuse("stop_strings", "`stop`", []),
    _refuse("stop_regex", "patterns that end a text", "", []),
    _refuse("stop_sequences", "`stop`", []),
    _refuse("system", "a message of the role `system`", ""),
    _refuse("instructions", "a message of the role `system`", ""),
    _refuse("input", "`messages` or `prompt`"),
    _refuse("inputs", "`messages` or `prompt`"),
    _refuse("input_ids", "`prompt`"),
    _refuse("prompt_embeds", "prompts that are no tokens"),
    _refuse("do_sample", "`temperature`", True, means="do_sample"),
    _refuse("num_beams", "beam search", 1),
    _refuse("use_beam_search", "beam search", False),
    _refuse("early_stopping", "beam search", False),
    _refuse("length_penalty", "beam search", 1),
    _refuse("repeat_penalty", "`repetition_penalty`", 1, means="repetition_penalty"),
    _refuse("no_repeat_ngram_size", "no n-gram twice", 0),
    _refuse("top_a", "another way to draw", 0),
    _refuse("top_n_sigma", "another way to draw", 0, -1),
    _refuse("top_h", "another way to draw"),
    _refuse("tfs_z", "another way to draw", 1),
    _refuse("typ_p", "`typical_p`", 1, means="typical_p"),
    _refuse("epsilon_cutoff", "another way to draw", 0),
    _refuse("eta_cutoff", "another way to draw", 0),
    _refuse("mirostat", "another way to draw", 0),
    _refuse("dynatemp_range", "another way to draw", 0),
    _refuse("smoothing_factor", "another way to draw", 0),
    _refuse("xtc_probability", "another way to draw", 0),
    _refuse("dry_multiplier", "another way to draw", 0),
    _refuse("samplers", "another way to draw", [], ""),
    _refuse("penalize_nl", "another way to draw", False),
    _refuse("grammar_lazy", "structured output from a mark on", False),
    _refuse("grammar_triggers", "structured output from a mark on", []),
    _refuse("structural_tag", "structured output from a mark on", ""),
    _refuse("guided_whitespace_pattern", "space in JSON", ""),
    _refuse("allowed_token_ids", "no tokens but these", []),
    _refuse("bad_words", "strings that are not made", []),
    _refuse("logits_processors", "code of the client", []),
    _refuse("custom_logit_processor", "code of the client", ""),
    _refuse("chat_template", "another template", ""),
    _use("chat_template_kwargs", "variables of the chat template", "chat", neutral=({},)),
    _refuse("documents", "arguments of the template", []),
    _refuse("add_generation_prompt", "false leaves out the beginning of the answer", True),
    _refuse("continue_final_message", "true continues the last message", False),
    _refuse("add_special_tokens", "special tokens around a chat", False, paths=("chat",)),
    _refuse("add_special_tokens", "special tokens before a prompt", True, paths=("completions",)),
    _refuse("skip_special_tokens", "false shows special tokens", True),
    _refuse("include_stop_str_in_output", "true shows the stop string", False),
    _refuse("no_stop_trim", "true shows the stop string", False),
    _refuse("truncate_prompt_tokens", "a prompt's last tokens alone"),
    _refuse("truncate", "a prompt's last tokens alone"),
    _refuse("n_keep", "what stays of a prompt that is too long", 0, -1),
    _refuse("prompt_logprobs", "`echo` with `logprobs`"),
    _refuse("n_probs", "`logprobs`", 0),
    _refuse("return_tokens_as_token_ids", "names of tokens in `logprobs`", False),
    _refuse("return_token_ids", "tokens in the answer", False),
    _refuse("return_full_text", "`echo`", False),
    _refuse("lora_path", "adapters", "", []),
    _refuse("lora", "adapters", []),
    _refuse("image_data", "images", [], ""),
    _refuse("mm_processor_kwargs", "images", {}),
    *_ignore("changes no text", "metadata", "store", "service_tier", "prompt_cache_retention"),
    *_ignore("changes no text", "request_id", "rid", "session_id", "guided_decoding_backend"),
    *_ignore("changes no text", "priority", "cache_prompt", "id_slot", "slot_id", "keep_alive"),
    *_ignore("changes no text", "timings_per_token", "return_progress", "models", "provider"),
    *_ignore("changes no text", "include_reasoning", "separate_reasoning", "stream_reasoning"),
    *_ignore("changes no text", "kv_transfer_params", "spaces_between_special_tokens"),
    *_ignore("belongs to `mirostat`", "mirostat_tau", "mirostat_eta"),
    *_ignore("belongs to `repeat_penalty`", "repeat_last_n"),
    *_ignore("belongs to `xtc_probability`", "xtc_threshold"),
    *_ignore("belongs to `dynatemp_range`", "dynatemp_exponent"),
    *_ignore("belongs to `dry_multiplier`", "dry_base", "dry_allowed_length"),
    *_ignore("belongs to `dry_multiplier`", "dry_penalty_last_n", "dry_sequence_breakers"),
    *_ignore("belongs to other ways to draw", "min_keep"),
)
"""All fields that the server knows; a row that is not used is one clients are known to send."""

IN_MESSAGES = frozenset({"id", "reasoning_details", "provider_specific_fields", "cache_control"})
"""Fields of messages, their parts, calls and tools that clients send back, and that are ignored."""


def sift(data: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return a body's fields without those that change nothing; unknown ones stay.

    Raises FieldError for a field that would change the text and is not used.
    """
    rows = _TABLE[path]
    kept, meant = {}, {}
    for name, value in data.items():
        row = rows.get(name)
        if row is None or (row.status == "used" and path in row.paths):
            kept[name] = value
        elif row.status != "ignored" and value is not None:
            if value not in row.neutral:
                raise FieldError(name, _say_refused(row, path))
            if row.means:
                meant[row.means] = value
    return kept | {name: value for name, value in meant.items() if kept.get(name) is None}


def _say_refused(row: Field, path: Path) -> str:
    if row.status == "used":
        return f"there is no such field for {path}: leave it out"
    usual = json.dumps((*row.neutral, None)[0])
    does = f"; here it is {row.does.replace('`', '')}" if row.does.startswith("`") else ""
    return f"values other than {usual} are not supported: leave it out{does}"


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def find_meant(name: str, known: Iterable[str]) -> str | None:
    """Return the known field that a name looks like a typo of; None if it resembles none."""
    plain = {_plain(each): each for each in known}
    found = difflib.get_close_matches(_plain(name[:64]), plain, n=1, cutoff=_LIKENESS)
    return plain[found[0]] if found else None


_TABLE: dict[Path, dict[str, Field]] = {
    path: {row.name: row for row in FIELDS} | {row.name: row for row in FIELDS if path in row.paths}
    for path in BOTH
}
MEANT = sorted({row.name for row in FIELDS if row.status != "ignored"})
"""Fields of which a typo would change a text."""

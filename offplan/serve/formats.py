"""Formats in which models think and call tools, as response templates of transformers.

Each format is data, which transformers' parser reads as the text comes. A chat template that writes
a format's mark into what the assistant said before is of that format.

Source: the chat templates of Qwen2.5, Qwen3 and Qwen3-Coder, DeepSeek-R1, V3.1 and V3.2, GLM-4.5,
Kimi K2, MiniMax-M2, gpt-oss and Mistral Small 3.2; transformers 5.23,
``cli/serving/utils.py``, for the way to write them down.
"""

# ruff: noqa: RUF001  # marks of DeepSeek have letters that look like others

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from offplan.transformers_private import find_response_template, load_template

_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_ENDS = r"\s*(?:<\|im_end\|>|<\|endoftext\|>|<\|eot_id\|>|<｜end▁of▁sentence｜>)"
"""Ends of turns, which not every generation config names; they are nothing that is said."""


@dataclass(frozen=True)
class Writing:
    """A way in which models of a format write calls, for grammars that answers are to follow.

    ``$name``, ``$number`` and ``$arguments`` stand for those of a call.
    """

    call: str
    """Text of a call."""
    parameter: str = ""
    """Text of each of its arguments, with ``$key`` and ``$value``; empty where they are JSON."""
    opens: str = ""
    """Text before the first call."""
    between: str | None = ""
    """Text between two calls; None if an answer has one call alone."""
    closes: str = ""
    """Text behind the last call."""


@dataclass(frozen=True)
class Format:
    """A format of answers."""

    name: str
    mark: str
    """Text that the chat templates of the format have."""
    fields: Mapping[str, Any]
    thinks: str = "<think>"
    """Text with which thoughts begin: a prompt may end with it."""
    has_short_ids: bool = False
    """True if the chat template takes identifiers of calls of nine letters and digits alone."""
    writes: tuple[Writing, ...] = ()
    """Ways in which it has calls; empty if it has none."""
    thoughts: tuple[tuple[str, str], ...] = (("<think>", "</think>"),)
    """Texts around thoughts, and around what else may come before the answer itself."""
    says: tuple[str, ...] = ("",)
    """Texts with which an answer that is no call may begin."""

    @cached_property
    def template(self) -> Any:
        """The response template. A prompt's end matters where thoughts have begun there."""
        fields = {"content": {"content": "text", "close_pattern": _ENDS}, **self.fields}
        begins = "".join(f"\\{c}" if c in "[]<>|" else c for c in self.thinks)
        spec = {"start_anchor_pattern": rf"(?={begins}\s*\Z)", "fields": fields}
        return load_template({"defaults": {"role": "assistant"}, **spec})


_THINK = {"reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"}}


def _call(
    opens: str, closes: str, pairs: str = "", transform: Any = None, **more: Any
) -> dict[str, Any]:
    """Make the field of calls: arguments as JSON, or each by a pattern of key and value."""
    content: dict[str, Any] = {"content": "json"}
    if pairs:
        content = {"content": "xml-inline", "content_args": {"tag_pattern": pairs}}
    close = {"close_pattern": closes} if closes else {}
    return {
        "open_pattern": opens,
        **close,
        "repeats": True,
        **content,
        "transform": transform or _NAMED,
        **more,
    }


_KIMI = _call(
    r"\s*(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*"
    r"(?P<id>(?:functions\.)?(?P<name>[\w.\-]+?):\d+)\s*<\|tool_call_argument_begin\|>",
    r"<\|tool_call_end\|>",
    # the chat template writes the identifier back
    transform={"id": "{id}", **_NAMED},
)
_DEEPSEEK = _call(
    r"\s*(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?"
    r"(?P<name>(?!function<)[^<\n]+)(?:<｜tool▁sep｜>|\n```json\n)",
    r"(?:\n```)?\s*<｜tool▁call▁end｜>",
)
_DSML = _call(
    r"\s*(?:<｜DSML｜(?:function|tool)_calls>\s*)?<｜DSML｜invoke name=\"(?P<name>[^\"\n]+)\">",
    r"</｜DSML｜invoke>",
    r"<｜DSML｜parameter name=\"(?P<key>[^\"\n]+)\"[^>\n]*>(?P<value>.*?)</｜DSML｜parameter>",
)
_MINIMAX = _call(
    r"\s*(?:<minimax:tool_call>\s*)?<invoke name=\"(?P<name>[^\"\n]+)\">",
    r"</invoke>",
    r"<parameter name=\"(?P<key>[^\"\n]+)\">\n?(?P<value>.*?)\n?</parameter>",
)
_GLM = _call(
    r"\s*<tool_call>\s*(?P<name>[^\s<]+)",
    r"</tool_call>",
    r"<arg_key>\s*(?P<key>.*?)\s*</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
)
_CODER = _call(
    # the model leaves out the first mark at times
    # a name has no mark: or each of a row of marks would be sought in all that follows
    r"\s*(?:<tool_call>\s*)?<function=(?P<name>[^<>\n]+)>",
    r"</function>",
    # space within a value is the value's own
    r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>",
)
_HARMONY_CALL = _call(
    r"(?:<\|start\|>assistant)?"
    r"(?:<\|channel\|>(?:commentary|analysis) to=functions\.(?P<name>[\w.\-]+)"
    r"| to=functions\.(?P<name>[\w.\-]+)<\|channel\|>(?:commentary|analysis))"
    r"[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>",
    r"<\|call\|>|<\|end\|>",
)
_HARMONY = {
    "reasoning_content": {
        "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>",
        "close": "<|end|>",
        "content": "text",
        "repeats": True,
        "join": "\n",
    },
    "tool_calls": _HARMONY_CALL,
    # what it says stands between marks, which close what would be said outside of them
    "content": {
        "close_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>(?:final|commentary)[^<]*"
        r"(?:<\|constrain\|>[^<]*)?<\|message\|>|<\|end\|>|<\|return\|>|<\|call\|>",
        "content": "text",
    },
}
_BRACKETS = {"reasoning_content": {"open": "[THINK]", "close": "[/THINK]", "content": "text"}}
_MISTRAL = _call(
    r"\[TOOL_CALLS\]\s*(?P<name>[\w.\-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]", r"(?=\[TOOL_CALLS\])"
)
_MISTRAL_LIST = _call(
    r"\[TOOL_CALLS\]",
    "",
    transform={"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
    transform_each=True,
)
_HERMES = _call(
    r"\s*<tool_call>",
    r"</tool_call>",
    transform={"type": "function", "function": "{content}"},
)


def _end(pattern: str) -> dict[str, Any]:
    """Make the field of what ends a row of calls, which is nothing that is said."""
    return {"open_pattern": rf"\s*{pattern}", "close_pattern": "(?=)", "repeats": True}


_JSON = '{"name": "$name", "arguments": $arguments}'
_SEP = "<｜tool▁sep｜>"
_V3 = ("<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>")


def _dsml(kind: str) -> Writing:
    return Writing(
        '<｜DSML｜invoke name="$name">\n$arguments</｜DSML｜invoke>\n',
        '<｜DSML｜parameter name="$key" string="$is_text">$value</｜DSML｜parameter>\n',
        opens=f"<｜DSML｜{kind}_calls>\n",
        closes=f"</｜DSML｜{kind}_calls>",
    )


_KIMI_FORMAT = Format(
    "kimi",
    "<|tool_calls_section_begin|>",
    {**_THINK, "tool_calls": _KIMI, "end": _end(r"<\|tool_calls_section_end\|>")},
    writes=(
        Writing(
            "<|tool_call_begin|>functions.$name:$number<|tool_call_argument_begin|>$arguments"
            "<|tool_call_end|>",
            opens="<|tool_calls_section_begin|>",
            closes="<|tool_calls_section_end|>",
        ),
    ),
)

FORMATS = (
    _KIMI_FORMAT,
    # its first chat template shows tools, and no calls
    replace(_KIMI_FORMAT, mark="tool_declare<|im_middle|>"),
    Format(
        "deepseek",
        "<｜tool▁calls▁begin｜>",
        {**_THINK, "tool_calls": _DEEPSEEK, "end": _end("<｜tool▁calls▁end｜>")},
        writes=(
            Writing(
                f"<｜tool▁call▁begin｜>function{_SEP}$name\n```json\n$arguments\n```"
                "<｜tool▁call▁end｜>",
                "",
                *_V3,
            ),
            Writing(
                f"<｜tool▁call▁begin｜>$name{_SEP}$arguments<｜tool▁call▁end｜>",
                opens=_V3[0],
                closes=_V3[2],
            ),
        ),
    ),
    Format(
        "dsml",
        "<｜DSML｜",
        {**_THINK, "tool_calls": _DSML, "end": _end("</｜DSML｜(?:function|tool)_calls>")},
        writes=(_dsml("function"), _dsml("tool")),
    ),
    Format(
        "minimax",
        "<minimax:tool_call>",
        {**_THINK, "tool_calls": _MINIMAX, "end": _end("</minimax:tool_call>")},
        writes=(
            Writing(
                '<invoke name="$name">\n$arguments</invoke>\n',
                '<parameter name="$key">$value</parameter>\n',
                opens="<minimax:tool_call>\n",
                closes="</minimax:tool_call>",
            ),
        ),
    ),
    Format(
        "glm",
        "<arg_key>",
        {**_THINK, "tool_calls": _GLM},
        writes=(
            Writing(
                "<tool_call>$name\n$arguments</tool_call>",
                "<arg_key>$key</arg_key>\n<arg_value>$value</arg_value>\n",
                between="\n",
            ),
        ),
    ),
    Format(
        "qwen3-coder",
        "<function=",
        {**_THINK, "tool_calls": _CODER, "end": _end("</tool_call>")},
        writes=(
            Writing(
                "<tool_call>\n<function=$name>\n$arguments</function>\n</tool_call>",
                "<parameter=$key>\n$value\n</parameter>\n",
                between="\n",
            ),
        ),
    ),
    Format(
        "harmony",
        "<|channel|>",
        _HARMONY,
        writes=(
            # an end token stands behind it
            Writing(
                "<|channel|>commentary to=functions.$name <|constrain|>json<|message|>$arguments",
                between=None,
            ),
            Writing(
                " to=functions.$name<|channel|>commentary <|constrain|>json<|message|>$arguments",
                between=None,
            ),
        ),
        thoughts=tuple(
            (f"<|channel|>{name}<|message|>", "<|end|><|start|>assistant")
            for name in ("analysis", "commentary")
        ),
        says=(
            "<|channel|>final<|message|>",
            "<|channel|>final <|constrain|>json<|message|>",
        ),
    ),
    Format(
        "mistral",
        "[ARGS]",
        {**_BRACKETS, "tool_calls": _MISTRAL},
        "[THINK]",
        True,
        writes=(Writing("[TOOL_CALLS]$name[ARGS]$arguments"),),
        thoughts=(("[THINK]", "[/THINK]"),),
    ),
    Format(
        "mistral-list",
        "[TOOL_CALLS]",
        {"tool_calls": _MISTRAL_LIST},
        has_short_ids=True,
        writes=tuple(Writing(_JSON, "", f"[TOOL_CALLS]{space}[", ", ", "]") for space in ("", " ")),
        thoughts=(),
    ),
    Format(
        "hermes",
        "<tool_call>",
        {**_THINK, "tool_calls": _HERMES},
        writes=(Writing(f"<tool_call>\n{_JSON}\n</tool_call>", between="\n"),),
    ),
    Format("thoughts", "<think>", _THINK),
    Format("thoughts", "</think>", _THINK),
)
"""The formats; a chat template is of the first one whose mark it has."""


@dataclass(frozen=True)
class Divider:
    """The response template of a model, and where it came from."""

    template: Any
    """None if it is not known."""
    is_foreign: bool = False
    """True if its patterns came with the model, and may take for ever."""
    has_short_ids: bool = False

    @property
    def finds_calls(self) -> bool:
        """True if it finds calls of tools."""
        return self.template is not None and "tool_calls" in self.template.fields


def list_hidden(tokenizer: Any, template: Any) -> frozenset[int]:
    """Return a tokenizer's special tokens that a response template has no use for.

    They are no text, as where no template divides an answer.
    """
    if template is None:
        return frozenset()
    patterns = [template.start_anchor_re.pattern]
    for each in template.fields.values():
        patterns += [found.pattern for found in (each.open_re, each.close_re) if found]
        patterns += map(str, each.content_args.values())
    marks = "\n".join(patterns).replace("\\", "")
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(token for token, each in added if each.special and each.content not in marks)


def read_chat_template(tokenizer: Any) -> str:
    """Return a tokenizer's chat template, or its several ones behind one another; empty if none."""
    found = getattr(tokenizer, "chat_template", None)
    if isinstance(found, Mapping):
        return "".join(map(str, found.values()))
    return found if isinstance(found, str) else ""


def find_format(tokenizer: Any) -> Format | None:
    """Find the format of a tokenizer's chat template; None if it is none of those here."""
    chat_template = read_chat_template(tokenizer)
    return next((each for each in FORMATS if each.mark in chat_template), None)


def find_divider(tokenizer: Any, model_type: str) -> Divider:
    """Find how a model's answers are divided into text, thoughts and calls.

    The tokenizer's own template comes first, then the format of its chat template, then what
    transformers knows of the family.
    """
    if getattr(tokenizer, "response_template", None) is not None:
        return Divider(find_response_template(tokenizer, model_type), is_foreign=True)
    if found := find_format(tokenizer):
        return Divider(found.template, has_short_ids=found.has_short_ids)
    return Divider(find_response_template(tokenizer, model_type))

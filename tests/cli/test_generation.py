"""``offplan run`` on prompts of every origin: typed, from files, chats, and lines of JSON."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from offplan.runtime import texts
from offplan.runtime.rows import Rows
from offplan.runtime.session import Session
from tests.cli import CLI, RULES, Finished, write_plan
from tests.tiers import first_quick

Run = Callable[..., Finished]
PART = "\N{REPLACEMENT CHARACTER}"
PROMPTS = ["Weights", "Weights that do", "A plan", "Wei", "The GPU"]
WEIGHTS = (
    "Weights that do not fit the GPU wait in host memory and cross the link before their layer."
)


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """A plan of the tiny checkpoint for batches of two."""
    path = write_plan(tmp_path, RULES["mixed"])
    path.write_text(path.read_text().replace("batch: 1,", "batch: 2,"))
    return path


@pytest.fixture
def run(cli: CLI, plan: Path) -> Run:
    return lambda *arguments: cli("run", plan, "--device", "cpu", *arguments)


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": "{each}"}}\n\n' for each in PROMPTS))
    return path


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    return {each["prompt"]: each for each in map(json.loads, path.read_text().splitlines())}


@pytest.mark.slow
def test_prompts_in_their_order(run: Run, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_bytes(b"\xef\xbb\xbfWei\r\n")
    files = ("--prompt-file", tmp_path / "prompt.txt")
    code, out, err = run("--prompt", "Weights", "--prompt", "Weights that do", *files)
    # a pipe gets the texts alone
    assert (code, out) == (0, f"{WEIGHTS}\n\n{WEIGHTS}\n\n{WEIGHTS}\n")
    assert "Predicted and measured" in err
    assert "For what ran it predicts " in err


@pytest.mark.slow
def test_standard_input(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Weights\n")))
    assert run("--prompt-file", "-").out.startswith(f"{WEIGHTS}\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "Weights"}')))
    short = ("--prompts", "-", "--max-new-tokens", 4)
    code, out, err = run(*short)
    assert (code, json.loads(out)["text"]) == (0, " tha")
    assert "Predicted and measured" in err
    marked = b'\xef\xbb\xbf{"prompt": "Weights"}\r\n'
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(marked)))
    assert json.loads(run(*short).out)["prompt"] == "Weights"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    assert "is text in UTF-8" in run("--prompt-file", "-").err


@pytest.mark.slow
def test_a_text_ends_before_a_stop_string(run: Run) -> None:
    data = json.loads(run("--prompt", "Weights", "--stop-strings", "fit the", "--json").out)
    ended = {"text": " that do not ", "num_tokens": 20, "finish_reason": "stop"}
    assert data["texts"] == [ended]
    short = ("--prompt", "Weights", "--max-new-tokens", 4, "--stop-strings", "at the", "--json")
    assert json.loads(run(*short).out)["text"] == " tha"


@pytest.mark.slow
def test_the_plans_batch_and_what_was_predicted(run: Run) -> None:
    data = json.loads(run("--prompt", "Weights", "--prompt", "Wei", "--json").out)
    assert (data["batch"], data["prompt_tokens"]) == (2, 5)
    assert [each["text"] for each in data["texts"]] == [WEIGHTS[7:], WEIGHTS[3:]]
    assert data["predicted_as_run"]["prefill"]["step_s"] < data["predicted"]["prefill"]["step_s"]


@pytest.mark.slow
def test_a_chat(run: Run, copy: Path) -> None:
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if False %}{% endif %}"
    no_template = run("--prompt", "Weights", "--chat")
    assert (no_template.code, "has no chat template" in no_template.err) == (2, True)
    (copy / "chat_template.jinja").write_text(template)
    arguments = ("--model", copy, "--prompt", "Weights", "--chat")
    assert run(*arguments).out.startswith(f"{WEIGHTS[7:]}\n")
    (copy / "chat_template.jinja").write_text("{{ raise_exception('no system role') }}")
    code, _, err = run(*arguments)
    assert (code, "does not take the messages" in err) == (2, True)


@pytest.mark.slow
def test_lines_with_messages(run: Run, copy: Path, tmp_path: Path) -> None:
    (copy / "chat_template.jinja").write_text("{{ messages[0]['content'] }} that")
    lines = tmp_path / "prompts.jsonl"
    message = {"role": "user", "content": "Weights"}
    lines.write_text(json.dumps({"id": [7], "messages": [message]}))
    code, out, _ = run("--prompts", lines, "--model", copy)
    result = json.loads(out)
    assert (code, result["id"], result["messages"]) == (0, [7], [message])
    assert f"Weights that{result['text']}" == WEIGHTS


@pytest.mark.slow
def test_lines_that_say_how_they_are_continued(run: Run, copy: Path, tmp_path: Path) -> None:
    (copy / "chat_template.jinja").write_text(
        "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
        "{{ messages[0]['content'] }}"
    )
    drawn = {"temperature": 3.0, "seed": 7, "max_tokens": 12}
    function = {"name": "f", "parameters": {}}
    said = {"messages": [{"role": "user", "content": "Weights"}], "max_tokens": 5}
    asked = [
        {"prompt": "Weights", "max_tokens": 5, "id": "first"},
        {"prompt": "Weights", "stop": ["fit"], "logprobs": 1},
        {"prompt": "Wei", **drawn},
        {"prompt": "Wei", **drawn},
        {
            "custom_id": "mine",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "any", **said, "logprobs": True, "temperature": 0, "seed": 3},
        },
        {"messages": said["messages"], "tools": [{"type": "function", "function": function}]},
    ]
    lines, results = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    lines.write_text("\n".join(map(json.dumps, asked)))
    again = ("--prompts", lines, "-o", results, "--model", copy, "--max-new-tokens", 20)
    assert run(*again).code == 0
    found = {each["line"]: each for each in map(json.loads, results.read_text().splitlines())}
    assert [found[line]["text"] for line in (1, 2)] == [" that", " that do not "]
    assert found[1]["id"] == "first"
    assert "".join(found[2]["scores"]["tokens"]).startswith(" that do not fit")
    assert found[3]["text"] == found[4]["text"], "each has the seed that it names"
    assert (found[5]["custom_id"], found[5]["error"]) == ("mine", None)
    body = found[5]["response"]["body"]
    assert (body["object"], body["usage"]["completion_tokens"]) == ("chat.completion", 5)
    assert body["choices"][0]["message"]["content"] == " that"
    assert len(body["choices"][0]["logprobs"]["content"]) == 5
    assert found[6]["num_tokens"] == 20
    before = results.read_text()
    assert run(*again).code == 0
    assert results.read_text() == before, "nothing is made twice"


@pytest.mark.slow
def test_drawn_texts(run: Run, asked: Path, tmp_path: Path) -> None:
    drawn = ("--prompts", asked, "--temperature", 1.5, "--seed", 3, "--max-new-tokens", 12)
    for name in ("first", "second"):
        assert run(*drawn, "-o", tmp_path / name).code == 0
    assert (tmp_path / "first").read_text() == (tmp_path / "second").read_text()
    for unheeded in (("--seed", 3), ("--temperature", 0, "--top-p", 0.5)):
        assert "greedy generation draws nothing" in run("--prompt", "Weights", *unheeded).err
    code, _, err = run("--prompt", "Weights", "--temperature", 1e-45)
    assert (code, "expected 0, which is greedy, or a number from 1e-30 on" in err) == (2, True)
    code, _, err = run(*drawn, "--top-p", 2)
    assert (code, "top_p is 2.0; expected above 0 and up to 1" in err) == (2, True)


@pytest.mark.slow
def test_a_rerun_goes_on(
    run: Run, asked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, path = tmp_path / "whole.jsonl", tmp_path / "results.jsonl"
    short = ("--prompts", asked, "--max-new-tokens", 8)
    assert run(*short, "-o", whole).code == 0
    expected = read_results(whole)
    assert [expected[each]["line"] for each in PROMPTS] == [1, 3, 5, 7, 9]
    extend = Rows.extend

    def interrupted(*arguments: Any) -> torch.Tensor:
        if len(path.read_text().splitlines()) == 3:
            raise KeyboardInterrupt
        return extend(*arguments)

    monkeypatch.setattr(Rows, "extend", interrupted)
    code, out, err = run(*short, "-o", path)
    assert (code, out) == (130, "")
    assert err.endswith(
        f"offplan: 3 of 5 texts are in {path}; the same command goes on from there\n"
        "offplan: interrupted\n"
    )
    monkeypatch.undo()
    path.write_text(path.read_text()[:-9])  # killed while it wrote
    code, _, err = run(*short, "-o", path)
    assert (code, f"offplan: 2 of 5 texts are in {path} already\n" in err) == (0, True)
    assert read_results(path) == expected
    monkeypatch.setattr(Session, "__init__", None)
    code, out, err = run(*short, "-o", path, "--json")
    assert (code, json.loads(out)["texts"]) == (0, [])


@pytest.mark.slow
def test_results_of_something_else_are_kept(run: Run, asked: Path, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    short = ("--prompts", asked, "-o", path, "--max-new-tokens", 1)
    assert run(*short).code == 0
    kept = path.read_text()
    for further in (("--temperature", 1), ("--stop-strings", "x"), ("--max-new-tokens", 2)):
        code, _, err = run(*short, *further)
        assert (code, "of another prompt, model or option" in err) == (2, True)
    asked.write_text(asked.read_text().replace("A plan", "A man"))
    assert "of another prompt" in run(*short).err
    assert path.read_text() == kept
    assert run(*short, "--force").code == 0
    with asked.open("a") as file:
        file.write('{"prompt": "More"}')
    assert "5 of 6 texts are in" in run(*short).err
    assert "A man" in path.read_text()
    for odd in (
        "x",
        '{"mine": 1}',
        "[]\n",
        "{}\n",
        "x\n",
        '{"line": [1], "settings": ""}\n',
        "\xff\n",
    ):
        path.write_text(odd, "latin-1")
        assert "is no result of offplan run" in run(*short).err
        assert path.read_text("latin-1") == odd


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "content"),
    first_quick(
        [
            ("chat_template.jinja", "{{ messages[0]['content'] }}"),
            ("generation_config.json", '{"eos_token_id": 256, "repetition_penalty": 1.1}'),
        ]
    ),
)
def test_results_of_a_model_that_says_otherwise(
    run: Run, asked: Path, copy: Path, tmp_path: Path, name: str, content: str
) -> None:
    short = ("--prompts", asked, "-o", tmp_path / "results.jsonl", "--max-new-tokens", 1)
    assert run(*short, "--model", copy).code == 0
    assert "5 of 5 texts are in" in run(*short, "--model", copy).err
    (copy / name).write_text(content)
    code, _, err = run(*short, "--model", copy)
    assert (code, "of another prompt, model or option" in err) == (2, True)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("Weights", "line 2 is no JSON"),
        ('"Weights"', "line 2: expected an object"),
        ("{}", "line 2: expected an object"),
        ('{"prompt": "", "messages": []}', "line 2: expected an object"),
        ('{"prompt": 1}', "prompt should be a text"),
        ('{"prompt": "x", "temprature": 1}', "reads no 'temprature'"),
        ('{"prompt": "x", "temperature": -1}', "temperature: Input should be greater than"),
        ('{"prompt": "x", "n": 2}', "reads no 'n'"),
        ('{"url": "/v1/completions", "body": {"prompt": ["x", "y"]}}', "a line has one prompt"),
        ('{"url": "/v1/completions", "body": {"prompt": [1]}}', "a line has one prompt"),
        ('{"url": "/v1/completions", "body": {"prompt": "x", "stream": true}}', "no streams"),
        ('{"url": "/v1/embeddings", "body": {}}', "expected POST with one of /v1/chat/compl"),
        (
            '{"url": "/v1/completions", "body": {"promt": "x"}}',
            "promt: there is no such field: did",
        ),
        ('{"url": "/v1/completions", "body": 1}', "line 2: the body: "),
        ('{"body": {}, "prompt": "x"}', "reads no 'prompt'"),
        ('{"messages": [{"role": "user"}]}', "objects with a role and a content"),
        ('{"messages": []}', "objects with a role and a content"),
        ("[" * 10**5, "line 2 is no JSON"),
        ('{"prompt": ""}', "line 2: the prompt is empty"),
        ('{"prompt": "' + "x" * 300 + '"}', "line 2: 300 prompt tokens and 96 new ones exceed"),
        (r'{"prompt": "\ud800"}', r"line 2: found '\ud800', which is half of a character"),
        (r'{"messages": [{"role": "a", "content": "\udfff"}]}', "half of a character"),
        ('{"prompt": "x", "prompt": "y"}', "line 2 is no JSON (the key 'prompt' stands twice)"),
        ('{"prompt": "x", "id": ' + "[" * 940 + "]" * 940 + "}", "line 2 is no JSON"),
        ('{"prompt": "x", "' + "k" * 999 + '": 1}', "kkk...; a line"),
    ],
)
def test_lines_that_are_no_prompts(run: Run, tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "x"}}\n{line}\n')
    code, out, err = run("--prompts", path)
    assert (code, out) == (2, "")
    assert message in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompts", "x", "--prompt", "x"), "leave --prompt and --prompt-file out"),
        (("-o", "x"), "--output is for the lines"),
        (("--chat",), "need a prompt"),
        (("--stop-strings", "x"), "need a prompt"),
        (("--prompt", "x", "--stop-strings", ""), "ends no text"),
        (("--prompts", "x", "--json"), "name a file with --output"),
        (("--prompt-file", "no such file"), "cannot read prompt no such file"),
        (("--prompts", "/dev/null"), "has no prompts"),
    ],
)
def test_bad_usage(run: Run, arguments: tuple[object, ...], message: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out, message in err) == (2, "", True)


class Bytes:
    """A tokenizer whose tokens are bytes of UTF-8."""

    def decode(self, tokens: list[int], **_: object) -> str:
        return bytes(tokens).decode("utf-8", "replace")


def test_bytes_are_held_until_they_make_a_character() -> None:
    text = texts.Text(Bytes(), b"x", num_tokens=99)
    assert [text.add(byte) for byte in "é 字".encode()] == ["", "é", " ", "", "", "字"]
    broken = [text.add(0x80) for _ in range(33)]
    assert broken == [*[""] * 31, PART * 29, PART]
    assert text.add(ord("a")) == PART * 3 + "a"


def test_what_stands_before_a_part_of_a_character_is_certain() -> None:
    text = texts.Text(Bytes(), b"x", num_tokens=999)
    whole = bytes([0x80]) * 99 + "字é".encode()
    assert "".join(map(text.add, whole)) == PART * 99 + "字é"


class Pieces(Bytes):
    """Tokens are pieces of two bytes, of which most end within a character; 0 is special."""

    def decode(self, tokens: list[int], **_: object) -> str:
        pieces = (token.to_bytes(2, "big") for token in tokens if token)
        return b"".join(pieces).decode("utf-8", "replace")


def test_tokens_that_all_end_within_a_character() -> None:
    data = ("aa" + "字" * 61 + "b").encode()
    tokens = [int.from_bytes(data[at : at + 2], "big") for at in range(0, len(data) - 1, 2)]
    text = texts.Text(Pieces(), tokens[:1], num_tokens=99)
    assert "".join(map(text.add, tokens[1:])) == "字" * 61 + "b"


class Fallback(Bytes):
    """Byte fallback: a run of bytes is a text whole or not at all; 0 is special."""

    def decode(self, tokens: list[int], **_: object) -> str:
        data = bytes(token for token in tokens if token)
        try:
            return data.decode("utf-8").removeprefix(" ")
        except UnicodeDecodeError:
            return PART * len(data)


class Spaces(Fallback):
    """Spaces part runs of bytes; one that begins a text is none of it."""

    def decode(self, tokens: list[int], **_: object) -> str:
        runs = bytes(token for token in tokens if token).split(b" ")
        return " ".join(super(Spaces, self).decode([*run]) for run in runs).removeprefix(" ")


def test_a_prompt_is_not_cut_within_a_character() -> None:
    text = texts.Text(Fallback(), "說明文字".encode(), num_tokens=99)
    assert "".join(map(text.add, "字 a".encode())) == "字 a"


def test_a_space_alone_is_context() -> None:
    text = texts.Text(Spaces(), "é".encode(), num_tokens=99)
    assert "".join(map(text.add, b" \x80 a")) == f" {PART} a"


def test_special_tokens_alone_are_no_context() -> None:
    text = texts.Text(Fallback(), [*b"x", *[0] * 9], num_tokens=99)
    assert "".join(map(text.add, [*b" a", *[0] * 40, *b" b"])) == " a b"


def test_what_may_begin_a_stop_string_is_held() -> None:
    text = texts.Text(Bytes(), b"x", num_tokens=99, stop_strings=("abc", "bd", ""))
    assert [text.add(byte) for byte in b"xabxabd"] == ["x", "", "", "abx", "", "", "a"]
    assert (text.made, text.finish, text.num_made) == ("xabxa", "stop", 7)
    text = texts.Text(Bytes(), b"x", num_tokens=3, stop_strings=("abc",))
    assert [text.add(byte) for byte in b"xab"] == ["x", "", "ab"]
    assert (text.made, text.finish) == ("xab", "length")


@pytest.mark.slow
def test_nan(run: Run, copy: Path, asked: Path, tmp_path: Path) -> None:
    """The one prompt with an A, whose embedding is NaN, is named; what was made before stays."""
    (token,) = AutoTokenizer.from_pretrained(copy)("A").input_ids
    for shard in copy.glob("*.safetensors"):
        tensors = load_file(shard)
        if (table := tensors.get("model.embed_tokens.weight")) is not None:
            table[token] = torch.nan
            save_file(tensors, shard, metadata={"format": "pt"})
    code, out, err = run("--model", copy, "--prompt", "A plan")
    assert (code, out.strip()) == (1, "")
    assert "--prompt 1: the logits of the next token are NaN" in err
    made = tmp_path / "made.jsonl"
    rerun = ("--model", copy, "--prompts", asked, "-o", made)
    code, out, err = run(*rerun)
    assert (code, out) == (1, "")
    assert "line 5: the logits of the next token are NaN" in err
    assert "the input embedding gives the first NaN" in err
    assert set(read_results(made)) == {"Weights", "Weights that do"}
    asked.write_text(asked.read_text().replace('{"prompt": "A plan"}', ""))
    assert run(*rerun).code == 0
    assert set(read_results(made)) == {*PROMPTS} - {"A plan"}

"""The server as real clients see it: OpenAI's own, and curl."""

import json
import shutil
import subprocess

import openai
import pytest

from tests.serve import NAME, NAN, REST, TIMEOUT_S, ScriptedRows, Served
from tests.serve.conftest import Tiny


@pytest.mark.slow
def test_a_completion(served: Served) -> None:
    client = served.client()
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).owned_by == "offplan"
    made = client.completions.create(model=NAME, prompt="Weights", max_tokens=200, temperature=0)
    (choice,) = made.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == (REST, "stop", None)
    assert made.usage
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (7, len(REST) + 1)


@pytest.mark.slow
def test_several_prompts_as_texts_and_as_tokens(served: Served, tiny: Tiny) -> None:
    client, texts = served.client(), ["Weights", "Weights that"]
    for prompts in (texts, tiny.tokenizer(texts).input_ids):
        made = client.completions.create(
            model=NAME, prompt=prompts, max_tokens=4, temperature=0, logprobs=2
        )
        assert [each.text for each in made.choices] == [" tha", " do "]
        assert [each.index for each in made.choices] == [0, 1]
        assert made.choices[1].logprobs
        assert made.choices[1].logprobs.tokens == [*" do "]
        assert made.choices[1].logprobs.text_offset == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_chat_whole_and_streamed(served: Served) -> None:
    client = served.client()
    asked = {
        "model": NAME,
        "messages": [{"role": "user", "content": "Weights"}],
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].message.content == REST
    chunks = [
        *client.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
    ]
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]
    assert "".join(pieces) == REST
    assert len([piece for piece in pieces if piece]) == len(REST), "a piece for each token"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage and chunks[-1].usage)
    assert chunks[-1].usage.completion_tokens == len(REST) + 1
    told = whole.choices[0].logprobs.content
    assert "".join(each.token for each in told) == REST
    assert all(each.top_logprobs[0].logprob <= 0 for each in told)
    assert all(each.top_logprobs[0].token == each.token for each in told), "it is greedy"
    assert told[0].bytes == [ord(" ")]
    streamed = [
        each
        for chunk in chunks[:-1]
        if chunk.choices[0].logprobs
        for each in chunk.choices[0].logprobs.content
    ]
    assert [each.token for each in streamed] == [each.token for each in told]


@pytest.mark.slow
def test_drawn_texts_have_their_seeds(served: Served) -> None:
    client = served.client()

    def draw(seed: int) -> str:
        made = client.completions.create(
            model=NAME, prompt="Wei", max_tokens=24, temperature=3.0, seed=seed, top_p=0.99
        )
        return made.choices[0].text

    assert draw(1) == draw(1)
    assert len({draw(seed) for seed in range(5)}) > 1


def test_the_next_turn_of_a_chat(served: Served) -> None:
    client = served.client()
    said = [{"role": "user", "content": "that do"}]  # with which no other test begins
    asked = {"model": NAME, "max_tokens": 5, "temperature": 0}
    first = client.chat.completions.create(**asked, messages=said)
    # as a client sends it back, with all that it got
    said += [first.choices[0].message.model_dump(), {"role": "user", "content": "fit"}]
    second = client.chat.completions.create(**asked, messages=said)
    # all that was read and made but the last token, which nothing followed
    text = "".join(each["content"] for each in said)
    read_again = len("fit") + 1
    assert second.usage.prompt_tokens_details.cached_tokens == len(text) - read_again
    alone = client.completions.create(model=NAME, prompt=text, max_tokens=5, temperature=0)
    assert second.choices[0].message.content == alone.choices[0].text


def test_tools_are_shown_to_the_model(served: Served) -> None:
    function = {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}
    asked = {
        "model": NAME,
        "messages": [{"role": "user", "content": "Weights"}],
        "tools": [{"type": "function", "function": function}],
        "max_tokens": 1,
    }
    client = served.client()
    counts = [
        client.chat.completions.create(**asked, tool_choice=choice).usage.prompt_tokens
        for choice in ("auto", "none")
    ]
    assert counts == [7 + len("[get_weather]"), 7]
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        client.chat.completions.create(**asked, tool_choice="required")


@pytest.mark.slow
def test_errors(served: Served) -> None:
    client = served.client()
    with pytest.raises(openai.NotFoundError, match="the one that is served is tiny"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=NAME, prompt="a" * 300)
    assert refused.value.code == "context_length_exceeded"
    assert "300 tokens" in refused.value.message
    assert "256 tokens" in refused.value.message
    with pytest.raises(openai.BadRequestError, match="200 tokens and the request asks for 100"):
        client.completions.create(model=NAME, prompt="a" * 200, max_tokens=100)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model=NAME, prompt="a", temperature=-1)
    with pytest.raises(openai.BadRequestError, match="n is 5: this server continues 4 texts"):
        client.completions.create(model=NAME, prompt="a", n=5)
    with pytest.raises(openai.BadRequestError, match="there is no token 300") as refused:
        client.completions.create(model=NAME, prompt="a", logit_bias={"300": 1})
    with pytest.raises(openai.BadRequestError, match="mirostat: values other than 0") as refused:
        client.completions.create(model=NAME, prompt="a", extra_body={"mirostat": 2})
    assert refused.value.param == "mirostat"
    with pytest.raises(openai.BadRequestError, match="did you mean temperature"):
        client.completions.create(model=NAME, prompt="a", extra_body={"temprature": 1})
    with pytest.raises(openai.BadRequestError, match="there is no token 300"):
        client.completions.create(model=NAME, prompt=[1, 300])
    assert not served.faults


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("POST", "/chat/completions", 404, "the base URL ends with /v1"),
        ("POST", "/v1/embeddings", 404, "POST /v1/embeddings is not served here: this server"),
        ("GET", "/v1/completions", 405, "GET /v1/completions is not served here"),
        ("POST", "/v1/a%0Ab/../c", 404, r"POST /v1/a\nb/../c is not served here"),
    ],
)
def test_paths_that_are_not_served(
    scripted: Served, method: str, path: str, status: int, message: str
) -> None:
    answered = scripted.ask(path, {} if method == "POST" else None, method=method)
    assert answered.status == status
    assert message in answered.data["error"]["message"]


def test_more_prompts_than_will_ever_have_room(scripted: Served) -> None:
    client = scripted.client()
    with pytest.raises(openai.BadRequestError, match="5 prompts, and this server takes 4"):
        client.completions.create(model=NAME, prompt=["a"] * 5, max_tokens=1)
    assert len(client.completions.create(model=NAME, prompt=["a"] * 4, max_tokens=1).choices) == 4


def test_stop_strings_that_span_tokens(scripted: Served) -> None:
    client = scripted.client()
    asked = {"model": NAME, "prompt": "a", "max_tokens": 200, "temperature": 0}
    for stop, text in ((["µm, ✓"], "Größe: 5 "), ("µm; no", None), (["日本 ", "ße"], "Grö")):
        chunks = [*client.completions.create(**asked, stop=stop, stream=True)]
        whole = client.completions.create(**asked, stop=stop).choices[0]
        expected = "Größe: 5 µm, ✓ 日本 🙂." if text is None else text
        assert "".join(chunk.choices[0].text for chunk in chunks) == expected
        assert (whole.text, whole.finish_reason) == (expected, "stop")
        assert not any("\N{REPLACEMENT CHARACTER}" in chunk.choices[0].text for chunk in chunks)


def test_bytes_of_tokens_that_are_part_of_a_character(scripted: Served) -> None:
    made = scripted.client().chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": "a"}], logprobs=True, max_tokens=4
    )
    told = made.choices[0].logprobs.content
    assert bytes(byte for each in told for byte in each.bytes) == b"Gr\xc3\xb6"
    assert [each.token for each in told] == ["G", "r", "\\xc3", "\\xb6"]


def test_nan_ends_one_text_with_500(scripted: Served, rows: ScriptedRows) -> None:
    rows.script[3] = NAN
    client = scripted.client()
    with pytest.raises(openai.InternalServerError, match="NotANumberError"):
        client.completions.create(model=NAME, prompt="a", temperature=0)
    with pytest.raises(openai.APIError, match="NotANumberError"):
        for _ in client.completions.create(model=NAME, prompt="a", temperature=0, stream=True):
            pass
    # the second text's is not looked for: that would hold up everybody
    assert ["layer 3 gave it behind 4 tokens" in str(each) for each in scripted.faults] == [
        True
    ] * 2
    rows.script[3] = 0
    assert client.completions.create(model=NAME, prompt="a", temperature=0).choices


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_curl(served: Served) -> None:
    def curl(*arguments: str) -> str:
        command = ["curl", "--silent", "--no-buffer", "--max-time", str(TIMEOUT_S), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    body = {"prompt": "Weights", "max_tokens": 5, "temperature": 0}
    posted = ("--json", json.dumps(body), f"{served.url}/completions")
    assert json.loads(curl(*posted))["choices"][0]["text"] == " that"
    body["stream"] = True
    lines = curl("--json", json.dumps(body), f"{served.url}/completions").split("\n\n")
    assert (lines[-2], lines[-1]) == ("data: [DONE]", "")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == " that"
    assert json.loads(curl(f"http://127.0.0.1:{served.port}/health")) == {"status": "ok"}

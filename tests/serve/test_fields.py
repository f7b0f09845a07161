"""Fields of requests: the ones that change nothing, benchmarks' and sampling's."""

import http.client
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LogitsProcessorList

from offplan.checkpoint.open import open_model
from offplan.cli.serve import _check_drawing, _describe_drawing
from offplan.errors import InputError
from offplan.runtime.joined import Added, Scored
from offplan.runtime.rules import MadePenalty, TokenRules, read_recommended
from offplan.runtime.sampling import Sampling
from offplan.runtime.texts import Text
from offplan.serve.answers import Choice, TokenNames, make_answer
from offplan.serve.anthropic_api import Messages
from offplan.serve.api import OpenAi
from offplan.serve.errors import ApiError
from offplan.serve.fields import BOTH, FIELDS
from offplan.serve.reading import change_rules, read_drawing
from offplan.serve.requests import ChatRequest, CompletionRequest, parse_request
from offplan.serve.responses_api import Responses
from tests.serve import NAME, REST, TIMEOUT_S, Served
from tests.serve.conftest import Tiny

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Weights"}], "temperature": 0}
PROMPT: dict[str, Any] = {"prompt": "Weights", "temperature": 0}
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@pytest.fixture(scope="module")
def stock(tiny: Tiny) -> Any:
    """The model by transformers alone."""
    return AutoModelForCausalLM.from_pretrained(tiny.folder, dtype=torch.float32).eval()


def neutral_fields(path: str) -> dict[str, Any]:
    """Fields that clients send and that change nothing, with a value each."""
    fields = {
        row.name: (*row.neutral, "x")[0] if row.status == "ignored" or row.neutral else None
        for row in FIELDS
        if row.status != "used" and path in row.paths
    }
    return {
        **fields,
        **{"repetition_penalty": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0, "typical_p": 1.0},
        **{"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "n": 1},
        **{"ignore_eos": False, "min_tokens": 0, "stop_token_ids": []},
    }


@pytest.mark.parametrize("path", BOTH)
def test_what_changes_nothing_is_accepted(path: str) -> None:
    kind, asked = (ChatRequest, CHAT) if path == "chat" else (CompletionRequest, PROMPT)
    fields = list(neutral_fields(path).items())
    for begin in range(0, len(fields), 80):
        request = parse_request(kind, json.dumps({**asked, **dict(fields[begin:][:80])}).encode())
        assert not request.list_ignored()
    for row in FIELDS:
        if row.status == "refused" and path in row.paths:
            with pytest.raises(ApiError) as refused:
                parse_request(kind, json.dumps({**asked, row.name: [7]}).encode())
            assert (refused.value.status, refused.value.param) == (400, row.name)


@pytest.mark.parametrize("path", BOTH)
def test_null_is_as_if_left_out(path: str) -> None:
    kind, asked = (ChatRequest, CHAT) if path == "chat" else (CompletionRequest, PROMPT)
    names = [row.name for row in FIELDS if row.name not in asked]
    for begin in range(0, len(names), 80):
        body = {**asked, **dict.fromkeys(names[begin:][:80])}
        assert parse_request(kind, json.dumps(body).encode()) == parse_request(kind, asked)
    options = {"include_usage": None, "continuous_usage_stats": None}
    parse_request(kind, {**asked, "stream": True, "stream_options": options})


def test_equal_lengths_are_one() -> None:
    asked = {**CHAT, "max_tokens": 3, "max_completion_tokens": 3}
    assert parse_request(ChatRequest, asked).num_tokens == 3
    with pytest.raises(ApiError, match="max_completion_tokens means the same"):
        parse_request(ChatRequest, {**asked, "max_tokens": 4})


@pytest.mark.parametrize(
    ("kind", "field", "meant"),
    [
        (ChatRequest, "max_token", "max_tokens"),
        (ChatRequest, "temprature", "temperature"),
        (ChatRequest, "topK", "top_k"),
        (CompletionRequest, "repetition-penalty", "repetition_penalty"),
        (CompletionRequest, "stop_sequence", "stop_sequences"),
    ],
)
def test_a_typo_is_refused(kind: type[Any], field: str, meant: str) -> None:
    asked = CHAT if kind is ChatRequest else PROMPT
    asked = {key: value for key, value in asked.items() if key != meant}
    with pytest.raises(ApiError, match=f"did you mean {meant}") as refused:
        parse_request(kind, {**asked, field: 1})
    assert refused.value.param == field


IMAGE = {"type": "input_image", "image_url": "data:,", "detail": "auto"}


@pytest.mark.parametrize(
    ("read", "wrong", "why"),
    [
        (
            OpenAi.read_chat,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content.0.type: found 'image_url', expected 'text'",
        ),
        (
            OpenAi.read_chat,
            {**CHAT, "tools": [{"type": "custom", "custom": {"name": "a"}}]},
            "tools.0.type: found 'custom', expected 'function'",
        ),
        (
            OpenAi.read_chat,
            {**CHAT, "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}},
            "tool_choice: expected 'auto', 'none' or 'required'; "
            "tool_choice.type: found 'allowed_tools', expected 'function'",
        ),
        (
            Responses.read,
            {"input": [{"role": "user", "content": [IMAGE]}]},
            "input.0.message.content.0.type: found 'input_image', expected 'input_text', "
            "'output_text', 'text', 'reasoning_text' or 'summary_text'",
        ),
        (Responses.read, {"input": "a", "truncation": "auto"}, "found 'auto', expected 'disabled'"),
        (Responses.read, {"input": "a", "top_k": 2}, "top_k: there is no such field: leave it out"),
        (Responses.read, {"input": "a", "background": True}, "background: it is not supported: "),
        (
            Responses.read,
            {"input": [{"type": "item_reference", "id": "msg_1"}]},
            "this server keeps no answers: send the item, as clients do with store: false",
        ),
        (
            Messages.read,
            {
                **{"model": "a", "max_tokens": 1},
                "messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}],
            },
            "messages.0.content.0: found 'document', expected 'text', 'thinking', ",
        ),
    ],
)
def test_what_is_of_an_unknown_kind_is_named_alone(read: Any, wrong: Any, why: str) -> None:
    with pytest.raises(ApiError) as refused:
        read(json.dumps(wrong).encode())
    said = refused.value.message
    assert why in said
    assert "missing" not in said
    assert "Named" not in said
    assert refused.value.param


def test_unknown_fields_are_named(served: Served) -> None:
    noted: list[str] = []
    served.service.on_note = noted.append
    for path, asked in (("chat", CHAT), ("completions", PROMPT)):
        for stream in (False, True):
            body = {**asked, "max_tokens": 1, "stream": stream, "trace": 1, "x\r\ny": 2, "z": None}
            connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=TIMEOUT_S)
            connection.request(
                "POST", PATHS[path], json.dumps(body), {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            assert response.status == 200
            assert response.headers["x-offplan-ignored"] == r"trace, x\r\ny"
            response.read()
            connection.close()
    assert len(noted) == 2, "once each"
    assert "the unknown field trace" in noted[0]


def test_messages_come_back_with_what_other_servers_put_there(served: Served) -> None:
    said = {
        "role": "assistant",
        "content": [{"type": "text", "text": "W", "cache_control": {"type": "ephemeral"}}],
        "reasoning": "thought",
        "reasoning_details": [{"type": "reasoning.text"}],
        "provider_specific_fields": {"a": 1},
        "id": "msg_1",
        "tool_calls": None,
    }
    messages = [said, {"role": "user", "content": "ei", "cache_control": {"type": "ephemeral"}}]
    made = served.client().chat.completions.with_raw_response.create(
        model=NAME, messages=messages, max_tokens=3, temperature=0
    )
    assert made.headers.get("x-offplan-ignored") is None
    assert made.parse().choices[0].message.content == "ght"
    request = parse_request(ChatRequest, {"messages": messages})
    assert request.messages[0].for_template()["reasoning_content"] == "thought"
    with pytest.raises(ApiError, match=r"messages.0.contents: .* did you mean content"):
        parse_request(ChatRequest, {"messages": [{"role": "user", "contents": "a"}]})


# what the benchmarks send, by their sources: vllm/benchmarks/lib/endpoint_request_func.py of vLLM
# and python/sglang/bench_serving.py of SGLang
BENCHMARKS: list[tuple[str, dict[str, Any]]] = [
    (
        "completions",
        {
            **{"model": NAME, "prompt": "Weights", "repetition_penalty": 1.0, "max_tokens": 100},
            **{"logprobs": None, "stream": True, "stream_options": {"include_usage": True}},
            "ignore_eos": True,
        },
    ),
    (
        "chat",
        {
            "model": NAME,
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Weights"}]}],
            **{"max_completion_tokens": 100, "stream": True, "ignore_eos": True},
            "stream_options": {"include_usage": True},
        },
    ),
    (
        "completions",
        {
            **{"model": NAME, "prompt": "Weights", "temperature": 0.0, "best_of": 1},
            **{"max_tokens": 100, "stream": True, "ignore_eos": True},
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("path", "body"), BENCHMARKS)
def test_benchmarks_get_a_fixed_length(served: Served, path: str, body: dict[str, Any]) -> None:
    answered = served.ask(PATHS[path], {**body, "temperature": 0})
    assert answered.status == 200
    lines = [line.removeprefix("data: ") for line in answered.data.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    *chunks, last = map(json.loads, lines)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 100)
    assert len(REST) + 1 < 100, "the text would end before"
    if body["stream_options"].get("continuous_usage_stats"):
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == [*range(1, 101)]
    else:
        assert all(chunk["usage"] is None for chunk in chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.slow
def test_a_least_number_of_tokens(served: Served, tiny: Tiny) -> None:
    client = served.client()
    asked = {"model": NAME, **PROMPT, "max_tokens": 120}
    for least, count in ((0, len(REST) + 1), (100, 120)):
        made = client.completions.create(**asked, extra_body={"min_tokens": least})
        assert made.usage.completion_tokens >= min(least, count)
        assert made.choices[0].text.startswith(REST)
    ended = client.completions.create(
        **asked, extra_body={"stop_token_ids": tiny.tokenizer("t").input_ids}
    )
    assert (ended.choices[0].finish_reason, ended.usage.completion_tokens) == ("stop", 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "stocks"),
    [
        ({"temperature": 0, "repetition_penalty": 50}, {"repetition_penalty": 50.0}),
        (
            {"temperature": 0, "logit_bias": {str(ord("x")): 40, str(ord(" ")): -100}},
            {"sequence_bias": {(ord("x"),): 40.0, (ord(" "),): -100.0}},
        ),
        ({"temperature": 3.0, "min_p": 0.05}, {"temperature": 3.0, "min_p": 0.05}),
        ({"temperature": 3.0, "typical_p": 0.5}, {"temperature": 3.0, "typical_p": 0.5}),
        (
            {"temperature": 2.5, "top_k": 9, "top_p": 0.9, "repetition_penalty": 1.2},
            {"temperature": 2.5, "top_k": 9, "top_p": 0.9, "repetition_penalty": 1.2},
        ),
        ({"temperature": 0, "presence_penalty": 2.0, "frequency_penalty": 1.5}, {}),
    ],
)
def test_tokens_are_those_of_transformers(
    served: Served, tiny: Tiny, stock: Any, fields: dict[str, Any], stocks: dict[str, Any]
) -> None:
    answered = served.ask(
        "/v1/completions", {"prompt": "Weights", "max_tokens": 30, "seed": 5, **fields}
    )
    prompt = tiny.tokenizer("Weights", return_tensors="pt").input_ids
    own = LogitsProcessorList()
    if not stocks:
        own.append(MadePenalty(prompt.shape[1], 2.0, 1.5))
    torch.manual_seed(5)
    drawn = {"top_k": 0, **stocks} if fields["temperature"] else stocks
    whole = stock.generate(
        prompt,
        max_new_tokens=30,
        do_sample=bool(fields["temperature"]),
        logits_processor=own,
        **drawn,
    )
    made = tiny.tokenizer.decode(whole[0, prompt.shape[1] :], skip_special_tokens=True)
    assert answered.data["choices"][0]["text"] == made
    plain = served.ask("/v1/completions", {**PROMPT, "max_tokens": 30})
    assert made != plain.data["choices"][0]["text"], "the fields do something"


def test_penalties_count_what_was_made() -> None:
    penalise = MadePenalty(2, presence=0.5, frequency=0.25)
    scores = penalise(torch.tensor([[3, 3, 1, 0, 1]]), torch.zeros(1, 4))
    assert scores.tolist() == [[-0.75, -1.0, 0, 0]]


@pytest.mark.slow
def test_several_texts_of_one_prompt(served: Served) -> None:
    client = served.client()
    asked = {"model": NAME, "temperature": 3.0, "max_tokens": 12}
    made = client.completions.create(**asked, prompt=["Wei", "host"], n=2, seed=7)
    assert [choice.index for choice in made.choices] == [0, 1, 2, 3]
    assert made.usage.prompt_tokens == len("Wei") + len("host")
    assert made.usage.completion_tokens == 48
    for index, prompt in enumerate(["Wei", "Wei", "host", "host"]):
        alone = client.completions.create(**asked, prompt=prompt, seed=7 + index)
        assert alone.choices[0].text == made.choices[index].text
    chat = client.chat.completions.create(
        model=NAME, messages=CHAT["messages"], n=3, temperature=0, max_tokens=4
    )
    assert [choice.message.content for choice in chat.choices] == [REST[:4]] * 3
    with client.chat.completions.stream(
        model=NAME, messages=CHAT["messages"], n=3, temperature=0
    ) as stream:
        streamed = stream.get_final_completion()
    said = [(each.message.role, each.message.content) for each in streamed.choices]
    assert said == [("assistant", REST)] * 3


@pytest.mark.slow
@pytest.mark.parametrize("by_tokens", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 3])
def test_an_echo_with_logprobs(
    served: Served, tiny: Tiny, stock: Any, by_tokens: bool, num_tokens: int
) -> None:
    text = "Weights that do"
    tokens = tiny.tokenizer(text, return_tensors="pt").input_ids
    prompt = tokens[0].tolist() if by_tokens else text
    with torch.inference_mode():
        logarithms = stock(tokens).logits[0].log_softmax(-1)
    asked = {"prompt": prompt, "max_tokens": num_tokens, "logprobs": 2, "temperature": 0}
    answered = served.ask("/v1/completions", {**asked, "echo": True})
    assert answered.status == 200, answered
    choice, told = answered.data["choices"][0], answered.data["choices"][0]["logprobs"]
    made = REST[len(" that do") :][:num_tokens]
    assert choice["text"] == text + made
    assert (answered.data["usage"]["completion_tokens"], choice["finish_reason"]) == (
        num_tokens,
        "length",
    )
    assert told["tokens"] == [*text, *made]
    assert told["text_offset"] == [*range(len(text) + num_tokens)]
    assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
    expected = logarithms[:-1].gather(1, tokens[0, 1:, None])[:, 0]
    found = torch.tensor(told["token_logprobs"][1 : len(text)])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    best = [max(each, key=each.get) for each in told["top_logprobs"][1 : len(text)]]
    assert best == [tiny.tokenizer.decode([token]) for token in logarithms[:-1].argmax(-1)]
    streamed = served.ask("/v1/completions", {**asked, "echo": True, "stream": True}).data
    chunks = [json.loads(each[6:])["choices"][0] for each in streamed.split("\n\n")[:-2]]
    assert "".join(chunk["text"] for chunk in chunks) == text + made
    assert [t for chunk in chunks for t in chunk["logprobs"]["tokens"]] == told["tokens"]
    assert [o for chunk in chunks for o in chunk["logprobs"]["text_offset"]] == told["text_offset"]
    plain = served.ask("/v1/completions", {**asked, "logprobs": None, "echo": True})
    assert (plain.data["choices"][0]["text"], plain.data["choices"][0]["logprobs"]) == (
        text + made,
        None,
    )


def test_echoes_join_others(tiny: Tiny, served: Served) -> None:
    client = served.client()
    texts = ["Weights", "that do not", "fit the GPU", "host memory", "Weights that"]
    asked = {"model": NAME, "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0}
    together = client.completions.create(**asked, prompt=texts)
    for text, choice in zip(texts, together.choices, strict=True):
        alone = client.completions.create(**asked, prompt=text).choices[0]
        assert choice.text == alone.text
        assert choice.logprobs.tokens == alone.logprobs.tokens
        assert choice.logprobs.token_logprobs[1:] == pytest.approx(
            alone.logprobs.token_logprobs[1:], abs=1e-4
        )
    with pytest.raises(Exception, match="0 makes no text without echo"):
        client.completions.create(model=NAME, prompt="a", max_tokens=0)


def save_config(tiny: Tiny, folder: Path, **settings: Any) -> Any:
    folder.mkdir()
    for path in tiny.folder.iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return open_model(str(folder))


def test_what_the_generation_config_recommends(tiny: Tiny, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], Any]] = [
        ({}, {}),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.95}, None),
        ({"temperature": 0.6, "top_k": 20, "min_p": 0.01, "typical_p": 0.5}, None),
        ({"do_sample": False, "temperature": 0.9, "top_p": 0.6}, {"temperature": 0.0}),
        ({"top_k": 0}, {}),
    ]
    for number, (settings, expected) in enumerate(cases):
        model = save_config(tiny, tmp_path / str(number), **settings)
        usual = {key: value for key, value in settings.items() if key != "do_sample"}
        assert read_recommended(model) == (usual if expected is None else expected)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"temperature": -1}, "-1 as temperature"),
        ({"top_p": 1.5}, "1.5 as top_p"),
        ({"top_k": 2.5}, "2.5 as top_k"),
        ({"eta_cutoff": 0.1}, "generation config `none`"),
    ]
    for number, (settings, message) in enumerate(wrong):
        with pytest.raises(InputError, match=message):
            read_recommended(save_config(tiny, tmp_path / f"wrong{number}", **settings))


def test_a_request_comes_before_the_model() -> None:
    usual = {"temperature": 0.6, "top_p": 0.9, "top_k": 20}

    def read(**fields: Any) -> Sampling | None:
        return read_drawing(
            parse_request(CompletionRequest, {"seed": 1, **fields, "prompt": "a"}), usual
        )

    assert read() == Sampling(0.6, 20, 0.9, 1)
    assert read(temperature=0) is None
    assert read(temperature=1.5, top_p=1, min_p=0.1) == Sampling(1.5, 20, 1, 1, 0.1)
    for off in (0, -1):
        assert read(top_k=off) == Sampling(0.6, None, 0.9, 1)
    # what is off is off, though the model's files have it on
    assert read(typ_p=1) == read(typical_p=1) == Sampling(0.6, 20, 0.9, 1, None, 1)
    assert read(do_sample=True) == Sampling(0.6, 20, 0.9, 1)
    usual = {"temperature": 0.0}
    assert read() is None
    assert read(do_sample=True) == Sampling(1.0, seed=1)
    assert read(do_sample=True, temperature=0) is None
    assert read(temperature=1) == Sampling(1.0, seed=1)
    usual = {}
    assert read() == Sampling(1.0, seed=1)
    assert len({read(seed=-1) for _ in range(3)}) == 3


def test_rules_of_a_request(tiny: Tiny) -> None:
    rules = TokenRules(frozenset([5]), ("x",), repetition_penalty=1.3, min_new_tokens=2)

    def change(**fields: Any) -> TokenRules:
        asked = parse_request(CompletionRequest, {**fields, "prompt": "a"})
        return change_rules(asked, rules, tiny.model)

    assert change() is rules
    assert change(repetition_penalty=1).repetition_penalty == 1
    assert change(repeat_penalty=1).repetition_penalty == 1
    assert change(repeat_penalty=1.0, repetition_penalty=None).repetition_penalty == 1
    assert change(repeat_penalty=1, repetition_penalty=1.1).repetition_penalty == 1.1
    assert change(min_new_tokens=0).min_new_tokens == 0
    with pytest.raises(ApiError, match="min_tokens: 17 are more than 16: name max_tokens"):
        change(min_tokens=17)
    assert change(min_tokens=17, max_tokens=20).min_new_tokens == 17
    assert change(presence_penalty=1).repetition_penalty == 1.3
    ignoring = change(ignore_eos=True, min_tokens=4)
    assert (ignoring.end_tokens, ignoring.stop_strings) == (frozenset(), ())
    assert ignoring.min_new_tokens == 4
    assert change(stop_token_ids=[7]).end_tokens == {5, 7}
    for field in ({"stop_token_ids": [9999]}, {"logit_bias": {"9999": 1}}):
        with pytest.raises(InputError, match="there is no token 9999"):
            change(**field)


def test_the_start_says_how_tokens_are_drawn() -> None:
    of_file = {"temperature": 0.6, "top_p": 0.95}
    for drawing, penalty, told in (
        ({}, 1.0, "temperature 1 (OpenAI's default)"),
        (of_file, 1.0, "temperature 0.6 (generation_config), top_p 0.95 (generation_config)"),
        ({**of_file, "top_p": 0.5}, 1.0, "temperature 0.6 (generation_config), top_p 0.5 (option)"),
        ({}, 1.1, "temperature 1 (OpenAI's default), repetition_penalty 1.1 (generation_config)"),
    ):
        assert _describe_drawing(drawing, of_file, penalty).endswith(f"are drawn with {told}")
    _check_drawing({"temperature": 0.5, "top_k": 0})
    with pytest.raises(InputError, match="top_p is 2"):
        _check_drawing({"top_p": 2})


def test_a_chunk_names_its_own_tokens_alone(tiny: Tiny) -> None:
    asked = parse_request(CompletionRequest, b'{"prompt": "a", "logprobs": 0}')
    text = Text(tiny.tokenizer, [97], num_tokens=99)
    named: list[int] = []
    (token,) = tiny.tokenizer("b").input_ids

    class Names(TokenNames):
        def name(self, token: int) -> str:
            named.append(token)
            return super().name(token)

    choice = Choice(1)
    answer = make_answer(asked, [choice], "tiny", Names(tiny.tokenizer))
    offsets = []
    for _ in range(9):
        choice.made.append(Added(text, "b", token, Scored(token, -1.0), [], None))
        (told,) = answer.chunk(0, choice.made[-1])["choices"]
        offsets += told["logprobs"]["text_offset"]
    assert (offsets, len(named)) == ([*range(9)], 9)

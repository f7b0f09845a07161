"""Anthropic's, Ollama's and OpenAI's newer API, each asked by its own client.

``pip install anthropic ollama openai-agents`` has all of it run; the rest is asked without them.
"""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from offplan.serve.guard import Guard
from offplan.serve.ollama_api import Ollama
from offplan.serve.reading import read_drawing
from tests.serve import (
    CALL,
    CONTEXT,
    KEY,
    NAME,
    TIMEOUT_S,
    ScriptedRows,
    Served,
    scripted_texts,
    serving,
)
from tests.serve.conftest import Tiny, set_script

SAID = f"<think>\nWhere?\n</think>\n\nI look.\n{CALL % 'Köln'}\n{CALL % '京都'}"
CITIES = [{"city": "Köln"}, {"city": "京都"}]
ASSISTANT = "<|im_start|>assistant\n"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "get_weather", "description": "Tells the weather.", "parameters": SCHEMA}


@pytest.fixture
def calling(rows: ScriptedRows, tiny: Tiny) -> Iterator[Served]:
    """A server with a key, of a family that transformers knows the calls of."""
    model, guard = replace(tiny.model, model_type="qwen3"), Guard(api_key=KEY)
    with serving(scripted_texts(rows), model, tiny.tokenizer, guard=guard) as served:
        yield served


def ask(served: Served, path: str, body: Any = None) -> Any:
    return served.ask(path, body, {"Authorization": f"Bearer {KEY}"})


def list_events(text: str) -> list[dict[str, Any]]:
    """The events of a stream, whose names are their types."""
    events = []
    for block in text.strip().split("\n\n"):
        name, data = (line.partition(": ")[2] for line in block.splitlines())
        events.append(json.loads(data))
        assert events[-1]["type"] == name
    return events


class TestAnthropic:
    """``/v1/messages``."""

    ASKED: ClassVar[Any] = {
        "model": NAME,
        "max_tokens": 200,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": ASSISTANT}],
    }
    TOOLS: ClassVar[Any] = [{"name": "get_weather", "input_schema": SCHEMA}]

    @pytest.mark.slow
    def test_by_its_client(self, calling: Served, rows: ScriptedRows, tiny: Tiny) -> None:
        anthropic: Any = pytest.importorskip("anthropic", reason="needs anthropic")
        base_url, enter = calling.url.removesuffix("/v1"), calling.stack.enter_context
        client = enter(anthropic.Anthropic(base_url=base_url, api_key=KEY, max_retries=0))
        set_script(rows, tiny, "Größe: 5 µm.")
        message = client.messages.create(**self.ASKED)
        assert [(each.type, each.text) for each in message.content] == [("text", "Größe: 5 µm.")]
        assert (message.stop_reason, message.usage.output_tokens) == ("end_turn", 16)
        stopped = client.messages.create(**self.ASKED, stop_sequences=["µ", ": "])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", ": ")
        assert stopped.content[0].text == "Größe"
        cut = client.messages.create(**{**self.ASKED, "max_tokens": 2})
        assert (cut.stop_reason, cut.content[0].text) == ("max_tokens", "Gr")
        counted = client.messages.count_tokens(
            model=NAME, messages=self.ASKED["messages"], system=self.ASKED["system"]
        )
        assert counted.input_tokens == message.usage.input_tokens

        set_script(rows, tiny, SAID)
        asked = {**self.ASKED, "tools": self.TOOLS}
        message = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
        for made in (message, streamed):
            assert made.stop_reason == "tool_use"
            kinds = [each.type for each in made.content]
            assert kinds == ["thinking", "text", "tool_use", "tool_use"]
            assert made.content[0].thinking.strip() == "Where?"
            assert made.content[1].text.strip() == "I look."
            assert [each.input for each in made.content[2:]] == CITIES
        # what came goes back in, with what the tools gave
        given = [
            {"type": "tool_result", "tool_use_id": each.id, "content": "12 degrees"}
            for each in message.content[2:]
        ]
        said = [
            *asked["messages"],
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": given},
        ]
        set_script(rows, tiny, "Warm.")
        assert client.messages.create(**{**asked, "messages": said}).content[0].text == "Warm."
        assert tiny.tokenizer.decode(rows.joined[-1]).endswith("(get_weather)12 degrees12 degrees")

        with pytest.raises(anthropic.NotFoundError, match="there is no such model"):
            client.messages.create(**{**self.ASKED, "model": "claude"})
        said = [*self.ASKED["messages"], {"role": "assistant", "content": "I"}]
        with pytest.raises(anthropic.BadRequestError, match="does not continue"):
            client.messages.create(**{**self.ASKED, "messages": said})
        stranger = enter(anthropic.Anthropic(base_url=base_url, api_key="sk", max_retries=0))
        with pytest.raises(anthropic.AuthenticationError):
            stranger.messages.create(**self.ASKED)
        assert not calling.faults

    def test_without_a_client(self, calling: Served, rows: ScriptedRows, tiny: Tiny) -> None:
        set_script(rows, tiny, SAID)
        asked = {**self.ASKED, "tools": self.TOOLS}
        whole = ask(calling, "/v1/messages", asked).data
        events = list_events(ask(calling, "/v1/messages", {**asked, "stream": True}).data)
        assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
        blocks = [each["content_block"]["type"] for each in events if "content_block" in each]
        assert blocks == [each["type"] for each in whole["content"]]
        stops = [each["index"] for each in events if each["type"] == "content_block_stop"]
        assert stops == [0, 1, 2, 3]
        # clients send thoughts back as thoughts only if these have a signature
        deltas = [each["delta"] for each in events if each["type"] == "content_block_delta"]
        (signature,) = (each["signature"] for each in deltas if each["type"] == "signature_delta")
        assert whole["content"][0]["signature"] == signature != ""
        assert events[-2]["delta"]["stop_reason"] == whole["stop_reason"] == "tool_use"
        assert events[-2]["usage"] == whole["usage"]
        for wrong, why in (
            ({"max_tokens": None}, "max_tokens"),
            ({"mcp_servers": [{}]}, "this server calls no tools"),
            ({"tools": [{"type": "web_search_20250305", "name": "a"}]}, "tools.0"),
            ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0"),
            ({"top_q": 1}, "top_q"),
        ):
            refused = ask(calling, "/v1/messages", {**self.ASKED, **wrong})
            assert refused.status == 400
            assert (refused.data["type"], why in refused.data["error"]["message"]) == (
                "error",
                True,
            )

    def test_the_context_ends_an_answer(
        self, calling: Served, rows: ScriptedRows, tiny: Tiny
    ) -> None:
        set_script(rows, tiny, "a" * CONTEXT)
        answer = ask(calling, "/v1/messages", {**self.ASKED, "max_tokens": 10**6}).data
        assert answer["stop_reason"] == "model_context_window_exceeded"
        long = {**self.ASKED, "messages": [{"role": "user", "content": "a" * CONTEXT}]}
        refused = ask(calling, "/v1/messages", long)
        assert (refused.status, refused.data["error"]["type"]) == (400, "invalid_request_error")


class TestResponses:
    """``/v1/responses``."""

    ASKED: ClassVar[Any] = {"model": NAME, "input": ASSISTANT, "temperature": 0}
    TOOLS: ClassVar[Any] = [{"type": "function", "strict": False, **FUNCTION}]

    def test_by_its_client(self, calling: Served, rows: ScriptedRows, tiny: Tiny) -> None:
        client = calling.client(api_key=KEY)
        set_script(rows, tiny, "Größe: 5 µm.")
        response = client.responses.create(**self.ASKED, instructions="Be brief.", store=True)
        assert (response.output_text, response.status) == ("Größe: 5 µm.", "completed")
        assert tiny.tokenizer.decode(rows.joined[-1]) == f"Be brief.{ASSISTANT}"
        assert response.usage.input_tokens == len(rows.joined[-1])
        assert response.store is False, "it says that nothing is kept"
        with client.responses.stream(**self.ASKED) as stream:
            assert stream.get_final_response().output_text == "Größe: 5 µm."
        cut = client.responses.create(**self.ASKED, max_output_tokens=2)
        assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")

        set_script(rows, tiny, SAID)
        asked = {**self.ASKED, "tools": self.TOOLS}
        response = client.responses.create(**asked)
        with client.responses.stream(**asked) as stream:
            events = [*stream]
            streamed = stream.get_final_response()
        assert [each.sequence_number for each in events] == [*range(len(events))]
        for made in (response, streamed):
            kinds = [each.type for each in made.output]
            assert kinds == ["reasoning", "message", "function_call", "function_call"]
            assert [json.loads(each.arguments) for each in made.output[2:]] == CITIES
            assert made.output[0].content[0].text.strip() == "Where?"
            assert made.output_text.strip() == "I look."
            thought = SAID.partition("I look.")[0]
            num_thought = made.usage.output_tokens_details.reasoning_tokens
            assert num_thought == len(tiny.tokenizer.encode(thought)) < made.usage.output_tokens
        # what came goes back in, with what the tools gave
        given = [
            {"type": "function_call_output", "call_id": each.call_id, "output": "12 degrees"}
            for each in response.output[2:]
        ]
        said = [{"role": "user", "content": ASSISTANT}, *response.output, *given]
        set_script(rows, tiny, "Warm.")
        assert client.responses.create(**{**asked, "input": said}).output_text == "Warm."
        calls, results = "(get_weather)" * 2, "12 degrees" * 2
        assert tiny.tokenizer.decode(rows.joined[-1]).endswith(f"I look.{calls}{results}")
        assert not calling.faults

    @pytest.mark.parametrize("field", ["previous_response_id", "conversation"])
    def test_what_needs_a_state_is_refused(self, calling: Served, field: str) -> None:
        refused = ask(calling, "/v1/responses", {**self.ASKED, field: "resp_1"})
        assert (refused.status, "keeps no answers" in str(refused.data)) == (400, True)
        item = {"type": "item_reference", "id": "msg_1"}
        refused = ask(calling, "/v1/responses", {**self.ASKED, "input": [item]})
        assert (refused.status, "keeps no answers" in str(refused.data)) == (400, True)
        found = ask(calling, "/v1/responses/resp_1")
        assert (found.status, "keeps no answers" in str(found.data)) == (404, True)

    @pytest.mark.slow
    def test_by_agents(
        self,
        calling: Served,
        rows: ScriptedRows,
        tiny: Tiny,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        agents: Any = pytest.importorskip("agents", reason="needs openai-agents")
        import openai

        asked = []

        @agents.function_tool
        def get_weather(city: str) -> str:
            """Tells the weather."""
            asked.append(city)
            set_script(rows, tiny, "Warm.")
            return "12 degrees"

        async def run(stream: bool) -> str:
            set_script(rows, tiny, SAID)
            client = openai.AsyncOpenAI(base_url=calling.url, api_key=KEY, timeout=TIMEOUT_S)
            model = agents.OpenAIResponsesModel(NAME, client)
            agent = agents.Agent("a", instructions="Be brief.", tools=[get_weather], model=model)
            async with client:
                if stream:
                    running = agents.Runner.run_streamed(agent, ASSISTANT)
                    async for _ in running.stream_events():
                        pass
                    return str(running.final_output)
                return str((await agents.Runner.run(agent, ASSISTANT)).final_output)

        agents.set_tracing_disabled(True)
        for stream in (False, True):
            assert asyncio.run(run(stream)) == "Warm."
            assert {*asked} == {"Köln", "京都"}
            asked.clear()
        assert not calling.faults


class TestOllama:
    """``/api``."""

    ASKED: ClassVar[Any] = {"model": NAME, "messages": [{"role": "user", "content": ASSISTANT}]}
    TOOLS: ClassVar[Any] = [{"type": "function", "function": FUNCTION}]

    @pytest.mark.slow
    def test_by_its_client(self, calling: Served, rows: ScriptedRows, tiny: Tiny) -> None:
        ollama: Any = pytest.importorskip("ollama", reason="needs ollama")
        client = ollama.Client(
            f"http://127.0.0.1:{calling.port}", headers={"Authorization": f"Bearer {KEY}"}
        )
        calling.stack.enter_context(contextlib.closing(client))
        assert [each.model for each in client.list().models] == [NAME]
        shown = client.show(f"{NAME}:latest")
        assert shown.modelinfo["qwen3.context_length"] == CONTEXT
        assert "tools" in shown.capabilities
        set_script(rows, tiny, "Größe: 5 µm.")
        options = {"temperature": 0, "num_ctx": 4096, "repeat_penalty": 1.0, "num_predict": -1}
        found = client.chat(**self.ASKED, options=options)
        assert (found.message.content, found.done_reason) == ("Größe: 5 µm.", "stop")
        assert (found.eval_count, found.prompt_eval_count) == (16, len(ASSISTANT))
        lines = [*client.chat(**self.ASKED, stream=True)]
        assert "".join(each.message.content for each in lines) == "Größe: 5 µm."
        assert [each.done for each in lines] == [False] * (len(lines) - 1) + [True]
        for raw in (False, True):
            found = client.generate(NAME, "a", system="" if raw else "b", raw=raw)
            assert found.response == "Größe: 5 µm."
            assert tiny.tokenizer.decode(rows.joined[-1]) == ("a" if raw else "ba")
            said = client.generate(NAME, "a", raw=raw, stream=True, options={"num_predict": 2})
            *_, last = pieces = [*said]
            assert ("".join(each.response for each in pieces), last.done_reason) == ("Gr", "length")
        assert client.generate(NAME).done_reason == "load"

        set_script(rows, tiny, SAID)
        found = client.chat(**self.ASKED, tools=self.TOOLS)
        lines = [*client.chat(**self.ASKED, tools=self.TOOLS, stream=True)]
        streamed = [call for line in lines for call in line.message.tool_calls or ()]
        for calls in (found.message.tool_calls, streamed):
            assert [dict(each.function.arguments) for each in calls] == CITIES
        assert found.message.thinking.strip() == "Where?"
        said = [*self.ASKED["messages"], found.message]
        said += [{"role": "tool", "tool_name": "get_weather", "content": "12 degrees"}] * 2
        set_script(rows, tiny, "Warm.")
        assert client.chat(NAME, said, tools=self.TOOLS).message.content == "Warm."
        with pytest.raises(ollama.ResponseError, match="there is no such model"):
            client.chat("llama3", self.ASKED["messages"])
        with pytest.raises(ollama.ResponseError, match="makes no embeddings"):
            client.embed(NAME, "a")
        assert not calling.faults

    def test_without_a_client(self, calling: Served, rows: ScriptedRows, tiny: Tiny) -> None:
        set_script(rows, tiny, SAID)
        asked = {**self.ASKED, "tools": self.TOOLS}
        whole = ask(calling, "/api/chat", {**asked, "stream": False}).data
        lines = [json.loads(each) for each in ask(calling, "/api/chat", asked).data.splitlines()]
        assert whole["message"]["content"] == "I look."
        assert "".join(each["message"]["content"] for each in lines).strip() == "I look."
        assert (whole["done_reason"], lines[-1]["done_reason"]) == ("stop", "stop")
        assert ask(calling, "/api/version").data["version"]
        for wrong, why in (
            ({"messages": [{"role": "user", "content": "a", "images": ["a"]}]}, "texts alone"),
            ({"options": {"mirostat": 2}}, "mirostat"),
            ({"options": {"top_q": 2}}, "top_q"),
        ):
            refused = ask(calling, "/api/chat", {**self.ASKED, **wrong})
            assert (refused.status, why in refused.data["error"]) == (400, True)
        raw = {"model": NAME, "prompt": "a", "raw": True, "logprobs": True}
        refused = ask(calling, "/api/generate", raw)
        assert (refused.status, "logprobs" in refused.data["error"]) == (400, True)

    def test_options_that_are_off_turn_off_what_the_server_draws_by(self) -> None:
        off = {"top_k": 0, "min_p": 0, "typical_p": 1, "tfs_z": 1, "repeat_penalty": 1}
        body = {**self.ASKED, "options": {**off, "seed": -1}}
        asked = Ollama.read_chat(json.dumps(body).encode()).asked
        usual = {"top_k": 20, "min_p": 0.1, "typical_p": 0.5}
        drawn = read_drawing(asked, usual)
        assert drawn is not None
        assert (drawn.top_k, drawn.min_p, drawn.typical_p) == (None, 0, 1)
        assert (asked.repetition_penalty, asked.seed) == (1, None)


class TestTokens:
    """``/tokenize`` and ``/detokenize``."""

    def test_as_vllm_has_them(self, scripted: Served, tiny: Tiny) -> None:
        tokens = tiny.tokenizer("µm").input_ids
        asked = {"model": NAME, "prompt": "µm", "return_token_strs": True}
        found = scripted.ask("/tokenize", asked).data
        assert (found["tokens"], found["count"], found["max_model_len"]) == (tokens, 3, CONTEXT)
        assert found["token_strs"] == ["\N{REPLACEMENT CHARACTER}"] * 2 + ["m"]
        chat = {"messages": [{"role": "user", "content": "µm"}]}
        assert scripted.ask("/tokenize", chat).data["tokens"] == tokens
        assert scripted.ask("/detokenize", {"tokens": tokens}).data["prompt"] == "µm"

    def test_as_llama_cpp_has_them(self, scripted: Served, tiny: Tiny) -> None:
        tokens = tiny.tokenizer("µm").input_ids
        assert scripted.ask("/tokenize", {"content": "µm"}).data == {"tokens": tokens}
        asked = {"content": "µm", "with_pieces": True, "add_special": False}
        pieces = [each["piece"] for each in scripted.ask("/tokenize", asked).data["tokens"]]
        assert pieces == [[0xC2], [0xB5], "m"]
        assert scripted.ask("/detokenize", {"tokens": tokens}).data["content"] == "µm"
        assert scripted.ask("/tokenize", {"content": ""}).data == {"tokens": []}

    def test_many_tokens_are_named_off_the_event_loop(
        self, scripted: Served, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = set[str]()

        def find_bytes(token: int) -> bytes:
            found.add(threading.current_thread().name.rpartition("_")[0])
            return b""

        monkeypatch.setattr(scripted.service.names, "find_bytes", find_bytes)
        assert scripted.ask("/tokenize", {"content": "aa", "with_pieces": True}).status == 200
        assert found == {"offplan-tokenizer"}

    def test_what_is_refused(self, scripted: Served) -> None:
        for path, asked in (
            ("/tokenize", {}),
            ("/tokenize", {"prompt": "a", "content": "a"}),
            ("/tokenize", {"messages": []}),
            ("/tokenize", {"prompt": "a", "add_generation_prompt": False}),
            ("/detokenize", {"tokens": [10**6]}),
            ("/detokenize", {"tokens": "a"}),
        ):
            assert scripted.ask(path, asked).status == 400, asked


def test_embeddings_are_served_elsewhere(scripted: Served) -> None:
    found = scripted.ask("/v1/embeddings", {"model": NAME, "input": "a"})
    assert (found.status, "makes no embeddings" in found.data["error"]["message"]) == (404, True)
    found = scripted.ask("/v1/responses/input_tokens", {"model": NAME, "input": "a"})
    assert (found.status, "/tokenize and" in found.data["error"]["message"]) == (404, True)

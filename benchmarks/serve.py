"""Time the server beside the session that it stands on, on random weights, and print it as JSON.

    python -m benchmarks.serve [CONFIG_JSON] [--layers 12] [--clients 10] [--tokens 256]

Without a config it takes Qwen3-8B's sizes. Each way of keeping the weights is loaded once, and
timed in steps of the session that queue one behind the other, as ``offplan bench`` times them, in
``generate``'s, in texts without a server, and in streams over HTTP, whose clients run in a process
of their own: one client, and several. ``share`` is the part of a served step that the server adds.
For one client it is counted from the session's own step, for several from that of their texts.

The host's part of a step is printed for texts with and without the server: the time that it takes
to queue one, from a token's arrival until the next step is queued, and the time that it then waits
for the device. While it waits, the device is never kept waiting for the host. ``exchanges`` are the
operations of a step between host and device outside of captured graphs, copies of slabs among them.

Needs the extra ``serve``; runs on the CPU as well, with a small config. One client is quick:

    python -m benchmarks.serve --clients 1 --tokens 200
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tokenizers import Tokenizer, models
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedTokenizerFast

from offplan.checkpoint.model import Model
from offplan.checkpoint.open import open_model
from offplan.plan import Offload, Rule, load_plan
from offplan.runtime.device import find_device, settle
from offplan.runtime.generate import Arrival, Measured, generate
from offplan.runtime.joined import Continued, JoinedTexts
from offplan.runtime.measuring.timed_link import mark, seconds_between
from offplan.runtime.rendering import Renderer
from offplan.runtime.rows import Rows
from offplan.runtime.rules import TokenRules
from offplan.runtime.session import Session
from offplan.runtime.texts import Text
from offplan.serve.app import Service, make_app
from offplan.serve.guard import Guard
from offplan.serve.metrics import Metrics
from offplan.serve.reading import Reader
from offplan.serve.serving import Serving, listen
from offplan.serve.worker import Worker

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
NUM_PROMPT = 64
NUM_FIRST = 5
"""Tokens of a text whose times count for nothing: the prompt, and the steps right behind it."""
NUM_WATCHED = 8
"""Steps whose exchanges with the device are counted."""
NO_WAIT_S = 20e-6
"""Seconds within which the host is given a token that was there before it asked."""
_PREDICTED = load_plan(Path(__file__).parent.parent / "plans" / "tiny-moe.yaml").prediction
"""Any prediction: the server's metrics want one."""
_CLIENTS = """
import http.client, json, sys, threading, time
port, num_clients, num_tokens, num_prompt = map(int, sys.argv[1:])
times = [[] for _ in range(num_clients)]
def ask(number):
    body = {"prompt": [(7 * number + each) % 250 for each in range(num_prompt)], "stream": True}
    body |= {"max_tokens": num_tokens, "temperature": 0}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    assert response.status == 200, response.read()
    for line in response:
        if line.startswith(b"data: {"):
            times[number].append(time.perf_counter())
threads = [threading.Thread(target=ask, args=[number]) for number in range(num_clients)]
[each.start() for each in threads]
[each.join() for each in threads]
print(json.dumps(times))
"""


def find_ways(num_layers: int) -> dict[str, tuple[Rule, ...]]:
    """Return the rules that are timed: all on the GPU, and every fourth layer over the link."""
    streamed = {"group_size": 4, "num_in_group": 1, "cpu_offload_params": []}
    rule = Rule.model_validate({**streamed, "prefill": "prefetch", "decode": "prefetch"})
    return {"resident": (), "streamed": (rule,)} if num_layers >= 4 else {"resident": ()}


def make_tokenizer(vocabulary: int) -> Any:
    """Make a tokenizer of so many tokens, each of them a word.

    A part of a character has no chunk of its own in a stream, and tokens are counted by chunks.
    """
    words = {f"w{number}": number for number in range(vocabulary)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(words, [])))


def time_steps(session: Session, num_tokens: int) -> float:
    """Return the mean time of a step of one sequence, in seconds, as ``bench`` measures it."""
    with session.stream():
        tokens = session.prefill(torch.arange(NUM_PROMPT)[None]).argmax(-1, keepdim=True)
        for number in range(num_tokens):
            if number == NUM_FIRST:
                began = mark(session.device)
            tokens = session.decode(tokens).argmax(-1, keepdim=True)
        ended = mark(session.device)
    settle(session.device)
    return seconds_between(began, ended) / (num_tokens - NUM_FIRST)


def time_generation(session: Session, num_tokens: int) -> float:
    """Return the mean time of a step of ``generate``, in seconds."""
    measured = Measured()
    for _ in generate(session, torch.arange(NUM_PROMPT)[None], num_tokens, measured):
        pass
    return statistics.mean(measured.step_s[NUM_FIRST:])


def join_texts(rows: Rows, tokenizer: Any, num_texts: int, num_tokens: int) -> JoinedTexts:
    """Begin so many texts."""
    prompts = [[(7 * n + each) % 250 for each in range(NUM_PROMPT)] for n in range(num_texts)]
    texts = JoinedTexts(rows)
    texts.join([Continued(Text(tokenizer, each, num_tokens=num_tokens)) for each in prompts])
    return texts


def time_texts(texts: JoinedTexts) -> float:
    """Return the mean time of a step of texts without a server, in seconds."""
    ends = []
    while len(texts):
        for _ in texts.step():
            pass
        ends.append(time.perf_counter())
    return find_mean([ends])


def find_mean(ends: Sequence[Sequence[float]]) -> float:
    """Return the mean time from one token to the next, without the first ones, in seconds.

    No median: what a client reads at once may be several tokens.
    """
    return statistics.mean(
        (each[-1] - each[NUM_FIRST]) / (len(each) - 1 - NUM_FIRST) for each in ends
    )


class Exchanges(TorchDispatchMode):
    """Counts the operations of this thread that touch host and device, by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = Counter[str]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        parts = tree_leaves((args, kwargs, made))
        devices = {each.device.type for each in parts if isinstance(each, torch.Tensor)}
        reads = "item" in str(func) or "local_scalar" in str(func)
        if len(devices) > 1 or (reads and devices != {"cpu"}):
            self.counted[str(func)] += 1
        return made


def count_of_generate(session: Session) -> dict[str, float]:
    """Count what a step of ``generate`` exchanges with the device."""
    tokens = generate(session, torch.arange(NUM_PROMPT)[None], NUM_FIRST + NUM_WATCHED + 1)
    return _count(lambda: next(tokens))


def count_of_texts(rows: Rows, tokenizer: Any) -> dict[str, float]:
    """Count what a step of a text exchanges with the device, as the server makes it."""
    texts = join_texts(rows, tokenizer, 1, NUM_FIRST + NUM_WATCHED + 1)
    found = _count(lambda: [*texts.step()])
    while len(texts):
        for _ in texts.step():
            pass
    return found


def _count(step: Callable[[], object]) -> dict[str, float]:
    for _ in range(NUM_FIRST):
        step()
    with Exchanges() as watch:
        for _ in range(NUM_WATCHED):
            step()
    return {name: number / NUM_WATCHED for name, number in watch.counted.items()}


class HostTimes:
    """When the host queued each step of texts, and when it waited for their tokens."""

    def __init__(self) -> None:
        self._noted: list[tuple[str, float, float]] = []

    @contextmanager
    def watch(self) -> Iterator["HostTimes"]:
        """Note what the one thread does meanwhile that continues texts."""
        with (
            patch.object(Rows, "extend", self._note("queue", Rows.extend)),
            patch.object(Arrival, "wait", self._note("wait", Arrival.wait)),
        ):
            yield self

    def _note(self, name: str, call: Any) -> Any:
        def run(*given: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*given)
            finally:
                self._noted.append((name, began, time.perf_counter()))

        return run

    def sum_up(self) -> dict[str, float]:
        """Return medians in seconds, and the part of tokens that were there before being asked for.

        No means: between some steps there is a prompt.
        """
        noted = self._noted[2 * NUM_FIRST :]
        waits = [ended - began for name, began, ended in noted if name == "wait"]
        gaps = [
            queued - arrived
            for (first, _, arrived), (then, _, queued) in pairwise(noted)
            if (first, then) == ("wait", "queue")
        ]
        return {
            "queueing_s": statistics.median(e - b for name, b, e in noted if name == "queue"),
            "from_token_to_queued_s": statistics.median(gaps),
            "waiting_for_device_s": statistics.median(waits),
            "part_not_waited_for": sum(each < NO_WAIT_S for each in waits) / len(waits),
        }


def time_clients(port: int, num_clients: int, num_tokens: int) -> tuple[float, float]:
    """Return the mean time of a token, and tokens a second of all clients together."""
    command = [
        sys.executable,
        "-c",
        _CLIENTS,
        *map(str, (port, num_clients, num_tokens, NUM_PROMPT)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    times: list[list[float]] = json.loads(done.stdout)
    found = [len(each) for each in times]
    assert found == [num_tokens] * num_clients, f"{found} chunks, not one for each token"
    begun, ended = max(each[NUM_FIRST] for each in times), min(each[-1] for each in times)
    made = sum(begun <= at <= ended for each in times for at in each)
    return find_mean(times), made / (ended - begun)


@contextmanager
def serving(model: Model, session: Session, tokenizer: Any, rows: Rows) -> Iterator[int]:
    """Serve a session, until the context is left, at the port that comes of it."""
    metrics, is_ready = Metrics(_PREDICTED), threading.Event()
    faults: Any = lambda error: print(repr(error), file=sys.stderr)  # noqa: E731
    service = Service(
        name="benchmark",
        created_s=0,
        reader=Reader.of(model, tokenizer, TokenRules(), session.context, "benchmark", Renderer()),
        worker=Worker(JoinedTexts(rows), metrics, most_waiting=64, on_fault=faults),
        metrics=metrics,
        guard=Guard(),
        on_fault=faults,
    )
    serving = Serving(listen("127.0.0.1", 0), drain_s=6, on_end=lambda what: None, leave=faults)
    with serving as server:
        thread = threading.Thread(
            target=server.serve,
            args=[service, make_app(service)],
            kwargs={"on_ready": is_ready.set},
        )
        thread.start()
        assert is_ready.wait(60)
        try:
            yield server.port
        finally:
            server.end()
            thread.join()


def time_way(
    model: Model, folder: Path | None, rules: tuple[Rule, ...], given: Any
) -> dict[str, Any]:
    """Time one way of keeping the weights."""
    began = time.perf_counter()
    decision = Offload(
        prefetch_step=1, prefill_chunk=given.chunk, embeddings="device", store="host", rules=rules
    )
    context = NUM_PROMPT + given.tokens + 8
    device = find_device(None)
    with Session(model, decision, context=context, device=device, folder=folder) as session:
        tokenizer = make_tokenizer(session.loaded.module.config.get_text_config().vocab_size)
        session.warm_up(1, NUM_PROMPT)
        found: dict[str, Any] = {
            "session_step_s": time_steps(session, given.tokens),
            "generate_step_s": time_generation(session, given.tokens),
        }
        exchanges = {"generate": count_of_generate(session)}
        rows = Rows(session, given.clients)
        rows.warm_up(NUM_PROMPT)
        numbers = sorted({1, given.clients})
        for number in numbers:
            texts = join_texts(rows, tokenizer, number, given.tokens)
            with HostTimes().watch() as host:
                step_s = time_texts(texts)
            found[f"texts_{number}"] = {"step_s": step_s, "host": host.sum_up()}
        exchanges["texts"] = count_of_texts(rows, tokenizer)
        with serving(model, session, tokenizer, rows) as port:
            for number in numbers:
                with HostTimes().watch() as host:
                    step_s, tokens_per_s = time_clients(port, number, given.tokens)
                alone_s = found[f"texts_{number}"]["step_s"]
                alone_s = found["session_step_s"] if number == 1 else alone_s
                found[f"served_{number}"] = {
                    "step_s": step_s,
                    "share": 1 - alone_s / step_s,
                    "tokens_per_s": tokens_per_s,
                    "host": host.sum_up(),
                }
        found["exchanges"] = exchanges
        found["gpu_bytes"] = session.gpu_bytes
    return found | {"took_s": time.perf_counter() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", nargs="?", type=Path)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--chunk", type=int, default=64)
    given = parser.parse_args()
    config = QWEN3_8B if given.config is None else json.loads(given.config.read_text())
    config = config | {"num_hidden_layers": given.layers}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        model = open_model(str(path))
        for way, rules in find_ways(given.layers).items():
            told = {"way": way, "layers": given.layers, **time_way(model, None, rules, given)}
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()

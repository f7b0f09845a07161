"""Time the server beside the session that it stands on, on random weights, and print it as JSON.

    python -m benchmarks.serve [CONFIG_JSON] [--layers 12] [--clients 10] [--tokens 256]

Without a config it takes Qwen3-8B's sizes. Each way of keeping the weights is loaded once and timed
five times: steps of the session alone, as ``offplan bench`` times them; texts without a server,
in this thread and in another; and
streams over HTTP, whose clients run in a process of their own, for one client and for several.
``share`` is the part of a step that the server adds to the session's. Needs the extra ``serve``;
runs on the CPU as well, with a small config.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from offplan.checkpoint.model import Model
from offplan.checkpoint.open import open_model
from offplan.plan import Offload, Rule, load_plan
from offplan.runtime.device import find_device
from offplan.runtime.joined import Continued, JoinedTexts
from offplan.runtime.rows import Rows
from offplan.runtime.rules import TokenRules
from offplan.runtime.session import Session
from offplan.runtime.texts import Text
from offplan.serve.app import Service
from offplan.serve.guard import Guard
from offplan.serve.metrics import Metrics
from offplan.serve.reading import Reader
from offplan.serve.serving import Serving, bind
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
    """Make a tokenizer of so many tokens: bytes, and words that are made up."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    words = [*sorted(letters), *(f"\u0120w{number}" for number in range(vocabulary))]
    backend = Tokenizer(models.BPE({word: at for at, word in enumerate(words[:vocabulary])}, []))
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def time_steps(session: Session, num_tokens: int) -> float:
    """Return the mean time of a step of one sequence, in seconds, as ``bench`` measures it."""
    session.warm_up(1, NUM_PROMPT)
    ends = []
    with session.stream():
        tokens = session.prefill(torch.arange(NUM_PROMPT)[None]).argmax(-1, keepdim=True)
        for _ in range(num_tokens):
            tokens = session.decode(tokens).argmax(-1, keepdim=True)
            tokens.cpu()
            ends.append(time.perf_counter())
    return find_mean([ends])


def time_texts(rows: Rows, tokenizer: Any, num_texts: int, num_tokens: int) -> float:
    """Return the mean time of a step of texts without a server, in seconds."""
    prompts = [[(7 * n + each) % 250 for each in range(NUM_PROMPT)] for n in range(num_texts)]
    texts = JoinedTexts(rows)
    texts.join([Continued(Text(tokenizer, each, num_tokens=num_tokens)) for each in prompts])
    ends = []
    while len(texts):
        for _ in texts.step():
            pass
        ends.append(time.perf_counter())
    return find_mean([ends])


def find_mean(ends: list[list[float]]) -> float:
    """Return the mean time from one token to the next, without the first ones, in seconds.

    No median: what a client reads at once may be several tokens.
    """
    return statistics.mean((each[-1] - each[4]) / (len(each) - 5) for each in ends)


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
    begun, ended = max(each[4] for each in times), min(each[-1] for each in times)
    made = sum(begun <= at <= ended for each in times for at in each)
    return find_mean(times), made / (ended - begun)


def serve(model: Model, session: Session, tokenizer: Any, rows: Rows) -> tuple[Serving, int, Any]:
    """Begin to serve a session; return the server, its port and the thread it runs in."""
    metrics, is_ready = Metrics(_PREDICTED), threading.Event()
    faults: Any = lambda error: print(repr(error), file=sys.stderr)  # noqa: E731
    service = Service(
        name="benchmark",
        created_s=0,
        reader=Reader.of(model, tokenizer, TokenRules(), session.context, "benchmark"),
        worker=Worker(JoinedTexts(rows), metrics, most_waiting=64, on_fault=faults),
        metrics=metrics,
        guard=Guard(),
        on_fault=faults,
    )
    bound = bind("127.0.0.1", 0)
    serving = Serving(service, bound, on_ready=is_ready.set, on_end=lambda is_second: None)
    thread = threading.Thread(target=serving.run)
    thread.start()
    assert is_ready.wait(60)
    return serving, bound.getsockname()[1], thread


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
        found: dict[str, Any] = {"session_step_s": time_steps(session, given.tokens)}
        rows = Rows(session, given.clients)
        rows.warm_up(NUM_PROMPT)
        for number in (1, given.clients):
            found[f"texts_step_s_{number}"] = time_texts(rows, tokenizer, number, given.tokens)
        with ThreadPoolExecutor(1) as beside:
            ran = beside.submit(time_texts, rows, tokenizer, 1, given.tokens)
            found["texts_in_a_thread_step_s_1"] = ran.result()
        serving, port, thread = serve(model, session, tokenizer, rows)
        try:
            for number in (1, given.clients):
                step_s, tokens_per_s = time_clients(port, number, given.tokens)
                alone = found["session_step_s" if number == 1 else f"texts_step_s_{number}"]
                found[f"served_{number}"] = {
                    "step_s": step_s,
                    "tokens_per_s": tokens_per_s,
                    "alone_tokens_per_s": number / alone,
                    "share": 1 - alone / step_s,
                }
        finally:
            serving.end()
            thread.join()
        found["texts_again_step_s_1"] = time_texts(rows, tokenizer, 1, given.tokens)
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

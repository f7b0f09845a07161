"""Measures how long this model's layers compute on this machine, run as the runtime runs them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy
import torch

from offplan.held.stage import Stage
from offplan.kernel_sizes import MAX_CAPTURED_CHUNKS
from offplan.machine.measure_link import measure_in_place_reads
from offplan.machine.measure_time import (
    NUM_SAMPLES,
    Timing,
    average,
    time_on_host,
    time_once,
    time_work,
)
from offplan.machine.profile import InPlaceRead, LayerTime
from offplan.plan import Offload, Workload
from offplan.progress import Progress
from offplan.runtime.session import NUM_WARMUP_STEPS, Session

READ_ONCE_TOKENS, MAX_IN_PLACE_TOKENS = 128, 4096
"""Tokens, over all sequences, of the prompts whose products are timed in place: more than the
first, no more than the second."""
REPEATS = 4
"""Times a layer is run in a row: enough to make what begins and ends a row a small share."""

TIMED_CHUNKS = 4
"""Chunks of a prompt that are timed at most: the time between two is taken to grow evenly.

It does where attention reaches all tokens before, and stays where a window is full. Chunked
attention begins anew: the sum of Llama-4's chunks is then 0.97 to 1.01 of what it is.
"""

CPU_REPEATS = 5
"""Times that anything is run in a row on the CPU, which has other work, too."""


def measure_layer_times(
    stage: Stage,
    workload: Workload,
    chunks: Sequence[int],
    on_progress: Progress | None = None,
    *,
    device: str = "cuda",
) -> tuple[LayerTime, ...]:
    """Time one layer of each kind, and what lies outside the layers, on the current CUDA device.

    Or on the CPU, where that is the ``device``, and nothing is captured.

    The shortest run of layers that has every kind is loaded with random weights, all resident.
    Prefill is timed for prompts in chunks of each size in ``chunks`` (tokens, none more than the
    prompt, the largest first). Chunks run as in the session, captured or not: small chunks that are
    not captured take as long as their launches. TIMED_CHUNKS of a prompt are timed, the first and
    the last among them. What lies outside the layers is that of all its chunks, of one more than
    are captured at most. Decode is timed for a captured layer with the whole prompt and half of the
    output in the cache. If the context ends before, the cache has a few tokens less. A step of the
    request meets that on average.
    """
    kinds = [layer.key for layer in stage.layers]
    num_layers = max(kinds.index(kind) for kind in kinds) + 1
    short = replace(stage.model, layers=stage.model.layers[:num_layers])
    names = kinds[:num_layers]
    # room for a token and the decode steps that are timed, and for a last chunk that is whole
    num_steps = NUM_WARMUP_STEPS + NUM_SAMPLES * (1 if device == "cuda" else CPU_REPEATS)
    longest = max(-(-workload.prompt_tokens // chunk) * chunk for chunk in chunks)
    context = max(workload.context, longest, num_steps + 2)
    times: list[LayerTime] = []

    def note(of_kinds: Mapping[str, Timing], **what: Any) -> None:
        times.extend(
            LayerTime(layer=name, batch=workload.batch, **each._asdict(), **what)
            for name, each in of_kinds.items()
        )

    def name(timings: Sequence[Timing]) -> dict[str, Timing]:
        return dict(zip(names, timings, strict=True))  # of equal layers the last one's

    def tell(number: int) -> None:
        if on_progress is not None:
            on_progress(number, len(chunks) + 1)

    for number, chunk in enumerate(chunks, 1):
        offload = Offload(prefill_chunk=chunk, embeddings=place_tables(stage))
        offload = offload.recoded_by(stage.recoding)
        with Session(short, offload, context=context, device=device) as session:
            # too many to be captured, where the prompt's are
            num_chunks = min(-(-workload.prompt_tokens // chunk), MAX_CAPTURED_CHUNKS + 1)
            shape = workload.batch, num_chunks * chunk
            # equal tokens would all be sent to the same experts
            vocabulary = session.loaded.module.config.get_text_config().vocab_size
            prompt = torch.randint(vocabulary, shape)
            captured = session.runner.captures_prompt(workload.batch, workload.prompt_tokens)
            stops = choose_stops(workload.prompt_tokens, chunk)
            each, rest = _time_prefill(session, prompt, stops, captured=captured)
            what = {"phase": "prefill", "tokens": chunk, "is_part": chunk < workload.prompt_tokens}
            for stop, *timings in zip(stops, *each, strict=True):
                note(name(timings), context=stop, **what)
            note({stage.outside_key: rest}, context=stops[-1], **what)
            tell(number + (number > 1))
            if number == 1:
                filled = min(workload.decode_context, context - num_steps - 1)
                timings, rest = _time_decode(session, prompt[:, :1], filled)
                of_step = name(timings) | {stage.outside_key: rest}
                note(of_step, phase="decode", tokens=1, context=workload.decode_context)
                tell(2)
    return tuple(times)


def choose_stops(prompt_tokens: int, chunk: int) -> list[int]:
    """Choose the chunks of a prompt that are timed: return the tokens up to the end of each.

    They are the first, the second, one in the middle and the last. The last is taken to be whole.
    """
    count = -(-prompt_tokens // chunk)
    return [chunk * number for number in sorted({1, min(2, count), count // 2 + 1, count})]


def place_tables(stage: Stage) -> Literal["device", "host"]:
    """Return where embeddings lie while layers are timed: on the host if not the input's alone may.

    Gemma's embedding for each layer is as large as many layers, and may leave these no room. The
    time of what lies outside the layers then has the reading of its rows in it, too.
    """
    return "host" if any(not table.is_input for table in stage.tables) else "device"


def measure_model_reads(
    stage: Stage,
    workload: Workload,
    chunks: Sequence[int],
    uva: float,
    on_progress: Progress | None = None,
) -> tuple[InPlaceRead, ...]:
    """Time what chunks of so many tokens could have to read in place, on the current CUDA device.

    ``uva`` is the rate of reading once, in bytes per second. Few tokens do so, and many are left to
    what holds for any shape: hardly a plan has them read in place.
    """
    units = {unit for of_layer in stage.units for unit in of_layer}
    # a convolution has three dimensions as well, and is no product
    shapes = {
        unit.shape
        for unit in units
        if unit.parameters[0].form.is_raw and (unit.is_expert or len(unit.shape) < 3)
    }
    tokens = sorted({workload.batch * chunk for chunk in chunks})
    pairs = 0 if stage.experts is None else stage.experts.num_experts_per_token
    products = [
        (shape, count)
        for shape in sorted(shapes)
        for count in tokens
        if len(shape) > 1 and READ_ONCE_TOKENS < count <= MAX_IN_PLACE_TOKENS
    ]
    if not products:
        return ()
    return measure_in_place_reads(
        products, pairs, uva, on_progress, multiply_experts=_multiply_in_place
    )


def _multiply_in_place(*inputs: torch.Tensor) -> torch.Tensor:
    from offplan.runtime.forms.grouped import multiply_values  # needs triton

    return multiply_values(*inputs, in_place=True)


def _time_prefill(
    session: Session, prompt: torch.Tensor, stops: Sequence[int], *, captured: bool
) -> tuple[list[list[Timing]], Timing]:
    """Time each layer for the chunks that end at ``stops``, and all that lies outside layers.

    The latter is what ``prompt`` takes beside its layers. Of a prompt that is to be ``captured``
    layers are captured too. Another's chunks may take as long as the host needs to launch them:
    they are taken through a layer as a request's are.
    """
    whole = _time(session, lambda: session.prefill(prompt))
    chunk = stops[0]
    # latents are expanded chunk by chunk: not for the last one anew, as if it began a prompt
    length = chunk if len(stops) == 1 else session.context + 1
    tokens = prompt[:, :chunk].to(session.device)
    with session.stream(), torch.inference_mode():
        session.runner.fill_cache()
        chunks = [session.runner.chunk_layers(tokens, stop - chunk, length) for stop in stops]
        # layer by layer, as a prompt passes them
        each = _time_layers(session, list(zip(*chunks, strict=True)), captured=captured)
    ends = range(chunk, prompt.shape[1] + 1, chunk)
    seconds = (numpy.interp(ends, stops, [timing.seconds for timing in of]).sum() for of in each)
    return each, _find_rest(whole, float(sum(seconds)))


def _time_decode(
    session: Session, tokens: torch.Tensor, filled: int
) -> tuple[list[Timing], Timing]:
    """Time each captured layer, and the rest of a captured step, behind ``filled`` tokens.

    Only the number of them counts, not what they were: attention reads the cache up to there.
    """
    tokens = tokens.to(session.device)
    with session.stream(), torch.inference_mode():
        session.runner.set_length(filled)
    step = _time(session, lambda: session.decode(tokens))
    with session.stream(), torch.inference_mode():
        layers = session.runner.forward.step_layers(tokens)
        timed = _time_layers(session, [(layer,) for layer in layers], captured=True)
    each = [timing for (timing,) in timed]
    return each, _find_rest(step, sum(timing.seconds for timing in each))


def _share(timing: Timing, count: int) -> Timing:
    return timing._replace(seconds=timing.seconds / count)


def _find_rest(whole: Timing, layers_s: float) -> Timing:
    """Return what a pass takes beside its layers, with the samples of the pass."""
    seconds = max(0.0, whole.seconds - layers_s)
    spread = whole.spread * whole.seconds / seconds if seconds else 0.0
    return whole._replace(seconds=seconds, spread=round(spread, 4))


def _time_layers(
    session: Session, layers: Sequence[Sequence[Callable[[], object]]], *, captured: bool
) -> list[list[Timing]]:
    """Time each layer's chunks, captured or not; the CPU captures nothing."""
    if session.device.type == "cuda":
        time = _time_captured if captured else partial(_time, repeats=REPEATS)
        timed = []
        for chunks in layers:
            timed.append([time(session, chunk) for chunk in chunks])
            session.runner.end_chunks()
        return timed
    # in turns: in a row of its own a layer would find its code and weights in the CPU's caches; and
    # on average: a median is too short for a whole pass, which other processes do interrupt
    samples = [
        [[time_once(chunk) for chunk in chunks] for chunks in layers]
        for _ in range(NUM_SAMPLES * CPU_REPEATS)
    ]
    session.runner.end_chunks()
    of_layers = zip(*samples, strict=True)
    return [[average(of) for of in zip(*each, strict=True)] for each in of_layers]


def _time_captured(session: Session, work: Callable[[], object]) -> Timing:
    """Time work that is captured."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    graph.capture_begin()
    for _ in range(REPEATS):
        work()
    graph.capture_end()
    return _share(_time(session, graph.replay), REPEATS)


def _time(session: Session, work: Callable[[], object], repeats: int = 1) -> Timing:
    with session.stream():
        for _ in range(NUM_WARMUP_STEPS - 1):
            work()
        if session.device.type != "cuda":
            return time_on_host(work, CPU_REPEATS)
        return time_work(work, repeats)  # which warms up once

"""Measures how long this model's layers compute on this machine, run as the runtime runs them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch

from offplan.held.stage import Stage
from offplan.kernel_sizes import MAX_CAPTURED_CHUNKS
from offplan.machine.measure_products import measure_in_place_reads
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
    not captured take as long as their launches. A chunk's time is the mean of those of a prompt;
    what lies outside the layers is all of it. Decode is timed for a captured layer with the whole
    prompt and half of the output in the cache. If the context ends before, the cache has a few
    tokens less. A step of the request meets that on average.
    """
    kinds = [layer.key for layer in stage.layers]
    num_layers = max(kinds.index(kind) for kind in kinds) + 1
    short = replace(stage.model, layers=stage.model.layers[:num_layers])
    names = [*kinds[:num_layers], stage.outside_key]
    # room for a token and the decode steps that are timed, and for a last chunk that is whole
    num_steps = NUM_WARMUP_STEPS + NUM_SAMPLES * (1 if device == "cuda" else CPU_REPEATS)
    longest = max(-(-workload.prompt_tokens // chunk) * chunk for chunk in chunks)
    context = max(workload.context, longest, num_steps + 2)
    times: list[LayerTime] = []

    def note(timings: Sequence[Timing], **what: Any) -> None:
        of_kinds = dict(zip(names, timings, strict=True))  # of equal layers the last one's
        times.extend(
            LayerTime(layer=name, batch=workload.batch, **each._asdict(), **what)
            for name, each in of_kinds.items()
        )
        if on_progress is not None:
            on_progress(len(times) // len(of_kinds), len(chunks) + 1)

    for chunk in chunks:
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
            timings = _time_prefill(session, prompt, num_chunks, captured=captured)
            reach, is_part = chunk * (num_chunks + 1) // 2, chunk < workload.prompt_tokens
            note(timings, phase="prefill", tokens=chunk, context=reach, is_part=is_part)
            if chunk == chunks[0]:
                filled = min(workload.decode_context, context - num_steps - 1)
                timings = _time_decode(session, prompt[:, :1], filled)
                note(timings, phase="decode", tokens=1, context=workload.decode_context)
    return tuple(times)


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
    return measure_in_place_reads(products, pairs, uva, on_progress) if products else ()


def _time_prefill(
    session: Session, prompt: torch.Tensor, num_chunks: int, *, captured: bool
) -> list[Timing]:
    """Time each layer for a chunk of a prompt, on average, and all that lies outside of them.

    Of a prompt that is to be ``captured`` layers are captured too. Another's chunks may take as
    long as the host needs to launch them: they are taken through a layer as a request's are.
    """
    whole = _time(session, lambda: session.prefill(prompt))
    with session.stream(), torch.inference_mode():
        layers = session.runner.prompt_layers(prompt.to(session.device))
        each = _time_layers(session, layers, captured=captured)
    return [*(_share(timing, num_chunks) for timing in each), _find_rest(whole, each)]


def _time_decode(session: Session, tokens: torch.Tensor, filled: int) -> list[Timing]:
    """Time each captured layer, and the rest of a captured step, behind ``filled`` tokens.

    Only the number of them counts, not what they were: attention reads the cache up to there.
    """
    tokens = tokens.to(session.device)
    with session.stream(), torch.inference_mode():
        session.runner.set_length(filled)
    step = _time(session, lambda: session.decode(tokens))
    with session.stream(), torch.inference_mode():
        layers = session.runner.forward.step_layers(tokens)
        each = _time_layers(session, layers, captured=True)
    return [*each, _find_rest(step, each)]


def _share(timing: Timing, count: int) -> Timing:
    return timing._replace(seconds=timing.seconds / count)


def _find_rest(whole: Timing, layers: Sequence[Timing]) -> Timing:
    """Return what a pass takes beside its layers, with the samples of the pass."""
    seconds = max(0.0, whole.seconds - sum(each.seconds for each in layers))
    spread = whole.spread * whole.seconds / seconds if seconds else 0.0
    return whole._replace(seconds=seconds, spread=round(spread, 4))


def _time_layers(
    session: Session, layers: Sequence[Callable[[], object]], *, captured: bool
) -> list[Timing]:
    """Time each layer, captured or not; the CPU captures nothing."""
    if session.device.type == "cuda":
        time = _time_captured if captured else partial(_time, repeats=REPEATS)
        return [time(session, layer) for layer in layers]
    # in turns: in a row of its own a layer would find its code and weights in the CPU's caches; and
    # on average: a median is too short for a whole pass, which other processes do interrupt
    samples = [[time_once(layer) for layer in layers] for _ in range(NUM_SAMPLES * CPU_REPEATS)]
    return [average(each) for each in zip(*samples, strict=True)]


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

"""Measures how long this model's layers compute here in other passes than offplan's own."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import starmap

import torch

from offplan.held.stage import Stage
from offplan.machine.measure_time import NUM_SAMPLES, Timing, average
from offplan.machine.profile import LayerTime
from offplan.placement import Phase
from offplan.plan import Offload, Workload
from offplan.progress import Progress
from offplan.runtime.device import settle
from offplan.runtime.loading.skeleton import decoder_layers
from offplan.runtime.measuring.layer_times import CPU_REPEATS, place_tables
from offplan.runtime.measuring.timed_link import Moment, mark, seconds_between
from offplan.runtime.model.calls import LayerCalls
from offplan.runtime.session import NUM_WARMUP_STEPS, Session

MOST_FILLED = 8192
"""Tokens in the cache of timed steps, at most: some models read all of them in one pass first."""


def measure_pass_times(
    stage: Stage,
    workload: Workload,
    chunks: Sequence[int],
    on_progress: Progress | None = None,
    *,
    device: str = "cuda",
) -> tuple[LayerTime, ...]:
    """Time a call of each kind of layer, and what lies outside the layers, in whole passes.

    ``stage`` is held for the passes. Layers that are alike share random weights, all on the
    ``device``, the current CUDA device or the CPU. A pass runs all layers as a request's does, and
    a layer that is launch-bound takes as long as its launches. A prompt of as many tokens
    as the first of ``chunks`` is read whole. Decode is timed with as many tokens in the cache as a
    step of the request finds on average, MOST_FILLED at most. Waits for the device.
    """
    num_steps = 2 * NUM_SAMPLES * (1 if device == "cuda" else CPU_REPEATS)
    all_steps = NUM_WARMUP_STEPS + num_steps
    read, reach = chunks[0], min(workload.decode_context, MOST_FILLED)
    context = max(workload.context, all_steps + 1)
    # the step in the middle is the average one, where the context has room for those behind it
    before = reach - NUM_WARMUP_STEPS - num_steps // 2 - 1
    filled = max(1, min(before, context - all_steps))
    offload = Offload(
        prefetch_step=1, prefill_chunk=max(read, filled), embeddings=place_tables(stage)
    )

    with (
        Session(
            *(stage.model, offload),
            context=context,
            device=device,
            way=stage.way,
            share_layers=True,
        ) as session,
        session.stream(),
    ):
        clock = _Clock(session, stage)
        # equal tokens would all be sent to the same experts
        vocabulary = session.loaded.module.config.get_text_config().vocab_size
        tokens = torch.randint(vocabulary, (workload.batch, max(read, filled)))
        prompt = tokens[:, :read]
        session.prefill(prompt)
        clock.forget()
        for number in range(2 * NUM_SAMPLES):
            settle(session.device)  # a request's prompt finds an idle device
            clock.time(partial(session.prefill, prompt), marked=number % 2 == 0)
        of_prompt = clock.take()
        if on_progress is not None:
            on_progress(1, 2)
        logits = session.prefill(tokens[:, :filled])
        for number in range(all_steps):
            if number == NUM_WARMUP_STEPS:
                clock.forget()
            step = partial(session.decode, logits.argmax(-1, keepdim=True))
            logits = clock.time(step, marked=number % 2 == 0)
        of_step = clock.take()
        if on_progress is not None:
            on_progress(2, 2)
    phases = ((Phase.PREFILL, read, read, of_prompt), (Phase.DECODE, 1, reach, of_step))
    return tuple(
        LayerTime(
            layer=name,
            phase=phase.value,
            batch=workload.batch,
            tokens=tokens,
            context=reach,
            **timing._asdict(),
        )
        for phase, tokens, reach, timings in phases
        for name, timing in timings.items()
    )


class _Clock:
    """Times passes of a session, and the calls of layers in each, by events on its stream.

    To mark a call takes the host time, which a pass that is bound by its launches shows. So as many
    passes run without marks, and say what all calls add up to.
    """

    def __init__(self, session: Session, stage: Stage) -> None:
        """Begin to note the calls of layers; ``stage`` names their times."""
        self._device, self._stage = session.device, stage
        self._begun: Moment = 0.0
        self._noted: list[tuple[str, Moment, Moment]] = []
        """The layer, the beginning and the end of each call since the last pass."""
        self._marked: list[tuple[Moment, Moment, list[tuple[str, Moment, Moment]]]] = []
        self._plain: list[tuple[Moment, Moment]] = []
        """Passes without marks inside."""
        self._layers = decoder_layers(session.loaded.module)

    def time(self, work: Callable[[], torch.Tensor], *, marked: bool) -> torch.Tensor:
        """Run a pass, and keep its moments, and those of its calls where they are ``marked``."""
        self._noted = []
        calls = LayerCalls(self._layers if marked else ())
        calls.enter, calls.leave = self._enter, self._leave
        began = mark(self._device)
        made = work()
        ended = mark(self._device)
        calls.close()
        if marked:
            self._marked.append((began, ended, self._noted))
        else:
            self._plain.append((began, ended))
        return made

    def forget(self) -> None:
        """Forget the passes so far."""
        self._marked.clear()
        self._plain.clear()

    def take(self) -> Mapping[str, Timing]:
        """Return the seconds of one call, by the name of its times; waits for the device.

        All calls of a pass, and what lies outside, add up to the median pass without marks.
        """
        settle(self._device)
        plain = statistics.median(starmap(seconds_between, self._plain))
        marked = [seconds_between(began, ended) for began, ended, _ in self._marked]
        num_marks = 2 * len(self._marked[0][2])
        of_mark = max(0.0, statistics.fmean(marked) - plain) / max(1, num_marks)
        samples: defaultdict[str, list[float]] = defaultdict(list)
        outside_key = self._stage.time_key(self._stage.outside_key)
        left: list[float] = []
        """Seconds of each pass without its marks."""
        for seconds, (*_, calls) in zip(marked, self._marked, strict=True):
            by_name: defaultdict[str, list[float]] = defaultdict(list)
            for name, *moments in calls:
                by_name[name].append(max(0.0, seconds_between(*moments) - of_mark))
            for name, each in by_name.items():
                samples[name].append(statistics.fmean(each))
            inside = sum(map(sum, by_name.values()))
            samples[outside_key].append(max(0.0, seconds - of_mark * num_marks - inside))
            left.append(inside + samples[outside_key][-1])
        self.forget()
        # in an interrupted pass one part is late, which the medians of parts would leave out
        share = plain / statistics.fmean(left)
        means = {name: average(each) for name, each in samples.items()}
        return {name: each._replace(seconds=share * each.seconds) for name, each in means.items()}

    def _enter(self, index: int) -> None:
        self._begun = mark(self._device)

    def _leave(self, index: int) -> None:
        name = self._stage.time_key(self._stage.layers[index].key)
        self._noted.append((name, self._begun, mark(self._device)))

"""Measures how long this model's layers compute here in transformers' own passes."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from offplan.held.stage import Stage
from offplan.machine.measure_time import NUM_SAMPLES, Timing, average
from offplan.machine.profile import LayerTime
from offplan.placement import Phase
from offplan.plan import Offload, Workload
from offplan.progress import Progress
from offplan.runtime.device import settle
from offplan.runtime.loading.skeleton import decoder_layers
from offplan.runtime.measuring.layer_times import CPU_REPEATS
from offplan.runtime.measuring.moments import Moment, mark, seconds_between
from offplan.runtime.model.calls import LayerCalls
from offplan.runtime.session import NUM_WARMUP_STEPS, Session

MOST_FILLED = 8192
"""Tokens in the cache of timed steps, at most: some models read all of them in one pass first."""


def measure_stock_times(
    stage: Stage,
    workload: Workload,
    chunks: Sequence[int],
    on_progress: Progress | None = None,
    *,
    device: str = "cuda",
) -> tuple[LayerTime, ...]:
    """Time a call of each kind of layer, and what lies outside the layers, in whole passes.

    ``stage`` is held for transformers' own passes. Layers that are alike share random weights, all
    on the ``device``, the current CUDA device or the CPU. A pass runs all layers as ``generate``
    does, and a layer that is launch-bound takes as long as its launches. A prompt of as many tokens
    as the first of ``chunks`` is read whole. Decode is timed with as many tokens in the cache as a
    step of the request finds on average, MOST_FILLED at most. Waits for the device.
    """
    num_steps = NUM_SAMPLES * (1 if device == "cuda" else CPU_REPEATS)
    all_steps = NUM_WARMUP_STEPS + num_steps
    read, reach = chunks[0], min(workload.decode_context, MOST_FILLED)
    context = max(workload.context, all_steps + 1)
    # the step in the middle is the average one, where the context has room for those behind it
    before = reach - NUM_WARMUP_STEPS - num_steps // 2 - 1
    filled = max(1, min(before, context - all_steps))
    offload = Offload(prefetch_step=1, prefill_chunk=max(read, filled), rules=())

    with (
        Session(
            stage.model, offload, context=context, device=device, stock=True, share_layers=True
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
        for _ in range(NUM_SAMPLES):
            settle(session.device)  # a request's prompt finds an idle device
            clock.time(partial(session.prefill, prompt))
        of_prompt = clock.take()
        if on_progress is not None:
            on_progress(1, 2)
        logits = session.prefill(tokens[:, :filled])
        for number in range(all_steps):
            if number == NUM_WARMUP_STEPS:
                clock.forget()
            logits = clock.time(partial(session.decode, logits.argmax(-1, keepdim=True)))
        of_step = clock.take()
        clock.close()
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
    """Times passes of a session, and the calls of layers in each, by events on its stream."""

    def __init__(self, session: Session, stage: Stage) -> None:
        """Begin to note the calls of layers; ``stage`` names their times."""
        self._device, self._stage = session.device, stage
        self._begun: Moment = 0.0
        self._noted: list[tuple[str, Moment, Moment]] = []
        """The layer, the beginning and the end of each call since the last pass."""
        self._passes: list[tuple[Moment, Moment, list[tuple[str, Moment, Moment]]]] = []
        self._calls = LayerCalls(decoder_layers(session.loaded.module))
        self._calls.enter, self._calls.leave = self._enter, self._leave

    def close(self) -> None:
        """Note no more calls."""
        self._calls.close()

    def time(self, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run a pass, and keep the moments of its calls."""
        self._noted, began = [], mark(self._device)
        made = work()
        self._passes.append((began, mark(self._device), self._noted))
        return made

    def forget(self) -> None:
        """Forget the passes so far."""
        self._passes.clear()

    def take(self) -> Mapping[str, Timing]:
        """Return the seconds of one call, by the name of its times; waits for the device.

        All calls of a pass, and what lies outside, add up to the median pass.
        """
        settle(self._device)
        samples: defaultdict[str, list[float]] = defaultdict(list)
        passes: list[float] = []
        for began, ended, calls in self._passes:
            seconds: defaultdict[str, list[float]] = defaultdict(list)
            for name, *moments in calls:
                seconds[name].append(seconds_between(*moments))
            for name, each in seconds.items():
                samples[name].append(statistics.fmean(each))
            passes.append(seconds_between(began, ended))
            outside = passes[-1] - sum(map(sum, seconds.values()))
            samples[self._stage.time_key(self._stage.outside_key)].append(max(0.0, outside))
        self.forget()
        # in an interrupted pass one part is late, which the medians of parts would leave out
        share = statistics.median(passes) / statistics.fmean(passes)
        means = {name: average(each) for name, each in samples.items()}
        return {name: each._replace(seconds=share * each.seconds) for name, each in means.items()}

    def _enter(self, index: int) -> None:
        self._begun = mark(self._device)

    def _leave(self, index: int) -> None:
        name = self._stage.time_key(self._stage.layers[index].key)
        self._noted.append((name, self._begun, mark(self._device)))

"""A plan brought to life: prefill, decode, and nothing that synchronises with the host."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch

from offplan.capabilities.drafts import most_drafted
from offplan.capabilities.way import OWN, Way
from offplan.checkpoint.jsontext import describe
from offplan.checkpoint.model import Model
from offplan.errors import OffplanError, PlanError
from offplan.plan import Offload
from offplan.progress import Progress
from offplan.routing.profile import require_routing
from offplan.runtime.device import let_go, on_device, open_stream
from offplan.runtime.executors import EXECUTORS
from offplan.runtime.faults import find_cause, memory_limits
from offplan.runtime.loading.capability import PassesExecutor
from offplan.runtime.loading.loaded import LoadedModel
from offplan.runtime.loading.prepared import prepare
from offplan.runtime.loading.skeleton import decoder_layers
from offplan.runtime.memory.gpu_memory import PeakMemory
from offplan.runtime.model.caches import ALL
from offplan.runtime.model.layers import require_triton
from offplan.runtime.passes.link import CpuLink, CudaLink, Link
from offplan.runtime.passes.routing import RoutingRecorder
from offplan.runtime.passes.runner import ModelRunner
from offplan.runtime.prediction.loading import load_predictor, prepare_prediction
from offplan.runtime.prediction.predictor import Predictor
from offplan.runtime.refusal import refuse, refuse_long_texts

NUM_WARMUP_STEPS = 2
"""Decode steps after a prompt that are not like those to come. The first one finds the ring as
prefill left it, and runs uncaptured after a change of batch. In the second the step is captured."""


class Session:
    """A loaded model that runs by a plan. Use as a context manager.

    On CUDA everything runs on a stream of its own. The decode step is captured as CUDA graphs, and
    so are prompts of short chunks, the second time that their length comes in a row.
    """

    @memory_limits("loading the weights")
    def __init__(
        self,
        model: Model,
        offload: Offload,
        *,
        context: int,
        device: str | torch.device,
        folder: Path | None = None,
        capture: bool = True,
        record_routing: bool = False,
        way: Way = OWN,
        share_layers: bool = False,
        host_threads: int | None = None,
        on_progress: Progress | None = None,
        wrap_link: Callable[[Link], Link] = lambda link: link,
    ) -> None:
        """Load ``model`` as a plan's ``offload`` says; sequences may reach ``context`` tokens.

        ``folder`` holds the model's files, None for random weights. ``capture`` (CUDA only)
        captures what is captured. ``record_routing`` notes which experts steps choose, under
        ``routing``. ``way`` are the passes that run the model: nothing of others than offplan's own
        is captured. With ``share_layers`` equal layers read the same random weights, to time them
        in less memory.
        ``host_threads`` are what the host's cores compute with, of a plan that has them compute;
        most physical cores if left out. ``wrap_link`` puts another link in front of the one that
        moves the bytes.

        Raises what ``prepare`` and LoadedModel raise, whatever was taken until then being given
        back. Raises PlanError for routing that is to be recorded of a plan with drafts. Raises
        CheckpointError for a model that does not run on texts of so many tokens, and OffplanError
        where the GPU's compiler is missing.
        """
        self.device = torch.device(device)
        prepared = prepare(
            *(model, offload, self.device, EXECUTORS),
            way=way,
            share_layers=share_layers,
            host_threads=host_threads,
        )
        predicting = prepare_prediction(model, prepared)
        if way.is_own:
            refuse_long_texts(model, context)
        if record_routing:
            require_routing(model, way=way)
            if offload.draft is not None:
                raise PlanError(
                    f"the plan has `draft: {offload.draft.kind}`, whose passes send several tokens "
                    "to experts at once, and routing is recorded token by token: record it by a "
                    "plan without `draft`"
                )
        capture = capture and self.device.type == "cuda" and way.is_own
        if capture:
            require_triton()  # before minutes of loading
        self.context, self.draft = context, offload.draft
        self.memory = PeakMemory(self.device)
        self._closed = False
        with on_device(self.device):
            self.predictor: Predictor | None = None
            self.loaded = LoadedModel(prepared, folder, on_progress)
            try:
                # loading ran on the default stream
                self._stream = open_stream(self.device)
                store = self.loaded.store
                link_type = CudaLink if self.device.type == "cuda" else CpuLink
                self.routing = self._watch_routing() if record_routing else None
                self.link = wrap_link(link_type(store.slots, store.slabs))
                if predicting is not None:
                    self.predictor = load_predictor(
                        *(predicting, self.loaded.module, self.memory),
                        folder=folder,
                        context=context,
                        capture=capture,
                        on_progress=on_progress,
                    )
                self.runner = self._make_runner(prepared.passes, offload, capture)
            except BaseException:
                let_go(self.device)
                if self.predictor is not None:
                    self.predictor.close()
                self.loaded.close()
                raise

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Give back graphs, caches and weights, on device and host; the device is idle afterwards.

        A closed session runs no more; closing it again does nothing. Raises OffplanError if a
        thread of the host's cores hangs: the weights that it may read then stay in host memory.
        """
        let_go(self.device)
        self.runner.close()
        if self.predictor is not None:
            self.predictor.close()
        self._closed = True
        with on_device(self.device):
            try:
                self.loaded.close()
            finally:
                # a device that failed says so again; the error already on its way is to be shown
                with suppress(RuntimeError):
                    torch.cuda.empty_cache()

    @property
    def gpu_bytes(self) -> int:
        """Most device memory taken since the session began, the context included; 0 on the CPU."""
        return self.memory.taken

    @property
    def link_bytes(self) -> int:
        """Bytes that crossed the link so far: copies, what was fetched, rows of embeddings.

        What kernels read in place besides is not in it: nobody counts that.
        """
        served, tables = self.loaded.store.bytes_served, self.loaded.placement.host_tables
        embedded = self.runner.tokens_embedded
        if self.predictor is not None:
            embedded += self.predictor.tokens_embedded
        of_rows = embedded * sum(table.token_bytes for table in tables)
        return self.link.bytes_moved + served + of_rows

    def count(self, num_steps: int, before: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return what executors counted in a decode step, as the mean of ``num_steps``.

        By capability; without those that count nothing. Counted since ``warm_up``, less the sums
        ``before``; with one step the sums themselves. Waits for the device.
        """
        means = {}
        with self.stream():
            for name, executor in self.loaded.executors.items():
                if num_steps and (counted := executor.count()) is not None:
                    sums = astuple(counted)
                    less = astuple(before[name]) if before else (0,) * len(sums)
                    each = (a - b for a, b in zip(sums, less, strict=True))
                    means[name] = type(counted)(*(number / num_steps for number in each))
        return means

    def describe(self) -> list[str]:
        """Return what executors settled when the session opened, a sentence each.

        A pass has run: they settle some of it for its batch.
        """
        return [each for of in self.loaded.executors.values() for each in of.describe()]

    @property
    def changes_with_length(self) -> bool:
        """True if a text's first tokens are read otherwise where more of them follow at once."""
        return self.runner.changes_with_length

    def warm_up(self, batch: int, prompt_tokens: int) -> None:
        """Compile, capture and let libraries allocate, so that the first request need not.

        Leaves no sequence begun. A prompt shorter than the plan's chunk compiles nothing: it runs
        eagerly.
        """
        vocabulary = self.loaded.module.config.get_text_config().vocab_size
        # tokens that differ, or they would all be sent to the same experts
        tokens = torch.arange(batch * prompt_tokens).view(batch, prompt_tokens) % vocabulary
        # the second prompt is captured; a CPU takes a few to find its kernels and memory
        again = self.device.type == "cpu" or self.runner.captures_prompt(batch, prompt_tokens)
        for _ in range(2 if again else 1):
            logits = self.prefill(tokens)
            for _ in range(min(NUM_WARMUP_STEPS, self.context - prompt_tokens)):
                with self.stream():
                    logits = self.decode(logits.argmax(-1, keepdim=True))
        if self.predictor is not None:
            with self.stream(), torch.inference_mode():
                self.predictor.warm_up(prompt_tokens, NUM_WARMUP_STEPS)
        self.end_warm_up()

    def end_warm_up(self) -> None:
        """Forget what passes have left that only warmed up, and wait for them."""
        self.runner.length = 0
        with self.stream():
            for each in self.loaded.executors.values():
                each.forget()
        if self.routing is not None:
            self.routing.forget()
        if self._stream is not None:
            self._stream.synchronize()  # or the first request would wait for these steps

    def stream(self) -> Any:
        """Context in which work is ordered with the session's own."""
        return torch.cuda.stream(self._stream)

    @memory_limits("reading the prompt")
    def prefill(self, prompt: torch.Tensor) -> torch.Tensor:
        """Begin new sequences with a prompt, int64 of shape [batch, tokens].

        Returns the logits that follow it, [batch, vocabulary], on the device and ordered on the
        session's stream, overwritten by the next call: read them inside ``stream()``. Waits for the
        prompt's own transfer, for experts that steps before have brought for later, and for the
        device when the batch is another than before, when the prompt is captured, which ``warm_up``
        does beforehand, or takes a captured one's memory.
        Raises InputError for an empty prompt or one beyond the context, MemoryLimitError.
        """
        self.check_open()
        with self.stream(), torch.inference_mode():
            if self.routing is not None:
                self.routing.begin(len(prompt))
            return self.runner.prefill(prompt)

    def prefill_all(
        self, prompt: torch.Tensor, num_last: int | None = None
    ) -> Iterator[torch.Tensor]:
        """Do what ``prefill`` does, and make the logits of all tokens of the prompt.

        ``num_last`` are the tokens of each sequence, from its last one back, whose logits are
        wanted; all by default. What fills up shorter sequences behind their ends changes no logits
        before it. The head takes as many of them at a time as the plan has memory for:
        yields [batch, some, vocabulary] on the device, in order, made on the session's stream, each
        to be read inside ``stream()``. The prompt is read when the first is taken, and no other
        pass may run before the last is. Raises what ``prefill`` raises.
        """
        self.check_open()
        wanted = prompt.shape[1] if num_last is None else num_last
        with memory_limits("reading the prompt"), self.stream(), torch.inference_mode():
            if self.routing is not None:
                self.routing.begin(len(prompt))
            parts = self.runner.prefill_all(prompt, wanted)
        while True:
            # never across a yield: the caller has a stream of its own
            with memory_limits("making logits"), self.stream(), torch.inference_mode():
                part = next(parts, None)
            if part is None:
                return
            yield part

    @memory_limits("making a token")
    def decode(self, tokens: torch.Tensor) -> torch.Tensor:
        """Extend each sequence by one token, int64 of shape [batch, 1] on the device.

        Returns the next logits, [batch, vocabulary], overwritten by the next call; make
        ``tokens`` and read the logits inside ``stream()``. Synchronises nothing on CUDA, once
        captured, but where Phi-3 or Phi-3.5-MoE reads a text again, as a prompt, because it has
        outgrown ``original_max_position_embeddings``. Raises InputError beyond the context or for
        tokens of another batch, MemoryLimitError.
        """
        self.check_open()
        with self.stream(), torch.inference_mode():
            logits = self.runner.decode(tokens)
            if self.routing is not None:
                self.routing.note_step()
            return logits

    def check(self) -> None:
        """Raise OffplanError where the passes whose logits are there may be wrong.

        The host's cores may have failed, or copies of experts brought for later; on the device
        nothing shows it.
        """
        self.loaded.store.check()

    def find_nan(self, tokens: torch.Tensor, rows: slice = ALL) -> str:
        """Say which layer gives the first NaN, by reading texts once more.

        ``tokens``, int64 of [batch, tokens], are all that passes have read of the texts in ``rows``
        of the cache. Waits for the device after each layer. No sequence is begun afterwards. Memory
        that runs out is told in what is returned.
        """
        self.check_open()
        try:
            with self.stream(), torch.inference_mode():
                return self.runner.find_nan(tokens, rows)
        except (torch.OutOfMemoryError, MemoryError):
            return "memory ran out when offplan read the text once more to find the layer"

    def _make_runner(self, passes: PassesExecutor | None, offload: Offload, capture: bool) -> Any:
        given, context = (self.loaded, self.link, self.memory), self.context
        chunk, drafted = offload.prefill_chunk, most_drafted(offload.draft)
        if passes is None:
            return ModelRunner(
                *given,
                context=context,
                chunk=chunk,
                capture=capture,
                drafted=drafted,
                predictor=self.predictor,
            )
        with self.stream():
            try:
                return passes.make_runner(*given, context=context, chunk=chunk)
            except OffplanError:
                raise
            except Exception as error:  # whatever a class does with its first text
                if find_cause(error) is not None:  # the device has no memory left
                    raise
                why = f"{self.loaded.stage.way.whose} passes fail ({describe(error, 200)})"
                raise refuse(f"{self.loaded.model.source}: {why}") from error

    def _watch_routing(self) -> RoutingRecorder:
        model = self.loaded.model
        assert model.experts is not None, "require_routing refuses others"
        layers = decoder_layers(self.loaded.module)
        return RoutingRecorder(layers, model.experts.num_experts_per_token, self.device)

    def check_open(self) -> None:
        """Raise ValueError for a session that is closed."""
        if self._closed:
            raise ValueError("the session is closed and its weights are gone: open another one")

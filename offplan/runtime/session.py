"""A plan brought to life: prefill, decode, and nothing that synchronises with the host."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from offplan.checkpoint.model import Model
from offplan.errors import InputError
from offplan.placement import Phase
from offplan.plan import Offload
from offplan.progress import Progress
from offplan.runtime.device import let_go, on_device
from offplan.runtime.faults import memory_limits
from offplan.runtime.loading.loaded import LoadedModel
from offplan.runtime.loading.skeleton import decoder_layers
from offplan.runtime.memory.gpu_memory import bytes_in_use
from offplan.runtime.model.caches import LayerCaches, Position
from offplan.runtime.model.filled import Filled, filled_before, filled_mask
from offplan.runtime.model.kernels import ExpertKernels, find_filled
from offplan.runtime.model.latent import keep_latents
from offplan.runtime.model.layers import DecoderLayers, require_triton
from offplan.runtime.passes.captured import Passes
from offplan.runtime.passes.chunks import ChunkedPrompt, as_compiled_for
from offplan.runtime.passes.executor import Executor
from offplan.runtime.passes.link import CpuLink, CudaLink, Link
from offplan.runtime.transformers_private import choose_attention
from offplan.schedule import Ring, Schedule, build_pass, empty_ring

NUM_WARMUP_STEPS = 2
"""Decode steps after a prompt that are not like those to come: the first one finds the ring as
prefill left it, and runs uncaptured after a change of batch; in the second the step is captured."""
MAX_CAPTURED_TOKENS = 4096
"""Of a chunk, over all sequences, up to which prompts are captured: a longer one keeps the GPU busy
for longer than the host takes to launch it.

Source: DeepSeek-V2-Lite on an H200, whose prompts of 512 and 2,048 tokens took 28 ms to launch and
16 and 28 to compute.
"""
MAX_CAPTURED_CHUNKS = 16
"""Of a prompt: graphs grow with their number.

Source: estimated.
"""


class Session:
    """A loaded model that runs by a plan. Use as a context manager.

    On CUDA everything runs on a stream of its own; the decode step is captured as CUDA graphs, and
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
        late_copies: bool = False,
        capture: bool = True,
        on_progress: Progress | None = None,
        wrap_link: Callable[[Link], Link] | None = None,
    ) -> None:
        """Load ``model`` as a plan's ``offload`` says; sequences may reach ``context`` tokens.

        ``folder`` holds the model's files, None for random weights. ``late_copies`` (CPU only)
        makes every copy at the latest legal moment. ``capture`` (CUDA only) captures what is
        captured. ``wrap_link`` puts another link in front of the one that moves the bytes.

        Raises what LoadedModel raises, whatever was taken until then being given back, and
        OffplanError where the GPU's compiler is missing.
        """
        self.device = torch.device(device)
        if capture and self.device.type == "cuda":
            require_triton()  # before minutes of loading
        self.context = context
        self._chunk = offload.prefill_chunk
        self._used_before = self._peak_in_use = bytes_in_use(self.device)
        with on_device(self.device):
            self.loaded = LoadedModel(model, offload, self.device, folder, on_progress)
            try:
                self._install(late_copies, capture, wrap_link or (lambda link: link))
            except BaseException:
                let_go(self.device)
                self.loaded.close()
                raise

    def _install(self, late_copies: bool, capture: bool, wrap_link: Callable[[Link], Link]) -> None:
        """Make streams, link, hooks and state around the loaded model."""
        store = self.loaded.store
        self.link: Link
        self._stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)
            # loading ran on the default stream
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            self.link = CudaLink(store.slots, store.slabs, self.device)
        else:
            self.link = CpuLink(store.slots, store.slabs, late=late_copies)
        self.link = wrap_link(self.link)
        layers = decoder_layers(self.loaded.module)
        self._capture = capture and self._stream is not None
        self.position = Position(self.device)
        self._expansions = keep_latents(self.loaded.module)
        self.layers = DecoderLayers(layers, compiled=self._capture)
        self._executor = Executor(layers, self.link)
        self._filled = (
            find_filled(self.loaded.model, self.loaded.module, self.context)
            if self._capture
            else filled_mask
        )
        self._experts: ExpertKernels | None = None
        if self.loaded.model.experts is not None:
            self._experts = ExpertKernels(
                self.loaded.model, self.loaded.module, self.device, with_own=self._capture
            )
        self._passes = Passes(self._executor, self._give_back)
        self._ring: Ring = empty_ring(self.loaded.placement)
        # schedules soon repeat, and of 64 layers one takes 0.6 ms to make
        self._build_pass = cache(partial(build_pass, self.loaded.placement, len(self.layers)))
        self._phase: Phase | None = None
        self._batch = 0
        self._length = 0
        self._closed = False
        self._rows_read = 0
        """Of the input embedding."""

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give back graphs, caches and weights, on device and host; the device is idle afterwards.

        A closed session runs no more; closing it again does nothing.
        """
        let_go(self.device)
        self._executor.close()
        self._forget_cache()
        self._length = 0
        self._closed = True
        with on_device(self.device):
            self.loaded.close()
            if self._stream is not None:
                # a device that failed says so again; the error already on its way is to be shown
                with suppress(RuntimeError):
                    torch.cuda.empty_cache()

    @property
    def gpu_bytes(self) -> int:
        """Most device memory taken since the session began, the context included; 0 on the CPU."""
        return self.peak_in_use - self._used_before

    @property
    def peak_in_use(self) -> int:
        """Most bytes in use on the card since the session began, by whomever; 0 on the CPU.

        Of an open session: the allocator gives nothing back but where the session asks it to, or
        where there is no memory left.
        """
        return max(self._peak_in_use, bytes_in_use(self.device))

    @property
    def link_bytes(self) -> int:
        """Bytes that crossed the link so far: the copies, and rows of an embedding on the host.

        What kernels read in place besides is not in it: nobody counts that.
        """
        table = self.loaded.placement.host_embedding
        row_bytes = 0 if table is None else table.nbytes // table.shape[0]
        return self.link.bytes_moved + self._rows_read * row_bytes

    def warm_up(self, batch: int, prompt_tokens: int) -> None:
        """Compile, capture and let libraries allocate, so that the first request need not.

        Leaves no sequence begun. A prompt shorter than the plan's chunk compiles nothing: it runs
        eagerly.
        """
        tokens = torch.zeros(batch, prompt_tokens, dtype=torch.int64)
        for _ in range(2 if self.captures_prompt(batch, prompt_tokens) else 1):
            logits = self.prefill(tokens)
            for _ in range(min(NUM_WARMUP_STEPS, self.context - prompt_tokens)):
                with self.stream():
                    logits = self.decode(logits.argmax(-1, keepdim=True))
        self._length = 0
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
        prompt's own transfer, and for the device when the batch is another than before, when the
        prompt is captured, which ``warm_up`` does beforehand, or takes a captured one's memory.
        """
        self._check_open()
        batch, num_tokens = prompt.shape
        if not batch or not 0 < num_tokens <= self.context:
            raise InputError(
                f"the prompt has {num_tokens} tokens in each of {batch} sequences; the plan's "
                f"context is {self.context}"
            )
        with self._whole_or_afresh(), self.stream(), torch.inference_mode():
            self._begin_sequences(batch)
            self.layers.forget_from(num_tokens)
            self._rows_read += prompt.numel()
            if num_tokens > self._chunk:  # each sequence's last one is read again, for the head
                self._rows_read += batch
            self._enter(Phase.PREFILL, batch * min(num_tokens, self._chunk))
            schedule = self._next_pass(Phase.PREFILL, Phase.DECODE)
            logits = self._passes.run(
                schedule,
                self._forward_prompt,
                prompt.to(self.device),
                may_capture=self.captures_prompt(batch, num_tokens),
            )
            self.position.tensor.fill_(num_tokens)
        self._length = num_tokens
        return logits

    def captures_prompt(self, batch: int, num_tokens: int) -> bool:
        """Whether a prompt of this shape is captured when it comes twice in a row."""
        return (
            self._capture
            and self._chunk <= num_tokens <= MAX_CAPTURED_CHUNKS * self._chunk
            and batch * self._chunk <= MAX_CAPTURED_TOKENS
            and (self._experts is None or self._experts.can_capture(batch * self._chunk))
        )

    def _forward_prompt(self, tokens: torch.Tensor) -> torch.Tensor:
        chunks = tokens.split(self._chunk, dim=1)
        if len(chunks) == 1:
            with as_compiled_for(tokens.shape[1], self._chunk):
                return self.forward_chunk(tokens, 0, tokens.shape[1])
        with self._executor.paused():
            prompt = self.in_chunks(chunks)
        for index in range(len(self.layers)):
            self._executor.before(index)
            prompt.run_layer(index)
            self._executor.after(index)
        logits = prompt.finish()
        assert isinstance(logits, torch.Tensor)
        return logits

    def in_chunks(self, chunks: Sequence[torch.Tensor]) -> ChunkedPrompt:
        """Return a prompt's chunks, on the device, ready to be taken through the layers."""
        return ChunkedPrompt(chunks, self.forward_chunk, self.layers, self.position)

    def _forget_cache(self) -> None:
        self._forget_passes()  # graphs write to it
        self.layers.cache = None

    def _forget_passes(self) -> None:
        """Forget what is captured, and what a pass that did not end has left behind."""
        self._passes.forget()
        self._forget_rows()
        for expansion in self._expansions:
            expansion.forget()

    def _forget_rows(self) -> None:
        self.position.rows = self.position.tensor  # a captured prompt's lie in its memory

    def _give_back(self, drop: Callable[[], object]) -> None:
        """Give the device what ``drop`` lets go of, once it is done with it, and what is cached."""
        if self._stream is None:
            drop()
            return
        self._peak_in_use = self.peak_in_use  # of all that came before
        torch.cuda.synchronize(self.device)
        drop()
        self._forget_rows()
        torch.cuda.empty_cache()

    @memory_limits("making a token")
    def decode(self, tokens: torch.Tensor) -> torch.Tensor:
        """Extend each sequence by one token, int64 of shape [batch, 1] on the device.

        Returns the next logits, [batch, vocabulary], overwritten by the next call; make
        ``tokens`` and read the logits inside ``stream()``. Synchronises nothing on CUDA, once
        captured.
        """
        self._check_open()
        if not self._length:
            raise ValueError("decode before prefill")
        if self._length >= self.context:
            raise InputError(f"the sequences have reached the context of {self.context} tokens")
        if tokens.shape != (self._batch, 1):
            raise InputError(
                f"decode wants tokens of shape {(self._batch, 1)}, found {tuple(tokens.shape)}"
            )
        with self._whole_or_afresh(), self.stream(), torch.inference_mode():
            self._length += 1
            self._rows_read += self._batch
            self._enter(Phase.DECODE, self._batch)
            schedule = self._next_pass(Phase.DECODE, Phase.DECODE)
            steady = schedule.before == schedule.after
            logits = self._passes.run(
                schedule, self.forward_one, tokens, may_capture=self._capture and steady
            )
            self.position.tensor.add_(1)
            return logits

    def forward_one(self, tokens: torch.Tensor) -> torch.Tensor:
        """Run one decode pass at the position on the device; ``tokens`` is [batch, 1]."""
        # said by each pass for itself: between them profiling notes calls of the other phase
        self.position.rows = position = self.position.tensor
        filled = self._filled(position, self.context)
        return self._call(tokens, position.expand(tokens.shape[0], 1), filled)

    def forward_chunk(self, tokens: torch.Tensor, start: int, num_tokens: int) -> torch.Tensor:
        """Run one chunk, [batch, new], of a prompt of ``num_tokens`` from position ``start`` on."""
        rows = torch.arange(start, start + tokens.shape[1], device=self.device)
        self.position.rows = rows
        filled = filled_before(start, num_tokens)
        return self._call(tokens, rows.expand(tokens.shape[0], -1), filled)

    def _call(self, tokens: torch.Tensor, positions: torch.Tensor, filled: Filled) -> torch.Tensor:
        choose_attention(self.loaded.module, filled.way.value)
        output = self.loaded.module(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=filled.mask,
            past_key_values=self.layers.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits = output.logits[:, -1]
        assert isinstance(logits, torch.Tensor)
        return logits

    @contextmanager
    def _whole_or_afresh(self) -> Iterator[None]:
        """After a pass that did not end, believe nothing: the ring, the phase, the sequences.

        The next pass then copies again what it needs, behind whatever is still queued.
        """
        try:
            yield
        except BaseException:
            self._ring = empty_ring(self.loaded.placement)
            self._forget_passes()
            self._phase, self._length = None, 0
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the session is closed and its weights are gone: open another one")

    def _begin_sequences(self, batch: int) -> None:
        if batch == self._batch:
            return
        self._batch = 0  # until all of the cache is there
        if self.layers.cache is not None:
            # blocks of the old cache do not fit the new one and would be kept beside it
            self._give_back(self._forget_cache)
        self.layers.cache = LayerCaches(len(self.layers), self.context, self.position)
        with self.stream(), torch.inference_mode(), torch.compiler.set_stance("force_eager"):
            # One pass, of whatever the slots hold, has every layer allocate its cache: layers
            # compiled before theirs exists would be compiled again once it does.
            self.forward_chunk(torch.zeros(batch, 1, dtype=torch.int64, device=self.device), 0, 1)
        self._batch = batch

    def _next_pass(self, phase: Phase, upcoming: Phase) -> Schedule:
        schedule = self._build_pass(phase, self._ring, upcoming)
        self._ring = schedule.after
        return schedule

    def _enter(self, phase: Phase, num_tokens: int) -> None:
        if self._phase is not phase:
            self.loaded.enter_phase(phase)
            self._phase = phase
        if self._experts is not None:
            self._experts.choose(phase, num_tokens)

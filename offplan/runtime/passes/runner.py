"""The passes of requests: a prompt, then one step after another."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial

import torch

from offplan.errors import InputError
from offplan.placement import Phase
from offplan.runtime.loading.loaded import LoadedModel
from offplan.runtime.loading.skeleton import decoder_layers
from offplan.runtime.memory.gpu_memory import PeakMemory
from offplan.runtime.model.caches import LayerCaches, Position
from offplan.runtime.model.filled import filled_mask
from offplan.runtime.model.frequencies import Frequencies
from offplan.runtime.model.kernels import ExpertKernels, find_filled
from offplan.runtime.model.latent import keep_latents
from offplan.runtime.model.layers import DecoderLayers
from offplan.runtime.model.linear import find_linear
from offplan.runtime.passes.captured import MakeLogits, Passes
from offplan.runtime.passes.chunks import ChunkedPrompt, as_compiled_for
from offplan.runtime.passes.executor import Executor
from offplan.runtime.passes.forward import Forward
from offplan.runtime.passes.link import Link
from offplan.runtime.passes.nan import NanFoundError, NanWatch
from offplan.schedule import Schedule, build_pass, empty_ring

MAX_CAPTURED_TOKENS = 4096
"""Tokens of a chunk, over all sequences, up to which prompts are captured: a longer one keeps the
GPU busy for longer than the host takes to launch it.

Source: DeepSeek-V2-Lite on an H200, whose prompts of 512 and 2,048 tokens took 28 ms to launch and
16 and 28 to compute.
"""
MAX_CAPTURED_CHUNKS = 16
"""Chunks of a prompt up to which it is captured: graphs grow with their number.

Source: estimated.
"""


class ModelRunner:
    """Runs a loaded model on the current stream, in inference mode; its caller sees to both."""

    def __init__(
        self,
        loaded: LoadedModel,
        link: Link,
        memory: PeakMemory,
        *,
        context: int,
        chunk: int,
        capture: bool,
    ) -> None:
        """Take the model over: its layers, compiled, and caches of ``context`` tokens.

        Prompts are read in chunks of ``chunk`` tokens. ``capture`` (CUDA only) captures what is
        captured; what that takes is given back through ``memory``.
        """
        model, module, device = loaded.model, loaded.module, loaded.store.device
        self._loaded, self._memory, self._context = loaded, memory, context
        self._chunk, self._capture = chunk, capture
        self._batch = 0
        """Number of sequences that the cache is allocated for; 0 while it is not."""
        self.length = 0
        """Tokens of each sequence; 0 where none is begun."""
        self._position = Position(device)
        self._rows_read = 0
        """Rows of the input embedding that passes have read."""
        self._frequencies = Frequencies(module)
        self._text: torch.Tensor | None = None
        """The tokens of each sequence where they are to be read again, int64 on the device."""
        self._expansions = keep_latents(module)
        layers = decoder_layers(module)
        self._linear = [index for index, part in enumerate(find_linear(layers)) if part]
        """Indices of the layers that have linear attention."""
        self.layers = DecoderLayers(layers, compiled=capture)
        self._cached = loaded.cached
        self._executor = Executor(self.layers, link, loaded.store.serve, self._cached.settle)
        find = find_filled(model, module, context) if capture else filled_mask
        self.forward = Forward(
            module, self.layers, self._position, context, find, bool(self._linear)
        )
        self._experts = ExpertKernels(model, module, device, with_own=capture)
        self._passes = Passes(self._executor, self._give_back)
        self._ring = empty_ring(loaded.placement)
        # schedules soon repeat, and of 64 layers one takes 0.6 ms to make
        self._build = cache(partial(build_pass, loaded.placement, len(self.layers)))

    def prefill(self, prompt: torch.Tensor) -> torch.Tensor:
        """Begin new sequences with a prompt, int64 of shape [batch, tokens].

        Returns logits, [batch, vocabulary], which the next pass overwrites. Raises
        InputError for a prompt that is empty or beyond the context.
        """
        batch, num_tokens = prompt.shape
        if not batch or not 0 < num_tokens <= self._context:
            raise InputError(
                f"the prompt has {num_tokens} tokens in each of {batch} sequences; the plan's "
                f"context is {self._context}"
            )
        with self._whole_or_afresh():
            prompt = prompt.to(self._loaded.store.device)
            self._cached.require_few_pairs(batch)
            self._allocate_cache(batch)
            self._cached.begin(batch)
            self.layers.forget_from(num_tokens)
            self._frequencies.set_length(num_tokens)
            self._rows_read += prompt.numel()
            if num_tokens > self._chunk:  # each sequence's last one is read again, for the head
                self._rows_read += batch
            logits = self._passes.run(
                self._next_schedule(Phase.PREFILL),
                self._in_phase(
                    Phase.PREFILL, batch * min(num_tokens, self._chunk), self._forward_prompt
                ),
                prompt,
                may_capture=self.captures_prompt(batch, num_tokens),
            )
            self.set_length(num_tokens)
            if num_tokens < self._frequencies.renewal:
                self._text = prompt.new_empty(batch, self._frequencies.renewal)
                self._text[:, :num_tokens] = prompt
        return logits

    def decode(self, tokens: torch.Tensor) -> torch.Tensor:
        """Extend each sequence by one token, int64 of shape [batch, 1] on the device.

        Returns logits, [batch, vocabulary], which the next pass overwrites. Raises
        InputError for tokens that are not one for each sequence, or beyond the context, ValueError
        where no sequence is begun.
        """
        if not self.length:
            raise ValueError("decode before prefill")
        if self.length >= self._context:
            raise InputError(f"the sequences have reached the context of {self._context} tokens")
        if tokens.shape != (self._batch, 1):
            raise InputError(
                f"decode wants tokens of shape {(self._batch, 1)}, found {tuple(tokens.shape)}"
            )
        if self._text is not None:
            self._text[:, self.length] = tokens[:, 0]
            if self.length + 1 == self._frequencies.renewal:
                return self.prefill(self._text)
        with self._whole_or_afresh():
            self._frequencies.set_length(self.length + 1)
            self._rows_read += self._batch
            schedule = self._next_schedule(Phase.DECODE)
            steady = schedule.before == schedule.after
            logits = self._passes.run(
                schedule,
                self._in_phase(Phase.DECODE, self._batch, self.forward.step),
                tokens,
                may_capture=self._capture and steady,
            )
            self._position.tensor.add_(1)
            self.length += 1
        return logits

    def find_nan(self, prompt: torch.Tensor, fed: torch.Tensor) -> str:
        """Run the last pass of a text once more, and say what in it gives the first NaN.

        ``prompt``, int64 of [batch, tokens], is the one that was read last, and ``fed``, int64 of
        [steps, batch], the tokens of the steps behind it; the last of these is the pass in
        question. Caches are cut where that pass found them. States of linear attention are not
        kept, and rotary embeddings may have changed: such texts are read from their prompt on.

        Nothing is captured, and the host waits for every layer. No sequence is begun afterwards.
        """
        watch = NanWatch()
        captures, self._capture = self._capture, False
        try:
            self._give_back(self._forget_passes)  # uncaptured, a pass takes as much memory again
            passes = [partial(self.prefill, prompt)]
            passes += [partial(self.decode, tokens[:, None]) for tokens in fed.to(prompt.device)]
            if len(fed) and not self._linear and not self.changes_with_length:
                before = prompt.shape[1] + len(fed) - 1
                self.layers.forget_from(before)
                self.set_length(before)
            else:
                for run in passes[:-1]:
                    run()
            with self.layers.seen_by(watch.see):
                return watch.describe_rest(passes[-1]())
        except NanFoundError as found:
            return str(found)
        finally:
            self._capture = captures
            self.length = 0

    def set_length(self, num_tokens: int) -> None:
        """Say that the cache holds so many tokens; queued on the current stream."""
        self._position.tensor.fill_(num_tokens)
        self.length = num_tokens
        self._text = None

    @property
    def embedding_bytes(self) -> int:
        """Bytes that passes have read of an input embedding on the host; 0 without one."""
        table = self._loaded.placement.host_embedding
        return 0 if table is None else self._rows_read * (table.nbytes // table.shape[0])

    @property
    def changes_with_length(self) -> bool:
        """Whether the rotary embeddings change with the length of the text."""
        return self._frequencies.change

    def captures_prompt(self, batch: int, num_tokens: int) -> bool:
        """Whether a prompt of this shape is captured when it comes twice in a row."""
        most = MAX_CAPTURED_CHUNKS
        if self._linear:  # launches something for every few tokens, however long the chunk
            most = min(most, MAX_CAPTURED_TOKENS // self._chunk)
        return (
            self._capture
            and self._chunk <= num_tokens <= most * self._chunk
            and batch * self._chunk <= MAX_CAPTURED_TOKENS
            and self._experts.can_capture(batch * self._chunk)
        )

    def prompt_layers(self, prompt: torch.Tensor) -> list[Callable[[], object]]:
        """Return what each layer does for a prompt on the device, to be done again and again.

        A call takes all chunks through its layer and leaves them as they were. No weights are
        moved: all have to be resident.
        """
        chunks = ChunkedPrompt(prompt.split(self._chunk, dim=1), self.forward)
        return [partial(chunks.try_layer, index) for index in range(len(self.layers))]

    def close(self) -> None:
        """Give back graphs and caches; the device must be idle."""
        self._forget_cache()
        self.length = 0

    @contextmanager
    def _whole_or_afresh(self) -> Iterator[None]:
        """After a pass that did not end, believe nothing: the ring, the graphs, the sequences.

        The next pass then copies again what it needs, behind whatever is still queued.
        """
        try:
            yield
        except BaseException:
            self._ring = empty_ring(self._loaded.placement)
            self._forget_passes()
            self._cached.abort()
            self.length = 0
            raise

    def _next_schedule(self, phase: Phase) -> Schedule:
        """Return the schedule of a pass that finds the ring as the one before has left it."""
        schedule = self._build(phase, self._ring, Phase.DECODE)
        self._ring = schedule.after
        return schedule

    def _in_phase(self, phase: Phase, num_tokens: int, forward: MakeLogits) -> MakeLogits:
        """Return ``forward`` with the model set up for passes of so many tokens at a time.

        It is set up only where it runs: that takes a millisecond, and what was captured needs none
        of it.
        """

        def run(tokens: torch.Tensor) -> torch.Tensor:
            self._loaded.enter_phase(phase)
            self._experts.choose(phase, num_tokens)
            return forward(tokens)

        return run

    def _forward_prompt(self, tokens: torch.Tensor) -> torch.Tensor:
        chunks = tokens.split(self._chunk, dim=1)
        if len(chunks) == 1:
            with as_compiled_for(tokens.shape[1], self._chunk):
                return self.forward.chunk(tokens, 0, tokens.shape[1])
        prompt = ChunkedPrompt(chunks, self.forward)
        for index in range(len(self.layers)):
            self._executor.before(index)
            prompt.run_layer(index)
            self._executor.after(index)
        return prompt.finish()

    def _allocate_cache(self, batch: int) -> None:
        if batch == self._batch:
            return
        self._batch = 0  # until all of the cache is there
        if self.layers.cache is not None:
            # blocks of the old cache do not fit the new one and would be kept beside it
            self._give_back(self._forget_cache)
        # others read an earlier layer's, or have linear attention
        num_keeping = sum(layer.kv_cache.bytes_per_token > 0 for layer in self._loaded.model.layers)
        self.layers.cache = LayerCaches(
            len(self.layers), num_keeping, self._context, self._position, self._linear
        )
        self._cached.ignore()
        with torch.compiler.set_stance("force_eager"):
            # One pass, of whatever the slots hold, has every layer allocate its cache: layers
            # compiled before theirs exists would be compiled again once it does.
            device = self._loaded.store.device
            self.forward.chunk(torch.zeros(batch, 1, dtype=torch.int64, device=device), 0, 1)
        self._batch = batch

    def _forget_cache(self) -> None:
        self._forget_passes()  # graphs write to it
        self.layers.cache = None

    def _forget_passes(self) -> None:
        """Forget what is captured, and what a pass that did not end has left behind."""
        self._passes.forget()
        self._position.rows = self._position.tensor
        for expansion in self._expansions:
            expansion.forget()

    def _give_back(self, drop: Callable[[], object]) -> None:
        """Give the device what ``drop`` lets go of, once it is done with it, and what is cached."""
        self._position.rows = self._position.tensor  # a captured prompt's lie in its memory
        self._memory.release(drop)

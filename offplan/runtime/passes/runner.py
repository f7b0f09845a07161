"""The passes of requests: a prompt, then one step after another."""

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, Protocol

import torch

from offplan.kernel_sizes import is_captured
from offplan.placement import Phase
from offplan.runtime.loading.loaded import LoadedModel
from offplan.runtime.loading.skeleton import decoder_layers
from offplan.runtime.memory.gpu_memory import PeakMemory
from offplan.runtime.model.active_rows import ExtendedRows
from offplan.runtime.model.cache_mask import FindFilled, Way, filled_mask
from offplan.runtime.model.caches import ALL, LayerCaches, Position, Swap
from offplan.runtime.model.codes_scratch import Scratch
from offplan.runtime.model.frequencies import Frequencies
from offplan.runtime.model.kernels import ExpertKernels, find_filled
from offplan.runtime.model.latent import keep_latents
from offplan.runtime.model.layers import Call, DecoderLayers
from offplan.runtime.model.rewrites import find_linear, may_be_linear
from offplan.runtime.passes.captured import MakeLogits, Passes
from offplan.runtime.passes.carried import Carried, CarriedState
from offplan.runtime.passes.chunks import ChunkedTexts, Reading, as_planned
from offplan.runtime.passes.executor import Executor
from offplan.runtime.passes.forward import Forward, require_prompt, require_step
from offplan.runtime.passes.link import Link, PassSchedules
from offplan.runtime.passes.nan import NanFoundError, NanWatch


class Predicts(Protocol):
    """Drafts tokens of one text by what is behind the last layer: it is told what passes read."""

    @property
    def tokens_embedded(self) -> int:
        """Rows of the input embedding that its own passes have read."""

    def read(self, chunks: Sequence[torch.Tensor], tokens: torch.Tensor, start: int) -> None:
        """Read a prompt's tokens, [batch, new], with the hidden states of their chunks."""

    def note(self, fed: torch.Tensor, position: int, num_taken: int = 1) -> None:
        """Note a pass that was fed tokens, [batch, new], of which the first are the text's."""

    def propose(self, token: int, length: int, most: int) -> list[int]:
        """Draft up to ``most`` tokens behind ``token``, behind ``length`` that passes read."""

    def warm_up(self, num_tokens: int, times: int) -> None:
        """Run passes of each size so often, behind so many tokens."""

    def close(self) -> None:
        """Give back what it takes."""


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
        drafted: int = 0,
        predictor: Predicts | None = None,
    ) -> None:
        """Take the model over: its layers, compiled, and caches of ``context`` tokens.

        Prompts are read in chunks of ``chunk`` tokens. ``capture`` (CUDA only) captures what is
        captured; what that takes is given back through ``memory``. Passes check up to ``drafted``
        drafts of one sequence, padding included. ``predictor`` is told what they pass.
        """
        model, module, device = loaded.model, loaded.module, loaded.store.device
        self._loaded, self._memory, self._context = loaded, memory, context
        self.chunk, self._capture = chunk, capture
        self._row_cache = loaded.stage.row_cache(context, drafted)
        self.predictor = predictor
        """What drafts by a prediction layer; None if nothing does."""
        self._checked: tuple[torch.Tensor, int] | None = None
        """The tokens of the last pass that checked drafts, and the text's length before them."""
        self._batch = 0
        """Number of sequences that the cache is allocated for; 0 while it is not."""
        self.length = 0
        """Tokens of each sequence; 0 where none is begun, or each has a length of its own."""
        self._position = Position(device)
        self.tokens_embedded = 0
        """Rows of the input embedding that passes have read."""
        self.frequencies = Frequencies(module)
        self._text: torch.Tensor | None = None
        """The tokens of each sequence where they are to be read again, int64 on the device."""
        self._expansions = keep_latents(module)
        self._extended = ExtendedRows(module, device)
        layers = decoder_layers(module)
        self.linear = [index for index, part in enumerate(find_linear(layers)) if part]
        """Indices of the layers that have linear attention, whose states cannot go back."""
        self.layers = DecoderLayers(layers, compiled=capture)
        self._executor = Executor(
            link, loaded.store.serve, [each.settle for each in loaded.executors.values()]
        )
        self._run_layer = {
            index: partial(each.run_layer, self._executor, index)
            for each in loaded.executors.values()
            for index in each.prompt_layers
        }
        """What takes all chunks of a prompt through a layer together, by the layer's index."""
        self.layers.call = self._step
        coded = any(layer.kv_cache.is_coded for layer in loaded.stage.layers)
        find: FindFilled = filled_mask
        if capture:
            find = find_filled(model, module, context, codes=coded)
        self.forward = Forward(
            module, self.layers, self._position, context, find, may_be_linear(layers)
        )
        self._experts = ExpertKernels(model, module, device, with_own=capture)
        self._passes = Passes(self._executor, self._give_back)
        self._schedules = PassSchedules(loaded.placement, len(self.layers))
        carried: list[Carried] = [self._schedules, self._executor, self._passes, self._position]
        carried += [self.layers, self._extended, self.frequencies, self._experts, loaded]
        self._carried = CarriedState(*carried, *self._expansions)

    def prefill(self, prompt: torch.Tensor) -> torch.Tensor:
        """Begin new sequences with a prompt, int64 of shape [batch, tokens].

        Returns logits, [batch, vocabulary], which the next pass overwrites. Raises
        InputError for a prompt that is empty or beyond the context.
        """
        prompt = self._make_room(prompt)
        logits = self.read([Reading(prompt)])
        self._begin(prompt)
        return logits

    def prefill_all(self, prompt: torch.Tensor, num_last: int) -> Iterator[torch.Tensor]:
        """Do what ``prefill`` does; make the logits of the ``num_last`` tokens of each sequence.

        Yields [batch, some, vocabulary], in order: logits of so many tokens as take less memory
        than a chunk of the prompt does. Nothing is captured.
        """
        prompt = self._make_room(prompt)
        parts = self.read_all(Reading(prompt), num_last)
        self._begin(prompt)
        return parts

    def read_all(self, reading: Reading, num_last: int) -> Iterator[torch.Tensor]:
        """Read a text into rows of the cache, and make logits as ``prefill_all`` does."""
        texts: ChunkedTexts = self._read(
            [reading], lambda _: self._run_layers([reading]), may_capture=False
        )
        config = self._loaded.module.config.get_text_config()
        # a chunk has six hidden states of each token at a time, and a head makes two of the logits
        most = min(self.chunk, reading.tokens.shape[1]) * config.hidden_size // config.vocab_size
        return texts.finish_all(num_last, max(1, most))

    def _make_room(self, prompt: torch.Tensor) -> torch.Tensor:
        """Check a prompt and allocate its cache; return it on the device."""
        require_prompt(prompt, self._context)
        self.allocate(len(prompt))
        return prompt.to(self._loaded.store.device)

    def _begin(self, prompt: torch.Tensor) -> None:
        batch, num_tokens = prompt.shape
        text = None
        if num_tokens < self.frequencies.renewal:
            text = prompt.new_empty(batch, self.frequencies.renewal)
            text[:, :num_tokens] = prompt
        self.set_length(num_tokens, text)

    def read(self, readings: Sequence[Reading], *, may_capture: bool = True) -> torch.Tensor:
        """Read parts of texts into rows of the cache in one pass; positions stay as they are.

        All have to be of one ``regime``. Returns the logits that follow each,
        [sequences, vocabulary], which the next pass overwrites. ``may_capture`` allows to capture a
        prompt of all rows. Where the pass fails, the other rows are what they were.
        """
        first, *others = readings
        is_prompt = not others and not first.start and len(first.tokens) == self._batch
        return self._read(
            readings,
            partial(self._forward_texts, readings),
            may_capture=may_capture and is_prompt and self.captures_prompt(*first.tokens.shape),
        )

    def _read(
        self,
        readings: Sequence[Reading],
        forward: Callable[[torch.Tensor], Any],
        *,
        may_capture: bool,
    ) -> Any:
        self.length = 0  # of the sequences that were there
        with self._carried.passing():
            for each in readings:
                self.layers.forget_from(each.stop, each.rows)
                if not each.start:
                    self.layers.forget_states(each.rows)
                elif self._row_cache.shared_rings:  # which go back to it for every reader
                    self.keep(each.rows)
            self.frequencies.set_length(readings[-1].stop)
            shapes = [each.tokens.shape for each in readings]
            self.tokens_embedded += sum(map(prod, shapes))
            if len(readings) > 1 or shapes[0][1] > self.chunk or self.predictor is not None:
                # each sequence's last one is read again, for the head
                self.tokens_embedded += sum(batch for batch, _ in shapes)
            largest = max(batch * min(new, self.chunk) for batch, new in shapes)
            # the schedule counts chunks of all rows
            num_rows = len(readings[0].tokens)
            as_one = max(1, self._batch // num_rows)
            for executor in self._loaded.executors.values():
                executor.begin(num_rows, as_one)
            num_chunks = sum(-(-new // self.chunk) for _, new in shapes)
            return self._passes.run(
                self._schedules.next(Phase.PREFILL, num_chunks=-(-num_chunks // as_one)),
                self._in_phase(Phase.PREFILL, largest, forward),
                readings[0].tokens,
                may_capture=may_capture,
            )

    def decode(self, tokens: torch.Tensor) -> torch.Tensor:
        """Extend each sequence by one token, int64 of shape [batch, 1] on the device.

        Returns logits, [batch, vocabulary], which the next pass overwrites. Raises
        InputError for tokens that are not one for each sequence, or beyond the context, ValueError
        where no sequence is begun.
        """
        require_step(tokens, self.length, self._batch, self._context)
        if self._text is not None:
            self._text[:, self.length] = tokens[:, 0]
            if self.length + 1 == self.frequencies.renewal:
                return self.prefill(self._text)
        length, self.length = self.length, 0  # no sequence is begun unless the pass ends
        logits = self.step(tokens, length + 1, None)
        self.length = length + 1
        return logits

    def step(self, tokens: torch.Tensor, length: int, rows: Sequence[int] | None) -> torch.Tensor:
        """Run one decode pass of the first rows, int64 of [batch, 1] on the device.

        It extends ``rows`` of the cache, all with None. The others stay as they are, and are sent
        to no experts but those that ``rows`` choose. Their texts are of one ``step_regime``, that
        of ``length`` tokens. Returns logits, [batch, vocabulary], which the next pass overwrites.
        """
        with self._carried.passing():
            self._extended.choose(rows)
            self.frequencies.set_length(length)
            if self._position.is_shared:
                self._position.shared.fill_(length - 1)
            self.tokens_embedded += len(tokens)
            logits = self._run_step(tokens)
            # a row that is full is idle in another pass of the same step, too
            self._position.tensor.add_(self._extended.moves).clamp_(max=self._context - 1)
            if self.predictor is not None and rows != ():
                self.predictor.note(tokens, length - 1)
        return logits

    def check(self, tokens: torch.Tensor, length: int, num_real: int) -> torch.Tensor:
        """Run one decode pass of several tokens of the one row, int64 of [1, tokens] on the device.

        The row holds ``length`` tokens, and holds as many afterwards: ``set_lengths`` says how many
        of the new ones are taken. Behind the first ``num_real`` the others pad the pass, and are
        sent to no experts of their own. All are of one ``regime``. Returns logits, [tokens,
        vocabulary], which the next pass overwrites.
        """
        with self._carried.passing():
            self._extended.pad(num_real)
            self.frequencies.set_length(length + num_real)
            self._position.tensor.fill_(length)
            self.tokens_embedded += tokens.shape[1]
            self._checked = tokens, length
            return self._run_step(tokens)

    def take(self, num_taken: int) -> None:
        """Say how many tokens of the last ``check`` are the text's: states go on by these alone."""
        assert self.layers.cache is not None
        self.layers.cache.add_taken(num_taken)
        if self.predictor is not None and self._checked is not None:
            self.predictor.note(*self._checked, num_taken)
        self._checked = None

    def clear_drafts(self, begin: int, stop: int) -> None:
        """Clear positions of the one row that were rejected and have a NaN."""
        assert self.layers.cache is not None
        self.layers.cache.clear_drafts(begin, stop)

    def _run_step(self, tokens: torch.Tensor) -> torch.Tensor:
        schedule = self._schedules.next(Phase.DECODE)
        steady = schedule.before == schedule.after
        for each in self._loaded.executors.values():
            each.begin_step()
        return self._passes.run(
            schedule,
            self._in_phase(Phase.DECODE, tokens.numel(), self.forward.step),
            tokens,
            may_capture=self._capture and steady,
        )

    def step_regime(self, length: int) -> Hashable:
        """Return what texts of one step have to share, by the ``length`` that they grow to."""
        return self.regime(length), length if self._position.is_shared else None

    def find_nan(self, tokens: torch.Tensor, rows: slice) -> str:
        """Read texts, int64 of [batch, tokens], once more into ``rows``; say what gives a NaN.

        Nothing is captured, and the host waits for every layer. No sequence is begun afterwards.
        """
        tokens, watch = tokens.to(self._loaded.store.device), NanWatch()
        captures, self._capture = self._capture, False
        try:
            # uncaptured, a pass takes as much memory again
            self._give_back(self._passes.invalidate)
            with self.layers.seen_by(watch.see):
                return watch.describe_rest(self.read([Reading(tokens, 0, rows)]))
        except NanFoundError as found:
            return str(found)
        finally:
            self._capture = captures
            self.length = 0

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Say how many tokens each row holds: less than the context, for a step to write to."""
        self._position.tensor.copy_(torch.tensor(lengths))
        self.length = 0

    def swap(self, row: int, other: int, num_tokens: int) -> Swap:
        """Exchange the first ``num_tokens`` tokens of two rows; positions stay as they are."""
        assert self.layers.cache is not None
        return self.layers.cache.swap(row, other, num_tokens)

    def begin_at(self, common: int, length: int) -> int:
        """Return how many of ``common`` tokens a pass can go on from, as ``RowCache`` does."""
        return self._row_cache.begin_at(common, length)

    def keep(self, rows: slice) -> None:
        """Make the checkpoint of ``rows``, as they are now."""
        assert self.layers.cache is not None
        self.layers.cache.keep(rows)

    def copy(self, row: int, other: int, num_tokens: int, *, from_checkpoint: bool) -> None:
        """Have a row go on from tokens of another, or of itself; positions stay as they are."""
        assert self.layers.cache is not None
        self.layers.cache.copy(row, other, num_tokens, from_checkpoint=from_checkpoint)

    def count_numbers(self, row: int, num_tokens: int, *, from_checkpoint: bool) -> int:
        """Count the tokens before a row's first NaN, of its first ones; waits for the device."""
        assert self.layers.cache is not None
        return self.layers.cache.count_numbers(row, num_tokens, from_checkpoint=from_checkpoint)

    def set_length(self, num_tokens: int, text: torch.Tensor | None = None) -> None:
        """Say that the cache holds so many tokens; queued on the current stream.

        ``text`` is where the tokens are kept of sequences that are to be read again.
        """
        self._position.tensor.fill_(num_tokens)
        self._text = text
        self.length = num_tokens

    @property
    def changes_with_length(self) -> bool:
        """True if the rotary embeddings change with the length of the text."""
        return self.frequencies.change

    @property
    def keeps_more(self) -> bool:
        """True if more than hidden states of a prompt's tokens waits for layers."""
        waiting = self._row_cache.waiting_token_bytes
        return bool(waiting or self._loaded.stage.architecture.per_layer_width)

    @property
    def goes_back(self) -> bool:
        """True if a text can be left as it is in a step: the states of linear attention go on."""
        return not self.linear

    @property
    def one_row(self) -> str:
        """What allows one row alone to have a text of a length of its own; empty where many may."""
        if self.linear and self.changes_with_length:
            return "linear attention beside rotary embeddings that change with the text's length"
        return ""

    @property
    def renewal(self) -> int:
        """Tokens that a text is read again at as a whole; 0 where none is."""
        return self.frequencies.renewal

    @property
    def cache(self) -> object:
        """The cache at hand, for whoever has texts in it to know it by."""
        return self.layers.cache

    def regime(self, num_tokens: int) -> Hashable:
        """Return what texts that a pass reads have to share, of the length of each."""
        return self.frequencies.regime(num_tokens)

    def captures_prompt(self, batch: int, num_tokens: int) -> bool:
        """Return True if a prompt of this shape is captured when it comes twice in a row."""
        num_chunks = -(-num_tokens // self.chunk)
        return (
            self._capture
            and self.predictor is None  # which reads all hidden states
            and self.chunk <= num_tokens
            and is_captured(num_chunks, batch * self.chunk)
            and self._experts.can_capture(batch * self.chunk)
        )

    def chunk_layers(
        self, tokens: torch.Tensor, start: int, num_tokens: int
    ) -> list[Callable[[], object]]:
        """Return what each layer does for one chunk of a prompt, to be done again and again.

        ``tokens``, [batch, new] on the device, begin at ``start`` of a prompt of ``num_tokens``. A
        call leaves them as they were. No weights are moved: all have to be resident.
        """
        calls = self.layers.note_calls(partial(self.forward.chunk, tokens, start, num_tokens))
        new = self.forward.position.new

        def run(index: int, call: Call) -> None:
            with as_planned(tokens.shape[1], start, self.chunk):
                self.forward.prepare(ALL, new, Way.CHUNK, index)
                self.layers.step(index, call)

        return [partial(run, index, call) for index, call in enumerate(calls)]

    def end_chunks(self) -> None:
        """Give up the keys and values that a layer's chunks have made of latents."""
        for each in self._expansions:
            each.invalidate()

    def fill_cache(self) -> None:
        """Write random numbers over the cache, which is to be of values.

        A GPU multiplies zeros faster, since it draws less power.
        """
        assert self.layers.cache is not None
        for part in self.layers.cache.tensors():
            part.normal_()

    def close(self) -> None:
        """Give back graphs and caches; the device must be idle."""
        self._forget_cache()
        self.length = 0

    def _in_phase(self, phase: Phase, num_tokens: int, forward: MakeLogits) -> MakeLogits:
        """Return ``forward`` with the model set up for passes of so many tokens at a time.

        It is set up only where it runs: that takes a millisecond, and what was captured needs none
        of it.
        """

        def run(tokens: torch.Tensor) -> torch.Tensor:
            self._loaded.enter_phase(phase)
            self._experts.choose(phase, num_tokens)
            if phase is Phase.DECODE:
                self._extended.enter(*tokens.shape)
            else:
                self._extended.enter(0)
            return forward(tokens)

        return run

    def _step(self, index: int, call: Call) -> torch.Tensor:
        self._executor.before(index)
        if self._executor.is_prompt and index in self._run_layer:
            (hidden,) = self._run_layer[index](
                [(partial(self.layers.step, index, call), nullcontext)]
            )
        else:
            hidden = self.layers.step(index, call)
        self._executor.after(index)
        return hidden

    def _forward_texts(self, readings: Sequence[Reading], tokens: torch.Tensor) -> torch.Tensor:
        """Read texts; ``tokens`` stand for the first one's, for a captured pass has its own."""
        first = replace(readings[0], tokens=tokens)
        if len(readings) == 1 and tokens.shape[1] <= self.chunk and self.predictor is None:
            with as_planned(tokens.shape[1], first.start, self.chunk):
                return self.forward.chunk(tokens, first.start, first.stop, first.rows)[:, -1]
        return self._run_layers([first, *readings[1:]]).finish()

    def _run_layers(self, readings: Sequence[Reading]) -> ChunkedTexts:
        """Take texts through all layers."""
        texts = ChunkedTexts(readings, self.forward, self.chunk)
        for index in range(len(self.layers)):
            self._executor.before(index)
            texts.run_layer(index, self._run_layer.get(index))
            self._executor.after(index)
        if self.predictor is not None:
            for reading, hidden in zip(readings, texts.list_hidden(), strict=True):
                self.predictor.read(hidden, reading.tokens, reading.start)
        return texts

    def allocate(self, batch: int) -> None:
        """Have a cache of so many rows; rows of another number are lost."""
        if batch == self._batch:
            return
        for each in self._loaded.executors.values():
            each.begin_batch(batch)
        self.length = 0
        with self._carried.passing():
            self._allocate(batch)

    def _allocate(self, batch: int) -> None:
        self._batch = 0  # until all of the cache is there
        if self.layers.cache is not None:
            # blocks of the old cache do not fit the new one and would be kept beside it
            self._give_back(self._forget_cache)
        self._loaded.make_room(batch * self.chunk)
        scratch, most = None, self._row_cache.most_values(self.chunk)
        if most:
            scratch = Scratch(batch * most, self._loaded.store.device)
        self.layers.cache = LayerCaches(
            self._row_cache, self._position, self.linear, scratch=scratch
        )
        with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
            # that it would hold whole scores uncompiled, which here are those of one token
            warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
            # One pass, of whatever the slots hold, has every layer allocate its cache: layers
            # compiled before theirs exists would be compiled again once it does.
            device = self._loaded.store.device
            self._position.allocate(batch)
            self._extended.allocate(batch, 1 + self._row_cache.drafted)
            self._extended.enter(0)
            self.forward.chunk(torch.zeros(batch, 1, dtype=torch.int64, device=device), 0, 1)
        self._batch = batch

    def _forget_cache(self) -> None:
        self._passes.invalidate()  # graphs write to it
        self._position.invalidate()
        self.layers.cache = None

    def _give_back(self, drop: Callable[[], object]) -> None:
        """Give the device what ``drop`` lets go of, once it is done with it, and what is cached."""
        self._position.invalidate()  # a captured prompt's lie in its memory
        self._memory.release(drop)

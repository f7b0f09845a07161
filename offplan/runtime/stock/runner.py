"""The passes of requests by transformers' own code: offplan moves the weights around its layers."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from offplan.capabilities.stock import STOCK
from offplan.errors import InputError
from offplan.placement import Phase, Placement
from offplan.runtime.forms.experts import STORED_EXPERTS_NAME, holds_codes
from offplan.runtime.loading.capability import PassesExecutor
from offplan.runtime.loading.loaded import LoadedModel
from offplan.runtime.loading.skeleton import decoder_layers
from offplan.runtime.memory.gpu_memory import PeakMemory
from offplan.runtime.model.attention import without_cudnn
from offplan.runtime.model.calls import LayerCalls, WeightWatch
from offplan.runtime.passes.carried import CarriedState
from offplan.runtime.passes.executor import Executor
from offplan.runtime.passes.forward import require_prompt, require_step
from offplan.runtime.passes.link import Link, PassSchedules
from offplan.runtime.passes.nan import NanFoundError, NanWatch
from offplan.runtime.refusal import refuse
from offplan.runtime.stock.generation import StockGeneration, reads_chunks
from offplan.runtime.stock.passes import try_to_count
from offplan.runtime.stock.skeleton import build_stock
from offplan.schedule import (
    Copy,
    Serve,
    Wait,
    kept_after_prefill,
    read_at_use,
    slots_read,
)
from offplan.transformers_private import list_experts, rescale_layers


class StockRunner:
    """Runs a loaded model as ``generate`` does, on the current stream, in inference mode.

    It serves a session as ``ModelRunner`` does. Nothing is captured or compiled.
    """

    def __init__(
        self, loaded: LoadedModel, link: Link, memory: PeakMemory, *, context: int, chunk: int
    ) -> None:
        """Take the model over, and record in which order its passes call the layers.

        Prompts are read in chunks of ``chunk`` tokens, texts reach ``context`` tokens. Runs a
        prompt of two tokens and a step of one. Raises CheckpointError for a model whose weights
        cannot be moved around its layers' calls, and whatever its class raises.
        """
        self._loaded, self._link, self._memory = loaded, link, memory
        self._module: Any = loaded.module
        self._context, self._chunk = context, chunk
        self.length = 0
        """Tokens of each sequence; 0 where none is begun."""
        self._batch = 0
        self._text: StockGeneration | None = None
        self.tokens_embedded = 0
        """Rows of the input embedding that passes have read."""
        self._executor = Executor(link, loaded.store.serve)
        if any(holds_codes(part) for part in self._module.modules()):
            _choose_stored_experts(self._module)
        self._calls = LayerCalls(decoder_layers(self._module))
        self._order: dict[Phase, tuple[int, ...]] = {}
        self._expected: tuple[int, ...] = ()
        self._num_called = 0
        """Calls of layers in the pass that runs."""
        self._order = self._record()
        _check_kept(loaded.placement, self._order)
        self._calls.enter, self._calls.leave = self._enter, self._leave
        self._schedules = PassSchedules(loaded.placement, len(loaded.stage.layers), self._order)
        self._carried = CarriedState(self._schedules, self._executor, self._calls, loaded)

    def prefill(self, prompt: torch.Tensor) -> torch.Tensor:
        """Begin new sequences with a prompt, int64 of shape [batch, tokens].

        Returns logits, [batch, vocabulary]. Raises InputError for a prompt that is empty or beyond
        the context. Raises it too for one of more tokens than a chunk if the family's are read
        whole.
        """
        return self._read(prompt, 1)[-1][:, -1]

    def prefill_all(self, prompt: torch.Tensor, num_last: int) -> Iterator[torch.Tensor]:
        """Do what ``prefill`` does; make the logits of the ``num_last`` tokens of each sequence.

        Returns [batch, some, vocabulary] of each chunk that has some, in order.
        """
        return iter(self._read(prompt, num_last))

    def _read(self, prompt: torch.Tensor, num_last: int) -> list[torch.Tensor]:
        batch, num_tokens = prompt.shape
        require_prompt(prompt, self._context)
        model = self._loaded.model
        if num_tokens > self._chunk and not reads_chunks(self._module.config):
            raise InputError(
                f"the prompt has {num_tokens} tokens, and the plan's passes have room for "
                f"{self._chunk} (prefill_chunk); prompts of {model.model_type} are read whole, "
                "since transformers gives other results in chunks or that is not known",
                remedy=f"plan with `prompt_tokens={num_tokens}` or more",
            )
        parts = list[torch.Tensor]()
        with self._carried.passing():
            self._forget()
            self._text = self._begin(prompt)
            self.tokens_embedded += prompt.numel()
            ends = [*range(self._chunk, num_tokens, self._chunk), num_tokens]
            for start, stop in zip([0, *ends], ends, strict=False):
                following = Phase.DECODE if stop == num_tokens else Phase.PREFILL
                wanted = stop - max(start, num_tokens - num_last)
                read = partial(self._text.prefill, start, stop, max(1, wanted))
                logits = self._run(Phase.PREFILL, following, read)
                if wanted > 0:
                    parts.append(logits)
        self.length, self._batch = num_tokens, batch
        return parts

    def decode(self, tokens: torch.Tensor) -> torch.Tensor:
        """Extend each sequence by one token, int64 of shape [batch, 1] on the device.

        Returns logits, [batch, vocabulary]. Raises InputError for tokens that are not one for each
        sequence, or beyond the context, ValueError where no sequence is begun.
        """
        require_step(tokens, self.length, self._batch, self._context)
        assert self._text is not None
        length, self.length = self.length, 0  # no sequence is begun unless the pass ends
        with self._carried.passing():
            self.tokens_embedded += self._batch
            logits = self._run(Phase.DECODE, Phase.DECODE, partial(self._text.decode, tokens))
        self.length = length + 1
        return logits

    def find_nan(self, tokens: torch.Tensor, rows: slice) -> str:
        """Read texts, int64 of [batch, tokens], once more; say what gives the first NaN.

        ``rows`` are all there are. What is beyond a chunk is read token by token, and the host
        waits for every layer. No sequence is begun afterwards.
        """
        watch, read = NanWatch(), min(tokens.shape[1], self._chunk)
        self._calls.see = watch.see
        try:
            logits = self.prefill(tokens[:, :read])
            for number in range(read, tokens.shape[1]):
                logits = self.decode(tokens[:, number : number + 1].to(self._loaded.store.device))
            return watch.describe_rest(logits)
        except NanFoundError as found:
            return str(found)
        finally:
            self._calls.see = None
            self._forget()

    @property
    def changes_with_length(self) -> bool:
        """True if the rotary embeddings change with the length of the text."""
        changing = {"dynamic", "longrope"}
        for part in self._module.modules():
            kinds = getattr(part, "rope_type", None)
            if {kinds} & changing if not isinstance(kinds, dict) else changing & {*kinds.values()}:
                return True
        return False

    def captures_prompt(self, batch: int, num_tokens: int) -> bool:
        """Say that nothing is captured."""
        return False

    def close(self) -> None:
        """Give back caches and hooks; the device must be idle."""
        self._forget()
        self._calls.close()

    def _begin(self, prompt: torch.Tensor) -> StockGeneration:
        device = self._loaded.store.device
        # one more than fit: generate refuses a prompt that leaves no room for a token
        return StockGeneration(self._module, prompt.to(device), self._context + 1)

    def _forget(self) -> None:
        if self._text is not None:
            self._memory.release(self._drop)  # or its cache would lie beside the next one

    def _drop(self) -> None:
        self._text, self.length = None, 0

    def _run(
        self, phase: Phase, following: Phase, forward: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Run a pass of a phase, which one of the phase ``following`` follows."""
        schedule = self._schedules.next(phase, following)
        self._loaded.enter_phase(phase)
        self._expected, self._num_called = self._order[phase], 0
        with without_cudnn():  # every step has a length of its own
            made: torch.Tensor = self._executor.run(schedule, forward)
        if self._num_called != len(self._expected):
            raise self._unlike("ends")
        return made

    def _enter(self, index: int) -> None:
        number = self._num_called
        if self._expected[number : number + 1] != (index,):
            raise self._unlike(f"calls layer {index}")
        self._executor.before(number)

    def _leave(self, index: int) -> None:
        self._executor.after(self._num_called)
        self._num_called += 1

    def _unlike(self, what: str) -> Exception:
        return refuse(
            f"a pass of {type(self._module).__name__} {what} after {self._num_called} calls of "
            f"layers, unlike the pass that was recorded, which makes {len(self._expected)}"
        )

    def _record(self) -> dict[Phase, tuple[int, ...]]:
        """Run a short text, fetching what each call needs, and note the calls of each phase."""
        with torch.inference_mode():
            if any(hasattr(part, "_rescale_layers") for part in self._module.modules()):
                self._loaded.enter_stored()
                rescale_layers(self._module)
            text = self._begin(torch.arange(2)[None])
            return {
                Phase.PREFILL: self._record_pass(Phase.PREFILL, partial(text.prefill, 0, 2)),
                Phase.DECODE: self._record_pass(
                    Phase.DECODE, partial(text.decode, text.text[:, -1:])
                ),
            }

    def _record_pass(self, phase: Phase, forward: Callable[[], object]) -> tuple[int, ...]:
        loaded, placement, order = self._loaded, self._loaded.placement, list[int]()
        loaded.enter_phase(phase)
        slots, at_use = slots_read(placement, phase), read_at_use(placement, phase)

        def enter(index: int) -> None:
            order.append(index)
            watch.is_watching = False
            if index in slots:
                self._link.copy(Copy(*slots[index]))
                self._link.wait(Wait(*slots[index]))
            for backend in {entry.backend(phase) for entry in at_use.get(index, ())}:
                if backend.is_served:
                    loaded.store.serve(Serve(phase, index, backend))
            watch.is_watching = True

        self._calls.enter = enter
        owners = {
            id(value): (loaded.store.layer_of(name), name)
            for name, value in loaded.store.by_phase[phase].items()
            if loaded.store.layer_of(name) >= 0
        }
        slot_of = {layer: slot for layer, (slot, _) in slots.items()}
        watch = WeightWatch(self._calls, owners, loaded.store.slots, slot_of)
        with watch:
            forward()
        uncalled = {slab.layer for slab in placement.slabs} - {*order}
        if uncalled:
            raise refuse(
                f"a {phase.value} pass of {type(self._module).__name__} does not call layer "
                f"{min(uncalled)}, whose weights the plan moves"
            )
        return tuple(order)


def _choose_stored_experts(module: Any) -> None:
    """Have experts that are held as codes multiplied by our products."""
    experts = list_experts(module)
    coded = [holds_codes(part) for part in experts]
    if any(coded) and not all(coded):
        raise refuse(f"{type(module).__name__} has experts of values beside experts of codes")
    if any(coded):
        module.set_experts_implementation(STORED_EXPERTS_NAME)


def _check_kept(placement: Placement, order: dict[Phase, tuple[int, ...]]) -> None:
    """Refuse what prefill leaves in the ring for decode where calls are not in the layers' order.

    The store takes the last layer of each slot, in their order, to be what is left there.
    """
    called = order[Phase.PREFILL]
    if kept_after_prefill(placement) and called != tuple(sorted({*called})):
        raise refuse(
            "the plan streams weights for prompts alone, and a pass calls layers several times or "
            "out of their order"
        )


class StockPasses(PassesExecutor):
    """Runs a model by transformers' own passes."""

    way = STOCK
    build = staticmethod(build_stock)
    make_runner = StockRunner
    begin_texts = StockGeneration
    count_model = staticmethod(try_to_count)

"""Calls that are aborted at every operation: the other texts go on as if nothing had been.

What comes next is compared with stock transformers, whatever a pass was doing when it ended.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers import AutoModelForCausalLM

from offplan.capabilities.packing import Packing
from offplan.capabilities.stock import STOCK
from offplan.capabilities.way import OWN
from offplan.checkpoint.open import open_model
from offplan.plan import Backend, Offload
from offplan.runtime.model.caches import Swap
from offplan.runtime.passes.carried import CarriedState
from offplan.runtime.passes.link import Link
from offplan.runtime.rows import Rows, _Row
from offplan.runtime.session import Session
from tests.hostcores.cores import require_cores
from tests.runtime.cached import keeping
from tests.runtime.conftest import save_tiny
from tests.runtime.divided import dividing, save, sharing, wide
from tests.runtime.interrupted import Abort, interrupted_at
from tests.runtime.plans import CONTEXT, LateLink, group, in_parts, offload, open_session
from tests.runtime.quantise import save_stored
from tests.tiers import each_value_once, others_in_sweep

TEXTS = {
    name: [(number * step + 5) % 61 + 1 for number in range(CONTEXT)]
    for name, step in (("first", 7), ("second", 11), ("third", 23))
}
PROMPT = 9
"""Tokens that texts join with."""
ROUNDED = 0.35
"""Most that logits of bfloat16 differ by from stock's float32 ones, over their deviation; with
another layer's weights they differ by 1 and more."""


@dataclass
class Moments:
    """Counts what a call does, and ends it at one of its moments."""

    left: int | None = None
    """Moments until the end; None for no end."""
    seen: list[str] = field(default_factory=list)

    def pass_by(self, what: str) -> None:
        self.seen.append(what)
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                raise Abort(what)

    def around(self, owner: Any, *names: str) -> None:
        """Have calls of an object's methods be moments, before and after."""
        for name in names:
            setattr(owner, name, self._between(name, getattr(owner, name)))

    def _between(self, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self.pass_by(f"before {name}")
            made = own(*arguments, **named)
            self.pass_by(f"after {name}")
            return made

        return call


class Watched(NamedTuple):
    """A session that is aborted, and what stock makes of each text after each of its tokens."""

    session: Session
    moments: Moments
    expected: dict[str, torch.Tensor]
    """By text, [tokens, vocabulary]."""
    tolerance: float


@cache
def run_stock(folder: Path) -> dict[str, torch.Tensor]:
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return {
            name: stock(torch.tensor([text]), use_cache=False).logits[0]
            for name, text in TEXTS.items()
        }


@contextmanager
def watch(
    folders: tuple[Path, Path], decision: Offload, *, late: bool, stock: bool = False
) -> Iterator[Watched]:
    """Open a session of what is stored, whose values the second folder has."""
    moments = Moments()

    def wrap(link: Link) -> Link:
        wrapped = LateLink(link) if late else link
        moments.around(wrapped, "copy", "wait")
        return wrapped

    model = open_model(str(folders[0]))
    options: Any = {"context": CONTEXT, "device": "cpu", "folder": folders[0]}
    options["way"] = STOCK if stock else OWN
    with Session(model, decision, **options, wrap_link=wrap) as session:
        runner, moments.seen = session.runner, []
        if stock:
            moments.around(runner._calls, "enter", "leave")
        else:
            steps = runner.layers._steps
            steps[:] = [moments._between("a layer", step) for step in steps]
            moments.around(runner, "copy", "set_lengths")
            swap = runner.swap

            def make_swap(*places: int) -> Swap:
                made: Swap = swap(*places)
                moments.around(made, "_clear", "run")
                return made

            runner.swap = make_swap
            settles = runner._executor._settle
            settles[:] = [moments._between("_settle", settle) for settle in settles]
            for each in session.loaded.executors.values():
                moments.around(each, "begin")
        for server in session.loaded.store.servers.values():
            names = ("multiply", "send", "begin", "end")
            moments.around(server, *(name for name in names if hasattr(server, name)))
        is_short = "bfloat16" in model.dtype
        yield Watched(session, moments, run_stock(folders[1]), ROUNDED if is_short else 1e-3)


class Texts:
    """Texts of a session, of which one is what the others' aborts are to leave alone."""

    def __init__(self, watched: Watched) -> None:
        self.session, self.moments, self.expected, self.tolerance = watched
        self.is_one = not hasattr(self.session.runner, "read")
        self.rows = Rows(self.session, 1 if self.is_one else 3, sizes=(1,))
        self.names: dict[int, str] = {}

    def check(self, row: int, logits: torch.Tensor) -> None:
        wanted = self.expected[self.names[row]][self.rows.length(row) - 1]
        error = float((logits.float() - wanted).abs().max() / wanted.std())
        assert error < self.tolerance, (self.names[row], self.rows.length(row), error)

    def join(self, name: str, length: int = PROMPT) -> int:
        row, logits, _ = self.rows.join(TEXTS[name][:length])
        self.names[row] = name
        self.check(row, logits)
        return row

    def step(self, row: int) -> None:
        token = TEXTS[self.names[row]][self.rows.length(row)]
        made = self.rows.step({row: token} | self.tokens_of_others(row))
        self.check(row, made[row])

    def tokens_of_others(self, row: int) -> dict[int, int]:
        """Tokens for texts that cannot wait, as those of linear attention."""
        if getattr(self.session.runner, "goes_back", True):
            return {}
        return {
            each: TEXTS[self.names[each]][self.rows.length(each)]
            for each in self.rows.in_use - {row}
        }

    def clear(self) -> None:
        for row in self.rows.in_use:
            self.rows.leave(row)

    def ensure(self, name: str) -> int:
        """Find the row of a text that is not about to be full, and join it where there is none."""
        for row in self.rows.in_use:
            if self.names[row] == name and self.rows.length(row) < CONTEXT - 4:
                return row
            if self.names[row] == name or self.is_one:
                self.rows.leave(row)
        return self.join(name)

    def abort(self, call: Callable[[], object], moment: int) -> bool:
        """Make a call that is aborted at a moment; say whether it was."""
        self.moments.left = moment
        try:
            call()
        except Abort:
            return True
        finally:
            self.moments.left = None
        return False


def join(texts: Texts) -> None:
    texts.rows.join(TEXTS["second"][: PROMPT + 2])


def join_two(texts: Texts) -> None:
    """The second goes on from a copy of what the first text's row holds."""
    texts.rows.join_all([TEXTS["third"][:5], TEXTS["first"][: PROMPT - 1]])


def step(texts: Texts) -> None:
    row = next(iter(texts.rows.in_use))
    token = TEXTS[texts.names[row]][texts.rows.length(row)]
    texts.rows.step({row: token} | texts.tokens_of_others(row))


def find_nan(texts: Texts) -> None:
    texts.rows.find_nan(TEXTS["third"][:7])


def move(texts: Texts) -> None:
    """A step of the least size brings a text to the first place."""
    texts.rows.leave(min(texts.rows.in_use, key=texts.rows._slots.__getitem__))
    step(texts)


CALLS = {each.__name__: each for each in (join, join_two, step, find_nan, move)}


def abort_everywhere(watched: Watched, names: list[str], every: int, first: int = 0) -> None:
    """Abort calls at every so many moments, and compare what comes next with stock."""
    texts = Texts(watched)
    for name in names:
        moment, was_aborted = first, True
        while was_aborted:
            texts.clear()
            if name == "move":
                texts.join("second")
            own = texts.ensure("first")
            if moment % 2:
                texts.step(own)
            was_aborted = texts.abort(lambda call=CALLS[name]: call(texts), moment)  # type: ignore
            if name == "move":
                own = min(texts.rows.in_use, default=own)
            if not texts.session.runner.goes_back and not texts.rows.in_use:
                own = texts.ensure("first")  # what cannot be as it was is gone
            assert own in texts.rows.in_use, (name, moment)
            for row in texts.rows.in_use - {own}:  # of a call that came to its end
                texts.rows.leave(row)
            if moment // every % 3 == 1 and not texts.is_one:
                texts.join("third")
            for _ in range(2):
                texts.step(own)
            moment += every


PREFILLS = ("prefetch", "uva")
DECODES = ("prefetch", "uva", "host")
LAYERS = ("mlp", "self_attn", "")
FORMS = {
    "float32": lambda into: (save_tiny("qwen3", into),) * 2,
    "values": lambda into: (
        (save_stored("qwen3", "fp8_block", into, torch.bfloat16, num_hidden_layers=4)[1],) * 2
    ),
    "codes": lambda into: save_stored(
        "qwen3", "fp8_block", into, torch.bfloat16, num_hidden_layers=4
    ),
}


@pytest.fixture(scope="module")
def find(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Path]]:
    """Saves a checkpoint once; returns the folders of what is stored and of its values."""

    @cache
    def find(name: str) -> tuple[Path, Path]:
        into = tmp_path_factory.mktemp("aborted")
        if name in FORMS:
            return FORMS[name](into)
        if name in ("divided", "split"):
            more = wide("qwen3_moe") if name == "split" else {}
            config = {"num_experts": 8, "num_hidden_layers": 4, **more}
            return save("qwen3_moe", "values", into, **config)
        if name == "experts of codes":
            return save_stored("qwen3_moe", "int4", into, torch.bfloat16, num_hidden_layers=3)
        return (save_tiny(name, into),) * 2

    return find


Find = Callable[[str], tuple[Path, Path]]


@pytest.mark.slow
def test_a_prompt_that_is_aborted_leaves_the_other_texts_right(find: Find) -> None:
    """Decode takes the last layers from the ring, which a prompt has filled anew."""
    decision = offload(group(1, 1, "mlp", decode="uva"), prefill_chunk=8)
    with watch(find("float32"), decision, late=False) as watched:
        texts = Texts(watched)
        own = texts.join("first")
        for moment in (6, 17):
            assert texts.abort(lambda: join(texts), moment)
            texts.step(own)
        texts.rows.find_nan(TEXTS["second"])
        texts.step(own)


@pytest.mark.slow
def test_an_aborted_joining_leaves_nothing_to_the_owner_before(
    find: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the joining was about to note of the row."""
    moments, note = Moments(), _Row.__setattr__

    def pass_by(row: _Row, name: str, value: object) -> None:
        moments.pass_by(name)
        note(row, name, value)

    monkeypatch.setattr(_Row, "__setattr__", pass_by)
    with open_session(find("float32")[0], offload()) as session:
        rows, prompt, moment, was_aborted = Rows(session, 1), TEXTS["first"][:4], 0, True
        while was_aborted:
            row, _, num_read = rows.join(prompt, "before")
            assert num_read == len(prompt), moment
            rows.leave(row)
            rows.leave(rows.join(TEXTS["second"][1:4], "before").row)  # begins otherwise
            moments.left, moment, was_aborted = moment, moment + 1, False
            try:
                rows.join(prompt, "owner")
            except Abort:
                was_aborted = True
            moments.left = None
    assert moment > 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefill", "decode", "form", "segment", "slots", "late"),
    each_value_once(
        case
        for case in product(PREFILLS, DECODES, FORMS, LAYERS, (1, 2, 3), (False, True))
        if case[1:3] != ("host", "float32")  # which the cores do not multiply
    ),
)
def test_by_every_backend(
    find: Find, prefill: str, decode: str, form: str, segment: str, slots: int, late: bool
) -> None:
    if decode == "host":
        require_cores()
    segments = (segment,) if segment else ()
    rule = group(1, 1, *segments, prefill=prefill, decode=decode)
    decision = offload(rule, prefetch_step=slots, prefill_chunk=4)
    with watch(find(form), decision, late=late) as watched:
        abort_everywhere(watched, [*CALLS], every=5, first=late)


EXPERTS: dict[str, tuple[str, list[Any]]] = {
    "kept": ("qwen3_moe_tied", [keeping(2)]),
    "kept beside layers in place": (
        "qwen3_moe_tied",
        [keeping(2), group(1, 1, "self_attn", decode="uva")],
    ),
    "kept, read in place by prompts": ("qwen3_moe_tied", [keeping(2, prefill="uva", every=1)]),
    "in parts": ("qwen3_moe_tied", [in_parts(2)]),
    "in parts, groups of chunks": ("qwen3_moe_tied", [in_parts(4, tokens_at_once=4)]),
    "in parts, whole attention": (
        "qwen3_moe_tied",
        [group(1, 1, "self_attn", decode="uva"), in_parts(2, every=2)],
    ),
    "by cores": ("divided", [group(1, 1, "experts", decode="host")]),
    "divided": ("divided", [dividing(2, later=0.7)]),
    "split": ("split", [dividing(2, later=0.7)]),
    "in parts, by cores": ("divided", [in_parts(2, decode="host")]),
    "codes": ("experts of codes", [group(1, 1, "experts", decode="uva")]),
    "kept codes": ("experts of codes", [keeping(2, every=1)]),
}


FEW = (
    *("kept, read in place by prompts", "in parts, groups of chunks", "by cores", "divided"),
    *("split", "kept codes"),
)
"""Each way in which a layer comes by its experts, once."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "chunk", "late"),
    each_value_once(
        product(EXPERTS, (3, 64), (False, True)), of=[*product(FEW, (3, 64), (False, True))]
    ),
)
def test_experts(find: Find, name: str, chunk: int, late: bool) -> None:
    family, rules = EXPERTS[name]
    if any(rule.decode is Backend.HOST for rule in rules):
        require_cores()
    decision = offload(*rules, prefill_chunk=chunk)
    with sharing(0.5), watch(find(family), decision, late=late) as watched:
        abort_everywhere(watched, [*CALLS], every=7, first=late)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "decode", "late"),
    each_value_once(
        product(
            ("deepseek_v2", "linear", "linear_experts", "shared_keys", "chunked", "sinks"),
            ("prefetch", "uva"),
            (False, True),
        )
    ),
)
def test_caches_of_every_kind(find: Find, name: str, decode: str, late: bool) -> None:
    decision = offload(group(2, 1, decode=decode), prefill_chunk=4)
    with watch(find(name), decision, late=late) as watched:
        abort_everywhere(watched, [*CALLS], every=5, first=late)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("decode", "late"),
    others_in_sweep(product(PREFILLS, (False, True)), [("prefetch", True)]),
)
def test_packed_layers(find: Find, decode: str, late: bool) -> None:
    rule = group(1, 1, "mlp", decode=decode)
    decision = offload(rule, prefill_chunk=4).model_copy(
        update={"packing": Packing(group_size=1, num_in_group=1)}
    )
    with watch(find("values"), decision, late=late) as watched:
        abort_everywhere(watched, [*CALLS], every=5, first=late)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefill", "decode", "late"), each_value_once(product(PREFILLS, PREFILLS, (False, True)))
)
def test_passes_of_transformers_own(find: Find, prefill: str, decode: str, late: bool) -> None:
    decision = offload(group(1, 1, "mlp", prefill=prefill, decode=decode))
    with watch(find("float32"), decision, late=late, stock=True) as watched:
        texts, moment, was_aborted = Texts(watched), 0, True
        while was_aborted:
            own = texts.ensure("first")
            was_aborted = texts.abort(lambda: step(texts), moment)
            if was_aborted:
                assert not texts.rows.in_use
                was_aborted = texts.abort(lambda: texts.rows.join(TEXTS["third"][:5]), moment)
                texts.clear()
            own = texts.ensure("first")
            texts.step(own)
            moment += 1


ANYWHERE: dict[str, tuple[str, list[Any]]] = {
    "in place": ("float32", [group(1, 1, "mlp", decode="uva")]),
    "prefetched": ("float32", [group(1, 1, "mlp")]),
    "latents": ("deepseek_v2", [group(2, 1, decode="uva")]),
    "windows": ("mistral_windowed", [group(2, 1)]),
    **{name: EXPERTS[name] for name in ("kept", "in parts", "divided")},
}


def test_a_pass_that_is_aborted_leaves_compilation_on() -> None:
    """torch sets a stance before the context begins that takes it back."""
    counter = CompileCounter()

    def abort() -> None:
        with CarriedState().passing():
            torch.compiler.set_stance("force_eager")
            raise Abort

    with pytest.raises(Abort):
        abort()
    torch.compile(lambda x: x + 1, backend=counter)(torch.ones(2))
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.sweep) for n in (1, 2))])
@pytest.mark.parametrize(
    "name", others_in_sweep(ANYWHERE, ["in place", "latents", "kept", "in parts"])
)
def test_at_any_line(find: Find, name: str, seed: int) -> None:
    family, rules = ANYWHERE[name]
    draw = random.Random(seed)
    with watch(find(family), offload(*rules, prefill_chunk=4), late=False) as watched:
        texts = Texts(watched)
        for call in (join, step, join_two, find_nan, move):
            texts.clear()
            own = texts.ensure("first")
            if call is move:
                texts.join("second")
            with interrupted_at(0) as lines:
                call(texts)
            for _ in range(12):
                texts.clear()
                if call is move:
                    texts.join("second")
                own = texts.ensure("first")
                try:
                    with interrupted_at(draw.randint(1, lines[0])):
                        call(texts)
                except Abort as abort:
                    told = str(abort)
                else:
                    told = "none"
                if call is move and len(texts.rows.in_use) == 1:
                    (own,) = texts.rows.in_use
                assert own in texts.rows.in_use, told
                try:
                    for _ in range(2):
                        texts.step(own)
                except AssertionError as error:
                    raise AssertionError(told) from error

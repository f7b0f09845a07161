"""Tokens drawn as transformers draws them, and prompts of unlike lengths in one batch."""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from offplan.errors import InputError
from offplan.runtime.generate import Measured, generate
from offplan.runtime.joined import Continued, JoinedTexts, generate_texts
from offplan.runtime.rows import Rows
from offplan.runtime.rules import TokenRules
from offplan.runtime.sampling import Sampling
from offplan.runtime.session import Session
from offplan.runtime.texts import Text
from tests.runtime.conftest import save_tiny
from tests.runtime.plans import group, offload, open_session
from tests.runtime.words import DRAWN, Words
from tests.tiers import first_quick, others_in_sweep

NUM_TOKENS = 8
PROMPTS = [[3, 14, 15, 9, 26, 5, 35], [58, 9, 7], [2, 38, 4, 6], [58, 9, 7]]
EXCHANGES = ("copy", "lift", "item", "scalar_dense", "nonzero", "dtype_layout", "pin", "equal")
"""Parts of the names of operations by which host and device exchange something on a GPU."""


def generate_together(
    session: Session,
    prompts: list[list[int]],
    sampling: Sampling | None = None,
    rules: TokenRules | None = None,
    num_rows: int | None = None,
) -> list[list[int]]:
    """Return what follows each prompt."""
    made: list[list[int]] = [[] for _ in prompts]
    texts = [
        Text(Words(), prompt, num_tokens=NUM_TOKENS, rules=rules, number=number)
        for number, prompt in enumerate(prompts)
    ]
    for text, piece in generate_texts(Rows(session, num_rows or len(prompts)), texts, sampling):
        made[text.number] += map(int, piece.split())
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    others_in_sweep(
        ["qwen3", "deepseek_v2", "linear", "chunked", "shared_keys", "dynamic", "longrope"],
        ["deepseek_v2", "linear", "chunked", "dynamic"],
    ),
)
def test_prompts_of_unlike_lengths(tmp_path: Path, name: str) -> None:
    folder = save_tiny(name, tmp_path)
    with open_session(folder, offload(group(2, 1), prefill_chunk=4)) as session:
        alone = [generate_together(session, [prompt])[0] for prompt in PROMPTS]
        for num_rows in (1, 2, 4):
            assert generate_together(session, PROMPTS, num_rows=num_rows) == alone
        if name in ("dynamic", "longrope"):  # of which stock makes something else with a cache
            return
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt, made in zip(PROMPTS, alone, strict=True):
        expected = stock.generate(
            torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None
        )
        assert made == expected[0, len(prompt) :].tolist()


def test_a_long_prompt_beside_a_short_one_takes_no_steps(tmp_path: Path) -> None:
    measured, texts = Measured(), []
    for number, length in enumerate((2, 40)):
        texts.append(Text(Words(), range(length), num_tokens=5, number=number))
    with open_session(save_tiny("qwen3", tmp_path), offload(group(2, 1))) as session:
        for _ in generate_texts(Rows(session, 2), texts, measured=measured):
            pass
        assert (measured.num_decodes, len(measured.step_s)) == (4, 4)
        slabs = sum(slab.nbytes for slab in session.loaded.placement.slabs)
        assert 0 < measured.prefill_link_bytes <= slabs  # for both prompts together


@pytest.mark.slow
def test_tokens_are_drawn_as_transformers_draws_them(tmp_path: Path) -> None:
    folder = save_tiny("qwen3", tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with open_session(folder, offload(group(2, 1))) as session:
        for sampling in (DRAWN, Sampling(), Sampling(temperature=2.0, seed=9)):
            torch.manual_seed(sampling.seed)
            expected = stock.generate(
                torch.tensor(PROMPTS[:1]),
                max_new_tokens=NUM_TOKENS,
                do_sample=True,
                temperature=sampling.temperature,
                top_k=sampling.top_k or 0,
                top_p=sampling.top_p,
                eos_token_id=None,
            )
            (made,) = generate_together(session, PROMPTS[:1], sampling)
            assert made == expected[0, len(PROMPTS[0]) :].tolist()


@pytest.mark.slow
def test_what_is_drawn_does_not_depend_on_what_is_beside_it(tmp_path: Path) -> None:
    with open_session(save_tiny("qwen3", tmp_path), offload(group(2, 1))) as session:
        together = generate_together(session, PROMPTS, DRAWN)
        assert together[1] != together[3]  # the same prompt, with random numbers of its own
        for count in (2, 3):
            assert generate_together(session, PROMPTS[:count], DRAWN) == together[:count]


class Operations(TorchDispatchMode):
    """Counts operations by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = Counter[str]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.counted[str(func)] += 1
        return func(*args, **(kwargs or {}))


def count_operations(step: Callable[[], object]) -> Counter[str]:
    """Count the operations of three steps, behind those that are not like the rest."""
    for _ in range(5):
        step()
    with Operations() as watch:
        for _ in range(3):
            step()
    return watch.counted


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_step_of_texts_queues_what_a_step_of_a_batch_does(tmp_path: Path, num_rows: int) -> None:
    prompt, num_tokens = [3, 14, 15], 12
    with open_session(save_tiny("qwen3", tmp_path), offload(group(2, 1))) as session:
        batch = generate(session, torch.tensor([prompt] * num_rows), num_tokens)
        alone = count_operations(lambda: next(batch))
        texts = JoinedTexts(Rows(session, num_rows))
        each = [Text(Words(), prompt, num_tokens=num_tokens) for _ in range(num_rows)]
        texts.join([Continued(text) for text in each])
        joined = count_operations(lambda: [*texts.step()])
    exchanged = [
        {name: n for name, n in counted.items() if any(part in name for part in EXCHANGES)}
        for counted in (alone, joined)
    ]
    assert exchanged[0] == exchanged[1]
    assert exchanged[0], "the tokens are copied to the host"
    if num_rows == 1:  # several rows are written at positions of their own
        views = {"aten.slice.Tensor", "aten.select.int", "aten.expand.default"}
        more = {name for name, number in joined.items() if number > alone[name]}
        # the same mask, by its name in inference mode
        assert more <= {*views, "aten.where.ScalarSelf"}


@pytest.mark.parametrize(
    ("returned", "found"),
    first_quick(
        [
            (torch.zeros(2, dtype=torch.int64), r"int64 of shape \[2\] on cpu"),
            (torch.zeros(1, 1, dtype=torch.int64), r"int64 of shape \[1, 1\] on cpu"),
            (torch.zeros(2, 1), r"float32 of shape \[2, 1\] on cpu"),
            ([[1], [2]], "a list"),
            (None, "a NoneType"),
        ]
    ),
)
def test_what_choose_may_not_return(tmp_path: Path, returned: Any, found: str) -> None:
    prompt = torch.tensor(PROMPTS[1::2])
    with open_session(save_tiny("qwen3", tmp_path), offload()) as session:
        made = generate(session, prompt, 2, choose=lambda logits, rows: returned)
        expected = rf"choose returned {found}, expected int64 of shape \[2, 1\] on cpu"
        with pytest.raises(InputError, match=expected):
            next(made)
    assert generate.__doc__ is not None
    assert "int64 of [batch, 1]" in generate.__doc__


def test_temperature_0_is_greedy(tmp_path: Path) -> None:
    with open_session(save_tiny("qwen3", tmp_path), offload()) as session:
        greedy = generate_together(session, PROMPTS[:1])
        assert generate_together(session, PROMPTS[:1], Sampling(temperature=0)) == greedy


def test_a_batch_ends_with_its_last_text(tmp_path: Path) -> None:
    prompts = torch.tensor([[3, 14, 15], [58, 9, 7]])
    with open_session(save_tiny("qwen3", tmp_path), offload()) as session:
        rows = torch.stack(list(generate(session, prompts, 20)), dim=1)
        stops = frozenset({int(rows[0, 3]), int(rows[1, 6])})
        last = max(next(i for i, t in enumerate(row) if t in stops) for row in rows.tolist())
        measured = Measured()
        made = list(generate(session, prompts, 20, measured, stops))
        assert torch.equal(torch.stack(made, dim=1), rows[:, : last + 1])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", 0),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", float("nan")),
        ("seed", -1),
    ],
)
def test_values_that_cannot_be_drawn_with(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"{name} is "):
        Sampling(**{name: value})


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [None, DRAWN], ids=["greedy", "drawn"])
def test_a_models_rules_are_those_of_transformers(
    tmp_path: Path, sampling: Sampling | None
) -> None:
    folder = save_tiny("qwen3", tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    first = [stock(torch.tensor([prompt])).logits[0, -1].topk(2).indices for prompt in PROMPTS]
    likely = torch.cat(first).tolist()
    drawing: dict[str, Any] = {"do_sample": False}
    if sampling is not None:
        asked = {"temperature": sampling.temperature, "top_k": sampling.top_k}
        drawing = {"do_sample": True, "top_p": sampling.top_p, **asked}
    for rules in (
        TokenRules(repetition_penalty=3.0),
        TokenRules(repetition_penalty=0.5, suppress_tokens=tuple(likely[:3])),
        TokenRules(begin_suppress_tokens=tuple(likely)),
        TokenRules(frozenset(likely), min_length=9),
        TokenRules(frozenset(likely), min_new_tokens=3),
    ):
        with open_session(folder, offload(group(2, 1), prefill_chunk=4)) as session:
            made = generate_together(session, PROMPTS, sampling, rules)
        named = asdict(rules)
        ends = sorted(named.pop("end_tokens"))
        named = {key: value for key, value in named.items() if value and key != "stop_strings"}
        for number, prompt in enumerate(PROMPTS):
            torch.manual_seed(DRAWN.seed + number)
            expected = stock.generate(
                torch.tensor([prompt]),
                max_new_tokens=NUM_TOKENS,
                eos_token_id=ends or None,
                pad_token_id=0,
                **named,
                **drawing,
            )
            assert made[number] == expected[0, len(prompt) :].tolist()


def test_texts_whose_joining_fails_leave_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_session(save_tiny("qwen3", tmp_path), offload()) as session:
        texts = JoinedTexts(Rows(session, 3))
        texts.join([Continued(Text(Words(), [3, 4, 5], num_tokens=2))])

        def fail(*_: object) -> None:
            raise MemoryError

        monkeypatch.setattr(JoinedTexts, "_make_chooser", fail)
        with pytest.raises(MemoryError):
            texts.join(
                [Continued(Text(Words(), prompt, num_tokens=2)) for prompt in ([6, 7], [8, 9])]
            )
        assert (texts.num_free, len(texts)) == (2, 1)

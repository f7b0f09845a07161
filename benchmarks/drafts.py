"""Time a plan whose passes check drafts, by texts and acceptances that are given, as JSON.

    python -m benchmarks.drafts PLAN [--chances 0 0.6 0.8 1 --tokens 128]

The plan's ``offload`` has drafts. Weights are random, so the text is given: what logits say is not
asked, and each draft is right by chance. How many drafts a pass has follows the rule of a session.
A prediction layer drafts all the same; its drafts are replaced. Passes of each captured size are
timed alone, too, with what executors counted in each.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from offplan.capabilities.drafts import PASS_TOKENS, pass_tokens
from offplan.drafts.drafter import Drafter
from offplan.library.sessions import open_session
from offplan.plan import load_plan
from offplan.runtime.device import settle
from offplan.runtime.generate import Measured
from offplan.runtime.joined import Continued, JoinedTexts
from offplan.runtime.rows import Rows
from offplan.runtime.sampling import Choose
from offplan.runtime.session import Session
from offplan.runtime.texts import Text

WARMING, TIMED = 4, 12
"""Passes of each size."""


class Given:
    """Chooses the tokens of a text that is given."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self._tokens, self._at = tokens, 0

    def __call__(self, logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Return the next token, int64 of [1, 1]."""
        token = self._tokens[self._at : self._at + 1, None]
        self._at += 1
        return token

    def save(self) -> int:
        """Return the place of the next token."""
        return self._at

    def restore(self, at: int) -> None:
        """Go on from a place."""
        self._at = at


class ByChance:
    """Drafts a given text, each token right by chance."""

    def __init__(
        self, tokens: Sequence[int], chance: float, vocabulary: int, replaced: Drafter | None
    ) -> None:
        self._tokens, self._chance, self._vocabulary = tokens, chance, vocabulary
        self._draw, self._at, self._replaced = random.Random(0), 0, replaced

    def extend(self, tokens: Sequence[int]) -> None:
        """Take tokens of the text."""
        self._at += len(tokens)
        if self._replaced is not None:
            self._replaced.extend(tokens)

    def propose(self, most: int) -> list[int]:
        """Draft the next tokens."""
        if self._replaced is not None and most > 0:
            self._replaced.propose(most)
        return [
            token if self._draw.random() < self._chance else (token + 1) % self._vocabulary
            for token in self._tokens[self._at : self._at + most]
        ]


class GivenTexts(JoinedTexts):
    """Continues texts by what is given in place of what logits say."""

    given: torch.Tensor

    def _make_chooser(self, each: Continued) -> Choose:
        return Given(self.given)


class NoWords:
    """The tokenizer of a text that nobody reads."""

    def decode(self, *_: object, **__: object) -> str:
        """Return nothing."""
        return ""


def time_passes(rows: Rows, session: Session, prompt: list[int], most: int) -> list[dict[str, Any]]:
    """Time passes of each captured size, of which one token is taken, and the drafts behind."""
    draw, results = random.Random(2), []
    vocabulary = session.loaded.module.config.get_text_config().vocab_size
    for size in (each for each in PASS_TOKENS if each <= pass_tokens(most)):
        row = rows.join(prompt).row
        drafter = rows.make_drafter() if rows.make_drafter else None
        seconds: list[float] = []
        drafting: list[float] = []
        before = None
        for number in range(WARMING + TIMED):
            if number == WARMING:
                before = session.count(1)
            tokens = [draw.randrange(vocabulary) for _ in range(size)]
            settle(session.device)
            began = time.perf_counter()
            rows.check(row, tokens)
            settle(session.device)
            seconds.append(time.perf_counter() - began)
            rows.take(row, size, 1, has_nan=False)
            if drafter is not None:
                settle(session.device)
                began = time.perf_counter()
                drafter.extend(tokens[1:2])
                drafter.propose(min(most, size - 1))
                drafting.append(time.perf_counter() - began)
        counted = {name: asdict(each) for name, each in session.count(TIMED, before).items()}
        rows.leave(row)
        timed = statistics.median(seconds[WARMING:])
        draft_s = statistics.median(drafting[WARMING:]) if drafting else 0.0
        results.append({"tokens": size, "pass_s": timed, "draft_s": draft_s, "counts": counted})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan")
    parser.add_argument("--chances", type=float, nargs="*", default=[0.0, 0.6, 0.7, 0.8, 1.0])
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    plan = load_plan(args.plan)
    results: list[dict[str, Any]] = []
    with open_session(plan, dummy_weights=True) as session:
        assert session.draft is not None, "the plan has no drafts"
        vocabulary = session.loaded.module.config.get_text_config().vocab_size
        draw = random.Random(1)
        prompt = [draw.randrange(vocabulary) for _ in range(plan.workload.prompt_tokens)]
        made = [draw.randrange(vocabulary) for _ in range(args.tokens)]
        rows = Rows(session, 1)
        rows.warm_up(len(prompt), capture_prompt=True)
        for chance in (None, *args.chances):
            measured = Measured()

            def make(chance: float | None = chance) -> ByChance:
                tokens = [] if chance is None else [*prompt, *made]
                replaced = None if chance is None or not rows.make_drafter else rows.make_drafter()
                return ByChance(tokens, chance or 0.0, vocabulary, replaced)

            texts = GivenTexts(rows, measured, make_drafter=make)
            texts.given = torch.tensor(made, device=session.device)
            texts.join([Continued(Text(NoWords(), prompt, num_tokens=args.tokens))])
            began = time.perf_counter()
            while len(texts):
                for _ in texts.step():
                    pass
            counts = measured.drafts
            results.append(
                {
                    "chance": chance,
                    "token_s": (time.perf_counter() - began) / (args.tokens - 1),
                    "step_s": statistics.median(measured.step_s),
                    "passes": counts.num_passes,
                    "drafted": counts.drafted,
                    "offered": counts.offered,
                    "taken": counts.taken,
                }
            )
        passes = time_passes(rows, session, prompt, session.draft.tokens)
    told = {"plan": args.plan, "draft": str(session.draft), "runs": results, "passes": passes}
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()

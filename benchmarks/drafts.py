"""Time a plan whose passes check drafts, by texts and acceptances that are given, as JSON.

    python -m benchmarks.drafts PLAN [--chances 0 0.6 0.8 1 --tokens 128]

The plan's ``offload`` has drafts. Weights are random, so the text is given: what logits say is not
asked, and each draft is right by chance. How many drafts a pass has follows the rule of a session.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from offplan.library.sessions import open_session
from offplan.plan import load_plan
from offplan.runtime.generate import Measured
from offplan.runtime.joined import Continued, JoinedTexts
from offplan.runtime.rows import Rows
from offplan.runtime.sampling import Choose
from offplan.runtime.texts import Text


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

    def __init__(self, tokens: Sequence[int], chance: float, vocabulary: int) -> None:
        self._tokens, self._chance, self._vocabulary = tokens, chance, vocabulary
        self._draw, self._at = random.Random(0), 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Take tokens of the text."""
        self._at += len(tokens)

    def propose(self, most: int) -> list[int]:
        """Draft the next tokens."""
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
                return ByChance(tokens, chance or 0.0, vocabulary)

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
    print(json.dumps({"plan": args.plan, "draft": str(session.draft), "runs": results}, indent=1))


if __name__ == "__main__":
    main()

"""Texts of numbers, and a way to draw their tokens."""

from offplan.runtime.sampling import Sampling

DRAWN = Sampling(temperature=0.7, top_k=20, top_p=0.9, seed=5)


class Words:
    """A tokenizer of which the texts are the tokens' numbers."""

    def decode(self, tokens: list[int], **_: object) -> str:
        return "".join(f" {token}" for token in tokens)

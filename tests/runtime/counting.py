"""A grammar of numbers that ascend, which no package has to read."""

from copy import copy


class Counts:
    """A matcher of the tokens 10, 11, ... up to a last one, each up to so many times."""

    def __init__(self, last: int, fails_at: int | None = None, often: int = 2) -> None:
        self.last, self.fails_at, self.often = last, fails_at, often
        self.taken, self.copies = list[int](), list[Counts]()

    @property
    def _at(self) -> int:
        return self.taken[-1] if self.taken else 9

    def _list_allowed(self) -> list[int]:
        if self.is_stopped():
            return []
        again = [self._at] if 0 < self.taken.count(self._at) < self.often else []
        return [*again, self._at + 1]

    def consume_token(self, token: int) -> bool:
        self.taken.append(token)
        return not self.is_error()

    def compute_bitmask(self) -> bytes:
        return sum(1 << token for token in self._list_allowed()).to_bytes(8, "little")

    def is_stopped(self) -> bool:
        return self._at >= self.last or self.is_error()

    def is_error(self) -> bool:
        return self.fails_at is not None and len(self.taken) >= self.fails_at

    def compute_ff_tokens(self) -> list[int]:
        is_forced = self.often == 1 and not self.is_stopped()
        return [*range(self._at + 1, self.last + 1)] if is_forced else []

    def try_consume_tokens(self, tokens: list[int]) -> int:
        for number, token in enumerate(tokens):
            if token not in self._list_allowed():
                return number
            self.taken.append(token)
        return len(tokens)

    def rollback(self, num_tokens: int) -> bool:
        assert not self.is_error()
        del self.taken[len(self.taken) - num_tokens :]
        return True

    def deep_copy(self) -> "Counts":
        self.copies.append(copy(self))
        self.copies[-1].taken = [*self.taken]
        return self.copies[-1]

"""Counts of drafted tokens and of those that were taken, by their position in the pass."""

from dataclasses import dataclass, field


@dataclass
class DraftCounts:
    """Drafts that passes have checked; nothing of the text."""

    offered: list[int] = field(default_factory=list)
    """Drafts at each position whose turn came: all before them in their pass were taken."""
    taken: list[int] = field(default_factory=list)
    """Drafts at each position that were taken."""
    drafted: int = 0
    """Drafts of all passes, whether their turn came or not."""
    num_passes: int = 0
    """Passes that checked drafts."""
    compared: int = 0
    """Steps without drafts that compared one, or found none to compare."""
    right: int = 0
    """Those of ``compared`` whose draft would have been taken."""
    num_behind: int = 0
    """Drafts that were taken behind the token that ended their text."""

    @property
    def accepted(self) -> int:
        """Drafts that are tokens of a text."""
        return sum(self.taken) - self.num_behind

    @property
    def rejected(self) -> int:
        """Drafts that are no tokens of a text, whether their turn came or not."""
        return self.drafted - self.accepted

    def note(self, drafted: int, taken: int) -> None:
        """Count one pass that checked ``drafted`` tokens, of which the first ``taken`` were taken.

        A pass without drafts counts nothing.
        """
        if not drafted:
            return
        self.num_passes += 1
        self.drafted += drafted
        missing = drafted - len(self.offered)
        self.offered += [0] * missing
        self.taken += [0] * missing
        for position in range(min(taken + 1, drafted)):
            self.offered[position] += 1
            self.taken[position] += position < taken

    def note_step(self, *, is_right: bool) -> None:
        """Count a step without drafts, which compared one: whether that would have been taken.

        A step that found none counts as not right.
        """
        self.compared += 1
        self.right += is_right

    def add(self, other: "DraftCounts") -> None:
        """Count what another has counted, too."""
        for own, more in ((self.offered, other.offered), (self.taken, other.taken)):
            own += [0] * (len(more) - len(own))
            for position, number in enumerate(more):
                own[position] += number
        self.drafted += other.drafted
        self.num_passes += other.num_passes
        self.compared += other.compared
        self.right += other.right
        self.num_behind += other.num_behind

    def describe(self) -> str:
        """Say how many drafts were taken, for people."""
        if not self.num_passes:
            return "No pass checked drafts: none would have been right"
        each = [n / of for n, of in zip(self.taken, self.offered, strict=True) if of]
        chances = ", ".join(f"{chance:.0%}" for chance in each)
        passes = "pass" if self.num_passes == 1 else "passes"
        return (
            f"Of {self.drafted:,} drafts {sum(self.taken):,} were taken, in {self.num_passes:,} "
            f"{passes}; by their place, those before being right: {chances}"
        )

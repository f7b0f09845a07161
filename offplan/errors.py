"""Every error that offplan raises on purpose.

::

    OffplanError                 exit code 1: it failed
     +- InputError               exit code 2: bad usage or bad input
     |   +- CheckpointError      a model that cannot be read or understood
     |   |   +- UnpackableError  weights that a plan packs, and that do not pack
     |   +- PlanError            a plan file that is not valid, or not this model's
     |   +- ProfileError         a machine profile that is not valid, or not there
     |   +- ExportError          a plan that an engine's flags cannot say
     +- InfeasibleError          exit code 3: no plan fits
     +- DriftError               exit code 4: the model, or a plan that is checked, has drifted
     +- MemoryLimitError         the host or the GPU ran out of memory
     +- HubError                 the Hub was not reached, or failed
     +- NotANumberError          the model gave NaN in place of logits
    OffplanWarning               no error: it works, and worse than it could
"""

from enum import Enum


class Topic(Enum):
    """A paragraph of docs/troubleshooting.md, by its anchor."""

    NO_GPU = "no-gpu-is-found"
    DRIVER = "the-driver"
    GPU_MEMORY = "out-of-gpu-memory"
    HOST_MEMORY = "too-little-host-memory"
    PAGE_LOCKS = "host-memory-cannot-be-page-locked"
    COMPILER = "no-compiler"
    DOWNLOADS = "downloads"
    SLOW = "it-is-slower-than-predicted"

    @property
    def link(self) -> str:
        """The paragraph's address."""
        return f"{_TROUBLESHOOTING}#{self.value}"


_TROUBLESHOOTING = "https://github.com/offplan/offplan/blob/main/docs/troubleshooting.md"


class OffplanError(Exception):
    """Base of all errors; its text names what was found, what was expected and what to do.

    Arguments of the library stand in backquotes, with a value as in ``context=4096``; the command
    line names its options in their place. ``facts`` is the text without a ``remedy`` that only
    those can use who make plans: the server tells its clients no more. ``topic`` is the paragraph
    of the documentation whose link the command line adds.
    """

    exit_code = 1

    def __init__(
        self, message: object = "", *, remedy: str = "", topic: Topic | None = None
    ) -> None:
        super().__init__(f"{message}: {remedy}" if remedy else message)
        self.facts = str(message)
        self.topic = topic

    @property
    def more(self) -> str:
        """The sentence that names where the documentation says more; empty without a topic."""
        return "" if self.topic is None else f". See {self.topic.link}"


class InputError(OffplanError):
    """The command line, or a file it names, is not valid."""

    exit_code = 2


class CheckpointError(InputError):
    """The model cannot be read, or its layers cannot be understood."""


class UnpackableError(CheckpointError):
    """Weights that a plan packs have more patches than room.

    ``names`` are these weights as ``leave_unpacked`` takes them.
    """

    def __init__(self, message: str, names: tuple[str, ...]) -> None:
        super().__init__(message)
        self.names = names


class PlanError(InputError):
    """The plan is not valid, or does not belong to this model."""


class ProfileError(InputError):
    """The machine profile is not valid, or there is none of this name."""


class ExportError(InputError):
    """The plan says what the engine's flags cannot."""


class InfeasibleError(OffplanError):
    """No plan fits the budget.

    ``shortfall_bytes`` is what the best candidate lacks, ``None`` where no amount would do.
    ``ram_bytes`` is the memory of a machine that would do, ``None`` where that is not known.
    ``longest_context`` is the longest context that has a plan, in tokens, ``None`` where none has.
    The error's text ends with it, and ``facts`` is the text before.
    """

    exit_code = 3

    def __init__(
        self,
        message: str,
        shortfall_bytes: int | None = None,
        longest_context: int | None = None,
        ram_bytes: int | None = None,
        topic: Topic | None = None,
    ) -> None:
        super().__init__(message, topic=topic)
        self.shortfall_bytes, self.longest_context = shortfall_bytes, longest_context
        self.ram_bytes = ram_bytes

    def __str__(self) -> str:
        """Return the text, and the longest context behind it."""
        return f"{self.facts}. {self.way_out}" if self.way_out else self.facts

    @property
    def way_out(self) -> str:
        """Name the longest context that has a plan; empty where none has."""
        longest = self.longest_context
        if longest is None:
            return ""
        return f"The longest context that fits is {longest:,} tokens; `context={longest}` plans it"


class DriftError(OffplanError):
    """The model, or what else a plan was made for, is not what the plan says."""

    exit_code = 4


class MemoryLimitError(OffplanError):
    """The host or the GPU did not give the memory that the plan needs."""


class HubError(OffplanError):
    """The Hub cannot be reached, is busy or fails; asking again later may do."""


class NotANumberError(OffplanError):
    """The model gave NaN in place of logits, by which no token can be chosen.

    ``numbers`` are the sequences of the batch, or the texts, that it concerns, from 0 on. ``cause``
    names the layer of the pass that gave the first NaN.
    """

    def __init__(self, cause: str, numbers: list[int], names: list[str]) -> None:
        super().__init__(
            f"{', '.join(names)}: the logits of the next token are NaN, and no token can be chosen "
            f"by them; {cause}. Fetch the checkpoint again; if NaN stays, compare with transformers"
        )
        self.cause, self.numbers = cause, numbers


class OffplanWarning(UserWarning):
    """Something works in a worse way than it could, and the user can mend it."""

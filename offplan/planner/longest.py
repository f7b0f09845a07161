"""The longest context for which a plan keeps a question's budget and targets.

A longer context takes no less memory. Each context that is tried takes a search, so arithmetic
chooses the contexts: it takes off the tokens whose bytes the nearest plan lacks.
"""

from dataclasses import dataclass, field

from offplan.capabilities.rule import MOST
from offplan.costs.activations import activation_bytes
from offplan.costs.memory import kv_cache_bytes
from offplan.costs.term import least_that
from offplan.plan import MOST_CACHED
from offplan.planner.aims import NEVER
from offplan.planner.packed import find_any
from offplan.planner.question import Question
from offplan.planner.search import Searcher
from offplan.planner.space import Space

_MAX_GUESSES = 4
"""Guesses by what lacks before bisection takes over. Source: chosen; one is nearly always right."""
_FASTER = 8
"""Factor by which steps to longer contexts grow. Source: chosen."""


def find_longest_context(question: Question, most: int | None = None) -> int | None:
    """Find the longest context for which a plan keeps a question's budget and targets.

    The context has room for the workload's prompt and output. It is no longer than ``most``
    tokens, by default ``most_context``. If a plan chooses its batch, it is the longest context of
    one sequence. Another goal, as one of a smaller cache, is another question:
    ``replace(question, stages=lower(model, goal), goal=goal)``.

    Returns None if not even the shortest such context fits.
    """
    if question.goal.objective == "throughput":
        question = question.for_one_sequence()
    most = most_context(question, most)
    return _Contexts(question).find_longest(_least_context(question), most)


def most_context(question: Question, most: int | None = None) -> int:
    """Return the longest context that may be asked for, whatever memory there is.

    It is ``most``, by default what the model was trained for, or fewer tokens if its engine serves
    fewer.
    """
    architecture = question.model.architecture
    most = most or architecture.trained_context or MOST
    if question.goal.engine is not None:
        most = min(most, architecture.engine_context or most)
    most = min(most, MOST, MOST_CACHED // question.workload.batch)
    return max(_least_context(question), most)


def _least_context(question: Question) -> int:
    """Return the tokens of the workload's prompt and output."""
    return question.workload.prompt_tokens + question.workload.output_tokens


@dataclass
class _Contexts:
    """The contexts that were tried for a question."""

    question: Question
    guesses: dict[int, int | None] = field(default_factory=dict)
    """The longest context that may fit, by a context that was tried; itself if it fits.

    It is None if no number of bytes is what lacks.
    """

    def find_longest(self, shortest: int, most: int) -> int | None:
        """Find the longest context that fits, from ``shortest`` to ``most``; None if none does."""
        if self._fits(most):
            return most
        fits, too_long = self._approach(shortest, most)
        if fits is None:
            return None
        is_near = self.guesses[too_long] is not None
        step = 1 if is_near else (too_long - fits) // 2
        while fits < fits + step < too_long:
            if not self._fits(fits + step):
                too_long = fits + step
                break
            fits, step = fits + step, step * _FASTER
        return least_that(lambda context: not self._fits(context), fits, too_long) - 1

    def _approach(self, shortest: int, too_long: int) -> tuple[int | None, int]:
        """Find a context that fits, None if there is none, and one that is too long."""
        for _ in range(_MAX_GUESSES):
            guess = self.guesses[too_long]
            if guess is None:
                break
            guess = max(shortest, guess)
            if self._fits(guess):
                return guess, too_long
            too_long = guess
            if guess == shortest:
                return None, too_long
        return (shortest if self._fits(shortest) else None), too_long

    def _fits(self, context: int) -> bool:
        """Return True if a plan with this context keeps budget and targets."""
        if context not in self.guesses:
            self.guesses[context] = self._try(context)
        return self.guesses[context] == context

    def _try(self, context: int) -> int | None:
        """Search a context, and return the longest that may fit by what the nearest plan lacks."""
        question = self.question.with_workload(context=context)
        searcher = Searcher(Space(question, draft=question.goal.asked_draft))
        search = find_any(searcher, question.budget)
        if search.best is not None:
            return context
        lack = search.gpu_lack or search.host_lack
        if not 0 < lack < NEVER:
            return None
        space = searcher.space
        chunk = min(space.settings, key=lambda each: each.device_bytes).prefill_chunk

        def count_bytes(tokens: int) -> int:
            workload = question.workload.model_copy(update={"context": tokens})
            asked = space.stage, workload, chunk, space.draft
            return kv_cache_bytes(*asked) + activation_bytes(*asked)

        least = count_bytes(context) - lack
        return least_that(lambda tokens: count_bytes(tokens) > least, 0, context) - 1

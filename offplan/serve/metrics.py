"""Counters and times of a server, in Prometheus' format."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from offplan.plan import Prediction

_STEP_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_FIRST_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
"""Upper bounds in seconds."""


class Metrics:
    """Counters, gauges and times of one server, in a registry of their own."""

    def __init__(self, predicted: Prediction) -> None:
        """Begin at zero; ``predicted`` is what the plan promises of its own workload."""
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "offplan_requests",
            "Requests that were answered, by path and status.",
            ["path", "status"],
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "offplan_prompt_tokens", "Tokens of the prompts that were continued.", registry=registry
        )
        self.read_tokens = Counter(
            "offplan_prompt_tokens_read",
            "Tokens of prompts that passes read: the others were in the cache.",
            registry=registry,
        )
        self.made_tokens = Counter(
            "offplan_generated_tokens", "Tokens that were made.", registry=registry
        )
        self.waiting = Gauge("offplan_requests_waiting", "Texts that wait.", registry=registry)
        self.running = Gauge(
            "offplan_requests_running", "Texts that are being continued.", registry=registry
        )
        self.token_s = Histogram(
            "offplan_time_per_token_seconds",
            "Time from a token of a text to the next one.",
            buckets=_STEP_BUCKETS,
            registry=registry,
        )
        self.first_token_s = Histogram(
            "offplan_time_to_first_token_seconds",
            "Time from a request to its first token, waiting included.",
            buckets=_FIRST_BUCKETS,
            registry=registry,
        )
        for name, what, seconds in (
            ("offplan_predicted_time_per_token_seconds", "a token", predicted.decode.step_s),
            (
                "offplan_predicted_time_to_first_token_seconds",
                "the first token",
                predicted.prefill.step_s,
            ),
        ):
            what = f"Time of {what} that the plan predicts for its own workload."
            Gauge(name, what, registry=registry).set(seconds)

    def render(self) -> bytes:
        """Return all of it in Prometheus' text format."""
        return bytes(generate_latest(self._registry))

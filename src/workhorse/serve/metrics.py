"""Figures for Prometheus: /metrics."""

from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from workhorse.serve.answers import Timings
from workhorse.serve.messages import Stepped

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """All figures of one server."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ours: dict[str, Any] = {"namespace": "workhorse", "registry": self._registry}
        counter, gauge = partial(Counter, **ours), partial(Gauge, **ours)
        histogram = partial(Histogram, **ours, buckets=SECONDS)
        self._requests = counter("requests", "Answered requests", ("route", "status"))
        self._prompt = counter("prompt_tokens", "Tokens of prompts")
        self._cached = counter("cached_tokens", "Prompt tokens found in the prefix cache")
        self._new = counter("generated_tokens", "Generated tokens")
        self._proposed = counter("proposed_tokens", "Tokens guessed by speculative decoding")
        self._accepted = counter("accepted_tokens", "Guessed tokens that were generated")
        self._restarts = gauge("engine_restarts", "Times that the engine was restarted")
        self._running = gauge("running_completions", "Completions in progress")
        self._waiting = gauge("waiting_completions", "Completions in the queue")
        self._cache = gauge("cache_used_ratio", "Fraction of the cache blocks in use")
        self._first = histogram("time_to_first_token_seconds", "Until the first token")
        self._between = histogram("time_between_tokens_seconds", "Mean time between tokens")
        self._step = histogram("step_seconds", "Duration of a step of the engine")

    def answered(self, route: str, status: int) -> None:
        """Count an answered request."""
        self._requests.labels(route, str(status)).inc()

    def generated(self, timings: Timings) -> None:
        """Count the tokens of a request, also if it ended early."""
        self._prompt.inc(timings.prompt)
        self._cached.inc(timings.cached)
        self._new.inc(timings.new)
        self._proposed.inc(timings.proposed)
        self._accepted.inc(timings.accepted)
        if timings.first is not None:
            self._first.observe(timings.first - timings.started)
            if timings.new > 1:
                self._between.observe((timings.last - timings.first) / (timings.new - 1))

    def stepped(self, report: Stepped) -> None:
        """Note a step of the engine."""
        self._running.set(report.load.running)
        self._waiting.set(report.load.waiting)
        self._cache.set(report.load.cache)
        if report.tokens:
            self._step.observe(report.seconds)

    def text(self, restarts: int) -> bytes:
        """Return all figures in Prometheus' text format."""
        self._restarts.set(restarts)
        return generate_latest(self._registry)

"""Scheduling: chooses the tokens that the next step processes.

Requests of one client are ordered by arrival, and clients take turns. A step has a budget of
tokens. Each request that is decoding gets one token plus its guesses, and prompts share the rest
evenly. Cache blocks are allocated when tokens need them. If there are too few, the newest running
request is preempted: it releases its blocks and waits, and its tokens are processed again later.

A waiting request starts if the cache has room for all its tokens, even if an older one is still
waiting for room. The first of all requests starts in any case and is never preempted, so every
request ends.
"""

from bisect import insort
from collections import Counter
from collections.abc import Sequence
from itertools import islice

from workhorse.generate.request import Request
from workhorse.nn.cache.paged import BLOCK, PagedCache

MAX_CONSIDERED = 16
"""The maximum number of waiting requests that are considered in a step."""


class Scheduler:
    """Decides which requests run, and how many tokens of each a step processes.

    Args:
        cache: the cache whose blocks are allocated.
        token_budget: the maximum number of tokens in a step, enough for `max_sequences` requests
            that decode.
        max_sequences: the maximum number of sequences that run at a time.
        prefix_caching: True if a request reuses the blocks of its longest prefix in the cache.
        prompt_tokens: the maximum number of prompt tokens in a step in which other requests decode;
            None: no limit.

    Requests are ordered by rank, the number of earlier requests of the same client, and then by
    arrival. So clients take turns, and the requests of one client are served as they arrive. A
    request whose rank falls to 0 keeps its place until it ends.

    Attributes:
        waiting: requests without blocks, in order.
        running: requests that have blocks, or get them in this step; in order.
        preempted: requests that the last `schedule` preempted; they may run again.
    """

    def __init__(
        self,
        cache: PagedCache,
        *,
        token_budget: int,
        max_sequences: int,
        prefix_caching: bool,
        prompt_tokens: int | None = None,
    ) -> None:
        self.cache = cache
        self.token_budget = token_budget
        self.max_sequences = max_sequences
        self.prefix_caching = prefix_caching
        self.prompt_tokens = prompt_tokens
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.preempted: list[Request] = []
        self._ranks: dict[Request, int] = {}

    def limit_prompts(self, tokens: int | None) -> None:
        """Set `prompt_tokens`."""
        self.prompt_tokens = tokens

    def clear(self) -> None:
        """Drop all requests. Their blocks are not released."""
        self.waiting, self.running = [], []

    def add(self, request: Request) -> None:
        """Add a request to the queue."""
        insort(self.waiting, request, key=self._order)

    def join(self, request: Request) -> None:
        """Add a request to the running requests; its sequence may already have blocks."""
        insort(self.running, request, key=self._order)

    def remove(self, request: Request) -> None:
        """Drop a request and release its blocks."""
        (self.running if request in self.running else self.waiting).remove(request)
        request.sequence.clear(self.cache)

    def leave_prompt(self, request: Request) -> bool:
        """Remove a request that shares a prompt, not processed yet, with other samples.

        Returns False if the request does not, and True after its removal.
        """
        for queue in (self.waiting, self.running):
            for n, other in enumerate(queue):
                if request in other.copies:
                    other.copies.remove(request)
                    return True
                if request is other and request.copies:  # the next sample takes over the prompt
                    queue[n] = request.hand_over()
                    return True
        return False

    def preempt(self, request: Request) -> None:
        """Release a running request's blocks, drop its guesses and return it to the queue."""
        self.running.remove(request)
        request.sequence.drop_guesses()
        request.sequence.clear(self.cache)
        self.preempted.append(request)
        self.add(request)

    def schedule(self) -> list[tuple[Request, int]]:
        """Choose the requests of the next step, and the number of tokens to process for each.

        Blocks for these tokens are allocated. The number is 0 if the tokens have already been
        processed (`TokenSequence.ahead`).
        """
        self.preempted = []
        self._rank()
        self._start_waiting()
        shares = self._shares()
        step: list[tuple[Request, int]] = []
        for request in list(self.running):
            if request in self.running:  # not preempted meanwhile
                count = self._make_room(request, shares[request])
                if count or request.sequence.pending == 0:
                    step.append((request, count))
        return step

    def has_room_for_one_more(self) -> bool:
        """True if the cache has room for one more token of each running sequence."""
        needs = [self.cache.needs(request.sequence.cached, 1) for request in self.running]
        return self.cache.has_blocks([sum(pool) for pool in zip(*needs, strict=True)])

    def _rank(self) -> None:
        """Rank all requests and order them."""
        counts: Counter[str] = Counter()
        self._ranks = {}
        for request in sorted([*self.running, *self.waiting], key=_arrival):
            self._ranks[request] = counts[request.client]
            counts[request.client] += _sequences(request)
        self.running.sort(key=self._order)
        self.waiting.sort(key=self._order)

    def _rank_of(self, request: Request) -> int:
        return self._ranks.get(request, 0)  # 0: it came after the last `schedule`

    def _order(self, request: Request) -> tuple[int, int]:
        return self._rank_of(request), request.index

    def _yields(self, running: Request, waiting: Request) -> bool:
        """True if a running request is preempted for a waiting one of a client that has fewer."""
        return running.client != waiting.client and self._rank_of(running) > self._rank_of(waiting)

    def _start_waiting(self) -> None:
        first = min([*self.running[:1], *self.waiting[:1]], key=self._order, default=None)
        if first is not None and first not in self.running:
            while self._free_sequences() < _sequences(first):
                self.preempt(self.running[-1])
            self._adopt_prefix(first)
            self._start(first)
        for request in list(islice(self.waiting, MAX_CONSIDERED)):
            later = [one for one in self.running if self._yields(one, request)]
            if self._free_sequences() + sum(map(_sequences, later)) < _sequences(request):
                continue
            self._adopt_prefix(request)
            if self._fits(request, without=later):
                while later and not self._fits(request):
                    self.preempt(later.pop())
            if self._fits(request):
                self._start(request)
            else:
                request.sequence.clear(self.cache)

    def _fits(self, request: Request, *, without: Sequence[Request] = ()) -> bool:
        """True if a waiting request can start, or could if the requests `without` were preempted.

        The blocks that partly processed prompts still need are not available to it.
        """
        totals = self.cache.needs(request.sequence.cached, request.sequence.pending + 1)
        for one in self.running:
            sequence = one.sequence
            if one in without:
                more = [-len(table) for table in sequence.cached.tables.values()]
            elif sequence.pending > 1:
                more = self.cache.needs(sequence.cached, sequence.pending)
            else:
                continue
            totals = [a + b for a, b in zip(totals, more, strict=True)]
        free = self._free_sequences() + sum(map(_sequences, without))
        return free >= _sequences(request) and self.cache.has_blocks(totals)

    def _start(self, request: Request) -> None:
        self.waiting.remove(request)
        self.join(request)

    def _adopt_prefix(self, request: Request) -> None:
        if self.prefix_caching:
            request.sequence.adopt_prefix(self.cache)

    def _free_sequences(self) -> int:
        return self.max_sequences - sum(map(_sequences, self.running))

    def _shares(self) -> dict[Request, int]:
        """Return the number of tokens that the step may process for each running request."""
        left = self.token_budget
        shares: dict[Request, int] = {}
        prompts: list[Request] = []
        for request in self.running:
            if request.sequence.is_decoding:
                shares[request] = request.sequence.pending
                left -= shares[request]
            else:
                prompts.append(request)
        if shares and self.prompt_tokens is not None:
            left = min(left, self.prompt_tokens)
        for request in prompts[:1]:  # the oldest, which always gets a share
            sequence = request.sequence
            shares[request] = sequence.chunk(max(sequence.piece, left // len(prompts)))
            left -= shares[request]
        prompts = sorted(prompts[1:], key=lambda request: request.sequence.pending)
        for n, request in enumerate(prompts):
            shares[request] = request.sequence.chunk(left // (len(prompts) - n))
            left -= shares[request]
        for request in self.running:  # a piece of an exact prompt may be larger than an even share
            more = request.sequence.chunk(shares[request] + left) - shares[request]
            shares[request] += more
            left -= more
        return shares

    def _make_room(self, request: Request, count: int) -> int:
        """Allocate blocks for up to `count` tokens of a request; newer requests may be preempted.

        Returns the number of tokens that have blocks, or 0 if the request itself was preempted. A
        request that decodes gets blocks for all its guesses, so that its random numbers do not
        depend on other requests.
        """
        sequence = request.sequence
        while count:
            for most in (count,) if sequence.is_decoding else (*range(count, 0, -BLOCK), 1):
                fitting = sequence.chunk(most)
                if fitting and self.cache.has_room(sequence.cached, fitting):
                    self.cache.extend(sequence.cached, fitting)
                    return fitting
            newest = self.running[-1]
            self.preempt(newest)
            if newest is request:
                break
        return 0


def _arrival(request: Request) -> int:
    return request.index


def _sequences(request: Request) -> int:
    """Number of sequences that a request will have once its prompt is processed."""
    return 1 + len(request.copies)

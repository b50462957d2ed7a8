"""The tokens of one sequence, and their blocks in the cache."""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from torch import Tensor

from workhorse.nn.cache.paged import BLOCK, CachedSequence, PagedCache

PIECE = 4 * BLOCK
"""Maximum number of prompt tokens per pass of an exact sequence."""
SCORED = 8 * BLOCK
"""Maximum number of prompt tokens per pass whose log-probabilities are computed."""


class TokenSequence:
    """Tokens that a decoder processes, and the cache blocks of those already processed.

    The results of an exact sequence depend only on its tokens, bit by bit. Its prompt is processed
    by itself, in pieces that end at multiples of `PIECE`. All later tokens are processed one by
    one. They share a pass with other sequences only if that changes no bit
    (`Backend.invariant_batch`). If the decoder is invariant (`Backend.is_invariant`), no sequence
    needs this; see `Runner.new_sequence`.

    Args:
        tokens: the tokens known so far.
        cache: the cache that will hold them.
        exact: True if the sequence is exact. Then `tokens` is its prompt, and it shares prefixes
            only with exact sequences.
        most: the maximum number of tokens to process in a pass; None: any number.
        adapter: name of the adapter; None: the base. Sequences only share prefixes with sequences
            of the same adapter.
        is_scored: True if the logits of all tokens are needed, so that none is taken from the
            prefix cache.
        speculates: True if tokens are guessed after the first chosen one.

    Attributes:
        tokens: the tokens known so far, without those that `drop_oldest` removed.
        cached: the part of the sequence that is in the cache.
        prompt: length of an exact sequence's prompt; None if the sequence is not exact.
        dropped: number of tokens dropped because the context was full.
        guessed: number of guesses at the end of `tokens`.
        adopted: number of tokens that `adopt_prefix` took from the prefix cache.
        keeps_last: True if the last known token is always processed in a separate pass with the
            guesses after it, even when the tokens before it must be processed again.
        ahead: logits after the last token if they were computed before the token was copied to the
            host; otherwise None.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        cache: PagedCache,
        *,
        exact: bool = False,
        most: int | None = None,
        adapter: str | None = None,
        is_scored: bool = False,
        speculates: bool = False,
    ) -> None:
        self.tokens = list(tokens)
        self.cached: CachedSequence = cache.new_sequence()
        self.prompt = len(self.tokens) if exact else None
        self.most = most
        self.adapter = adapter
        self.dropped = 0
        self.guessed = 0
        self.is_scored = is_scored
        self.speculates = speculates
        self.adopted = 0
        self.keeps_last = False
        self.ahead: Tensor | None = None
        self._prefixes: list[bytes] = []
        self._labelled = 0

    @property
    def pending(self) -> int:
        """Number of tokens that are not in the cache yet."""
        return len(self.tokens) - self.cached.length

    @property
    def is_decoding(self) -> bool:
        """True if at most one token, and the guesses after it, are not in the cache yet."""
        return self.pending - self.guessed <= 1

    def next_tokens(self, count: int) -> list[int]:
        """Return the first `count` tokens that are not in the cache yet."""
        return self.tokens[self.cached.length : self.cached.length + count]

    def chunk(self, most: int) -> int:
        """Return the number of tokens to process in the next pass, up to `most`.

        It is 0 if the next piece of an exact sequence has more than `most` tokens.
        """
        if self.is_scored:
            most = min(most, SCORED)
        if self.prompt is None:
            kept = self.keeps_last and not self.is_decoding
            return max(0, min(self.pending - kept, most, self.most or most))
        return self.piece if self.piece <= most else 0

    @property
    def piece(self) -> int:
        """Minimum number of tokens to process in the next pass.

        For an exact sequence's prompt, it is the length of the next piece; see `PIECE`.
        """
        at = self.cached.length
        if self.prompt is None or at >= self.prompt:
            return min(1, self.pending)
        return min(at // PIECE * PIECE + PIECE, self.prompt) - at

    @property
    def is_step(self) -> bool:
        """True if the sequence is exact and its whole prompt is in the cache."""
        return self.prompt is not None and self.cached.length >= self.prompt

    def adopt_prefix(self, cache: PagedCache) -> None:
        """If no token is in the cache yet, reuse the longest prefix from the prefix cache.

        The prefix never includes the last token, because its logits must be computed.
        """
        if not self.cached.length and not self.is_scored:
            exact = self.prompt is not None
            end = min(len(self.tokens) - 1, self.prompt or len(self.tokens))
            prefixes = self._keys(end // BLOCK)
            cache.adopt_prefix(self.cached, prefixes, PIECE // BLOCK if exact else 1)
            self.adopted = self.cached.length
            self._labelled = self.adopted // BLOCK

    def label_prefix(self, cache: PagedCache) -> None:
        """Add this sequence's full blocks to the prefix cache, for other sequences.

        For an exact sequence, only whole pieces of the prompt (`PIECE`) are added.
        """
        length = min(self.cached.length, len(self.tokens) - self.guessed)
        if self.prompt is not None:
            length = min(length, self.prompt) // PIECE * PIECE
        if length // BLOCK > self._labelled:
            self._labelled = length // BLOCK
            cache.label(self.cached, self._keys(self._labelled))

    def _keys(self, count: int) -> list[bytes]:
        """Return keys of the first `count` blocks: digests of all tokens up to each block's end.

        Each digest includes the previous one. The first one depends on the adapter and on whether
        the sequence is exact, because other sequences have other keys and values.
        """
        while len(self._prefixes) < count:
            start = len(self._prefixes) * BLOCK
            kind = repr((self.prompt is not None, self.adapter)).encode()
            before = self._prefixes[-1] if self._prefixes else kind
            tokens = array("q", self.tokens[start : start + BLOCK]).tobytes()
            self._prefixes.append(blake2b(before + tokens, digest_size=16).digest())
        return self._prefixes[:count]

    def fork(self, cache: PagedCache) -> "TokenSequence":
        """Create a copy of the sequence that shares its cache blocks."""
        options = {"most": self.most, "adapter": self.adapter, "speculates": self.speculates}
        other = TokenSequence(self.tokens, cache, **options)
        other._share_blocks(self, cache)
        return other

    def _share_blocks(self, of: "TokenSequence", cache: PagedCache) -> None:
        cache.adopt(self.cached, of.cached.length, of.cached.tables)
        self.prompt, self.dropped = of.prompt, of.dropped
        self._prefixes, self._labelled = list(of._prefixes), of._labelled

    def guess(self, tokens: Sequence[int]) -> None:
        """Append guessed tokens."""
        self.tokens += tokens
        self.guessed += len(tokens)

    def take(self, token: int, *, agrees: bool) -> None:
        """Take the chosen next token.

        Args:
            token: the token.
            agrees: True if it is the first guess; otherwise it replaces the guesses.
        """
        self.keeps_last = self.speculates
        if agrees:
            self.guessed -= 1
        else:
            self.tokens[len(self.tokens) - self.guessed :] = [token]
            self.guessed = 0

    def follow(self, tokens: Sequence[int], cache: PagedCache) -> None:
        """Replace the guesses by the tokens that another sequence got.

        Guesses that agree stay in the cache, but the last token is always processed again.
        """
        guessed = self.tokens[len(self.tokens) - self.guessed :]
        agreed = 0
        for guess, token in zip(guessed, tokens[:-1], strict=False):
            if guess != token:
                break
            agreed += 1
        self.take_back(len(guessed) - agreed, cache)
        self.tokens += tokens[agreed:]
        self.guessed = 0

    def restore(self, tokens: Sequence[int]) -> None:
        """Return to these tokens of the request, without guesses."""
        self.tokens = list(tokens[self.dropped :])
        self.guessed = 0

    def look_ahead(self, logits: Tensor) -> None:
        """Keep the logits after a token that is not on the host yet."""
        self.ahead = logits

    def take_ahead(self) -> Tensor:
        """Return the logits of `look_ahead`, once."""
        logits, self.ahead = self.ahead, None
        assert logits is not None, "an empty chunk needs logits ahead"
        return logits

    def clear(self, cache: PagedCache) -> None:
        """Release all blocks. The tokens are kept and will be processed again."""
        self.ahead = None
        self._labelled = 0
        cache.clear(self.cached)

    def drop_guesses(self) -> None:
        """Remove the guessed tokens, which must not have been processed yet."""
        del self.tokens[len(self.tokens) - self.guessed :]
        self.guessed = 0

    def forget_blocks(self, cache: PagedCache) -> None:
        """Drop the block tables after a reset of the cache. The tokens are kept."""
        self.ahead = None
        self._labelled = 0
        self.cached = cache.new_sequence()

    def take_back(self, count: int, cache: PagedCache) -> None:
        """Remove the newest `count` tokens, also from the cache."""
        del self.tokens[len(self.tokens) - count :]
        cache.truncate(self.cached, min(self.cached.length, len(self.tokens)))

    def drop_oldest(self, context: int, cache: PagedCache) -> None:
        """Keep only the newest `context // 2` tokens, as if the sequence began there."""
        self.clear(cache)
        kept = max(1, context // 2)
        tokens = self.tokens[-kept:]
        dropped = self.dropped + len(self.tokens) - kept
        prompt = None if self.prompt is None else kept
        self.keeps_last = False  # the kept tokens are processed in one pass
        # In one statement, so that an interrupt cannot leave only some of them changed.
        self.tokens, self.dropped, self.prompt, self._prefixes = tokens, dropped, prompt, []

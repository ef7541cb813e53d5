"""Draft tokens: what followed the last tokens earlier in the text, to be checked in one pass.

A pass over the weights costs little more for several tokens than for one. So the tokens that would
follow if the text went on as it did before are read ahead together with the next one. Where the
model chooses the same tokens they are kept; from the first other one on they are taken back, states
included (amor/decode/rows.py). Each token is chosen from the model's own distribution with the
row's own random number, as without drafts, so the text is the same to the token. A draft is
accepted with the probability that the model gives it, and in its place stands a token of the rest
of the distribution: the acceptance rule of speculative sampling for a draft that is certain.
"""

from __future__ import annotations

from collections.abc import Sequence

LONGEST, SHORTEST = 8, 2  # tokens whose earlier occurrence is looked up
MOST = 15  # draft tokens per row and pass
# chance of a draft token to be accepted, by size of the match, before any was read; 0.7 for others
PRIOR = {2: 0.25, 3: 0.45, 4: 0.6}
RATE = 0.08  # of the EMA of that chance, per draft token that was judged
EXTRA = 0.15  # cost of one more token per pass, in passes, before any was timed
FIRST_PAUSE, LAST_PAUSE = 16, 512  # tokens without drafts after they stopped to pay


class NgramDraft:
    """Drafts for one row, by the last earlier occurrence of its last tokens."""

    def __init__(self, tokens: Sequence[int]):
        """tokens: of the prompt."""
        self.tokens: list[int] = []
        self.ends: dict[tuple[int, ...], int] = {}  # of each n-gram, the index of its last token
        self.match: int | None = None  # where the last tokens ended before
        self.size = SHORTEST  # how many of them
        sizes = range(SHORTEST, LONGEST + 1)
        self.chances = {size: PRIOR.get(size, 0.7) for size in sizes}  # by size of the match
        self.drafted_by = SHORTEST  # size of the match of the last draft
        self.pause, self.waited = FIRST_PAUSE, 0
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """Add a token of the text."""
        self.tokens.append(token)
        self.waited += 1
        last, self.match = len(self.tokens) - 1, None
        for size in range(LONGEST, SHORTEST - 1, -1):
            if size > len(self.tokens):
                continue
            key = tuple(self.tokens[-size:])
            if self.match is None:
                self.match, self.size = self.ends.get(key), size
            self.ends[key] = last

    def propose(self, cost: float) -> list[int]:
        """The tokens to draft, as many as pay; cost: of one more token per pass, in passes."""
        if self.match is None:
            return []
        self.drafted_by = self.size
        count = self.length(cost)
        if not count:
            if self.waited < self.pause:
                return []
            self.pause, count = min(2 * self.pause, LAST_PAUSE), 1
        draft: list[int] = []
        for place in range(self.match + 1, self.match + 1 + count):
            # where the occurrence reaches the end of the text, it goes on with the draft
            end = len(self.tokens)
            draft.append(self.tokens[place] if place < end else draft[place - end])
        return draft

    def length(self, cost: float) -> int:
        """The number of draft tokens that yields the most tokens per time."""
        best, speed, expected = 0, 1.0, 1.0
        for count in range(1, MOST + 1):
            expected += self.chances[self.size] ** count
            if expected / (1 + cost * count) > speed:
                best, speed = count, expected / (1 + cost * count)
        return best

    def observe(self, drafted: int, accepted: int) -> None:
        """Update by the first `accepted` of `drafted` tokens having been kept."""
        for kept in [True] * accepted + [False] * (accepted < drafted):
            self.chances[self.drafted_by] += RATE * (kept - self.chances[self.drafted_by])
        self.waited = 0
        if accepted:
            self.pause = FIRST_PAUSE


class PassCost:
    """The cost of one more token per pass, in passes of one token per row, as timed so far."""

    def __init__(self) -> None:
        self.single: dict[int, float] = {}  # seconds of a pass by number of rows
        self.extra = EXTRA

    def observe(self, rows: int, tokens: int, seconds: float) -> None:
        """Add a timed pass of `tokens` tokens for `rows` rows."""
        if tokens == rows:
            known = self.single.get(rows, seconds)
            # a pass that was disturbed by something else counts little
            self.single[rows] = known + 0.1 * (min(seconds, 2 * known) - known)
        elif rows in self.single:
            extra = (seconds / self.single[rows] - 1) / (tokens - rows)
            self.extra += 0.1 * (min(max(extra, 0.0), 1.0) - self.extra)

    def per_token(self, rows: int) -> float:
        """Passes that one more token of one row costs, shared by the rows that gain from it."""
        return self.extra * rows

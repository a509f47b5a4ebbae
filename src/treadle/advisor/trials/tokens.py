"""A redacted workload with values of the copy in the place of its tokens, equal for equal.

The commonest token of a field stands for its commonest value, and so on, so
that the skew of both fits. A token that was seen in several fields stands for
one value, so joins fit too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from treadle.advisor.trials.values import replaced, values
from treadle.advisor.trials.workload_file import Request

FIELDS_MAX = 500
TOKENS_MAX = 20_000

# The values of a field, the commonest first.
Commonest = Callable[[str, str, int], list[Any]]


@dataclass(frozen=True, slots=True)
class Restored:
    """Requests with values for tokens; read anew each time."""

    requests: Iterable[Request]
    values: Mapping[str, Any]

    def __iter__(self) -> Iterator[Request]:
        for request in self.requests:
            yield replaced(request, self._value)

    def _value(self, path: str, token: Any) -> Any:
        return self.values.get(repr(token), token)


def restored(requests: Iterable[Request], commonest: Commonest) -> Restored:
    """The requests with values that `commonest` finds; tokens that stand for none stay."""
    tokens: dict[tuple[str, str], Counter[str]] = {}
    for request in requests:
        if request.operation == "insert":
            continue
        for path, token in values(request):
            if path and token is not None and not isinstance(token, bool):
                counts = tokens.get((request.collection, path))
                if counts is None:
                    if len(tokens) >= FIELDS_MAX:
                        continue
                    counts = tokens[request.collection, path] = Counter()
                if len(counts) < TOKENS_MAX:
                    counts[repr(token)] += 1
    found: dict[str, Any] = {}
    # Where tokens are most, the skew matters most.
    for (collection, path), counts in sorted(tokens.items(), key=lambda each: -each[1].total()):
        missing = [token for token, _ in counts.most_common() if token not in found]
        taken = {repr(value) for value in found.values()}
        free = [
            value
            for value in commonest(collection, path, len(counts) + len(taken))
            if repr(value) not in taken
        ]
        found.update(zip(missing, free, strict=False))
    return Restored(requests, found)

"""Rules of one model, looked up by what they are and by what they implement."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, Literal, TypeAlias, TypeVar

Maintain: TypeAlias = Literal["write", "stream", "schedule"]
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


def default(method: F) -> F:
    """Mark a method of the interface that means nothing unless a rule overrides it."""
    method.is_default = True  # type: ignore[attr-defined]
    return method


def implements(rule: object, method: str) -> bool:
    """Whether a rule overrides a method of the interface."""
    return not getattr(getattr(type(rule), method), "is_default", False)


class RuleSet:
    """Some rules in the order of their declaration. Lookups are remembered until a rule is added."""

    # Rules are defined above models (a rule has a target and a source), hence `Any`; `of_type` is typed.
    def __init__(self, rules: Iterable[Any] = ()) -> None:
        self._rules = [*rules]
        # What follows from the rules, by what asked for it.
        self.facts: dict[Hashable, Any] = {}

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    def add(self, rule: Any) -> None:
        self._rules.append(rule)
        self.facts.clear()

    def of_type(self, kind: type[R], maintain: Maintain | None = None) -> list[R]:
        """Return the rules of a class; those maintained in one way, if asked."""
        key = kind, maintain
        if key not in self.facts:
            rules = [each for each in self._rules if maintain is None or each.maintain == maintain]
            self.facts[key] = [each for each in rules if isinstance(each, kind)]
        chosen: list[R] = self.facts[key]
        return chosen

    def implementing(self, method: str) -> list[Any]:
        """Return the rules that override a method of the interface."""
        return self.memo(method, lambda: [rule for rule in self._rules if implements(rule, method)])

    def memo(self, key: Hashable, make: Callable[[], R]) -> R:
        """Return what follows from these rules, made when it is first asked for."""
        try:
            made: R = self.facts[key]
        except KeyError:
            made = self.facts[key] = make()
        return made


class Effects(RuleSet):
    """What a write of a model entails: the rules derived from its documents, and what the graph found."""

    def __init__(self, rules: Iterable[Any] = ()) -> None:
        super().__init__(rules)
        # Whether a write entails nothing else, so that one plain command is all of it.
        self.is_plain = True
        # Whether what follows can change the document that was written.
        self.may_affect_itself = False
        # The stored paths that a write must not change without being followed; None for all.
        self.followed: set[str] | None = set()

    @property
    def on_write(self) -> list[Any]:
        """The rules that must follow a write in the same commit."""
        return self.memo("on write", lambda: [rule for rule in self if rule.maintain == "write"])

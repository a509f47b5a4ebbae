"""A pipeline with `$lookup` as the read of a card that takes its place.

The stage is taken out, and names of what it joined become names in the card.
What is left goes as a find where a find can say it. A pipeline that uses a
field which the card does not hold, or uses the joined documents in a way that
a card has no words for, is not rewritten.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from treadle.advisor.loop.answers import at, without
from treadle.advisor.loop.workload_file import Request
from treadle.advisor.proposals import Derived

Row = Mapping[str, Any]
_UNTOUCHED = ("$limit", "$skip", "$sample", "$count")
_TAKES_FIRST = ("$first", "$arrayElemAt")


class CannotRewrite(Exception):
    """The pipeline uses what the card does not hold."""


@dataclass(slots=True)
class JoinRewriter:
    """Rewrites one pipeline; `aliases` are the names under which it joined something."""

    request: Request
    cards: Sequence[Derived]
    # Name -> the card, and whether the array was unwound.
    aliases: dict[str, tuple[Derived, bool]] = field(default_factory=dict)
    # Whether the answer holds joined documents as a whole.
    whole: bool = False

    def rewritten(self) -> Request | None:
        stages: list[dict[str, Any]] = []
        try:
            for stage in self.request.body.get("pipeline", ()):
                if not isinstance(stage, Mapping) or len(stage) != 1:
                    return None
                stages += self._stage(*next(iter(stage.items())))
        except CannotRewrite:
            return None
        if not self.aliases:
            return None
        names = {next(iter(stage)) for stage in stages}
        self.whole = not names & {"$project", "$group", "$count", "$replaceRoot", "$replaceWith"}
        found = _as_find(stages)
        body = {
            name: value for name, value in self.request.body.items() if name in ("collation", "hint", "let")
        }
        if found is not None:
            return replace(self.request, operation="find", body={**body, **found})
        return replace(self.request, body={**body, "pipeline": stages})

    def _stage(self, name: str, body: Any) -> list[dict[str, Any]]:
        if name == "$lookup":
            return self._lookup(body)
        if name == "$unwind":
            path = (
                body if isinstance(body, str) else body.get("path", "") if isinstance(body, Mapping) else ""
            )
            alias = path.removeprefix("$")
            if alias in self.aliases:
                return self._unwound(alias, body)
        if name in ("$addFields", "$set") and isinstance(body, Mapping) and self._takes_first(body):
            return []
        if not self.aliases or name in _UNTOUCHED:
            return [{name: body}]
        if name in ("$match", "$sort", "$project", "$group", "$addFields", "$set"):
            return [{name: self._renamed(body, is_filter=name == "$match")}]
        if _mentions(body, self.aliases):
            raise CannotRewrite
        return [{name: body}]

    def _lookup(self, body: Any) -> list[dict[str, Any]]:
        if not isinstance(body, Mapping):
            raise CannotRewrite
        for card in self.cards:
            joins = (card.source, card.by, card.key)
            if joins != tuple(body.get(key) for key in ("from", "localField", "foreignField")):
                continue
            alias = str(body.get("as"))
            if "let" in body or not self._shows_only(body.get("pipeline", ()), card) or "." in alias:
                break
            if alias == card.by.partition(".")[0]:
                break
            self.aliases[alias] = (card, False)
            return []
        return [{"$lookup": dict(body)}]

    @staticmethod
    def _shows_only(pipeline: Any, card: Derived) -> bool:
        """Whether a `$lookup`'s own pipeline does nothing but choose fields that the card holds."""
        if not pipeline:
            return True
        if len(pipeline) != 1 or not isinstance(projection := pipeline[0].get("$project"), Mapping):
            return False
        shown = {name for name, value in projection.items() if value in (1, True)}
        return len(shown) + (projection.get("_id") == 0) == len(projection) and shown <= {
            *card.paths,
            card.key,
        }

    def _unwound(self, alias: str, body: Any) -> list[dict[str, Any]]:
        card, _ = self.aliases[alias]
        self.aliases[alias] = (card, True)
        if isinstance(body, Mapping):
            if body.get("includeArrayIndex"):
                raise CannotRewrite
            if body.get("preserveNullAndEmptyArrays"):
                return []
        return [{"$match": {card.name: {"$ne": None}}}]

    def _takes_first(self, body: Mapping[str, Any]) -> bool:
        """`{"$set": {"customer": {"$first": "$customer"}}}` is an unwinding that keeps rows without one."""
        if len(body) != 1:
            return False
        name, value = next(iter(body.items()))
        if name not in self.aliases or value not in (
            {"$first": f"${name}"},
            {"$arrayElemAt": [f"${name}", 0]},
        ):
            return False
        self.aliases[name] = (self.aliases[name][0], True)
        return True

    def _renamed(self, value: Any, is_filter: bool = False) -> Any:
        if isinstance(value, Mapping):
            if len(value) == 1 and next(iter(value)) in _TAKES_FIRST:
                ((operator, argument),) = value.items()
                of = argument if operator == "$first" else argument[0] if argument[1:] == [0] else None
                if isinstance(of, str) and of.startswith("$") and self._alias(of[1:]):
                    return "$" + self._path(of[1:])
            for name, each in value.items():
                # `{"customer": {"name": 1}}` names fields of what was joined.
                if name in self.aliases and isinstance(each, Mapping) and not is_filter:
                    raise CannotRewrite
            return {self._name(str(name)): self._renamed(each, is_filter) for name, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._renamed(each, is_filter) for each in value]
        if isinstance(value, str) and value.startswith("$") and not is_filter and self._alias(value[1:]):
            path = "$" + self._path(value[1:])
            # What was not unwound is an array of the one value.
            return path if self.aliases[self._alias(value[1:])][1] else [path]
        return value

    def _name(self, name: str) -> str:
        return self._path(name) if not name.startswith("$") and self._alias(name) else name

    def _alias(self, path: str) -> str:
        alias = path.partition(".")[0]
        return alias if alias in self.aliases else ""

    def _path(self, path: str) -> str:
        alias, _, rest = path.partition(".")
        card, _ = self.aliases[alias]
        if rest == card.key:
            return card.by
        if not rest:
            return card.name
        if rest not in card.paths:
            raise CannotRewrite
        return card.paths[rest]

    # -- answers -------------------------------------------------------------------------------

    def plain_before(self, row: Row) -> dict[str, Any]:
        """A row of the answer before, with of each joined document what the card holds."""
        # Once the pattern is applied, or where a copy was made by hand, the rows hold the copy too.
        result = without(row, *self.aliases, *self._copies())
        for alias, (card, _) in self.aliases.items():
            joined = row.get(alias)
            if isinstance(joined, (list, tuple)):
                joined = joined[0] if joined else None
            held = {name: at(joined, name) for name in card.paths} if isinstance(joined, Mapping) else {}
            result[f"@{card.name}"] = {name: value for name, value in held.items() if value is not None}
        return result

    def plain_after(self, row: Row) -> dict[str, Any]:
        places = {card.name: card for card, _ in self.aliases.values()}
        result = without(row, *self._copies())
        for place, card in places.items():
            held = {name: at(row, path) for name, path in card.paths.items()}
            result[f"@{place}"] = {name: value for name, value in held.items() if value is not None}
        return result

    def _copies(self) -> list[str]:
        cards = {card.name: card for card, _ in self.aliases.values()}
        return [path for card in cards.values() for path in (card.name, *card.paths.values())]


def _mentions(value: Any, aliases: Mapping[str, Any]) -> bool:
    if isinstance(value, Mapping):
        return any(_mentions(each, aliases) for pair in value.items() for each in pair)
    if isinstance(value, (list, tuple)):
        return any(_mentions(each, aliases) for each in value)
    return isinstance(value, str) and value.lstrip("$").partition(".")[0] in aliases


def _as_find(stages: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The body of a find that says the same, where one can."""
    order = ("$match", "$sort", "$skip", "$limit", "$project")
    reached = 0
    body: dict[str, Any] = {"filter": {}}
    for stage in stages:
        ((name, value),) = stage.items()
        if name not in order or order.index(name) < reached or (name != "$match" and name[1:] in body):
            return None
        reached = order.index(name)
        if name == "$match":
            body["filter"] = {"$and": [body["filter"], value]} if body["filter"] else value
        elif name == "$project":
            if not all(
                each in (0, 1, True, False) for each in value.values() if not isinstance(each, Mapping)
            ):
                return None
            if any(isinstance(each, (Mapping, str, list)) for each in value.values()):
                return None
            body["projection"] = value
        else:
            body[name[1:]] = value
    return body

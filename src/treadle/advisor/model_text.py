"""A draft as Python: the models of its collections, with what it proposes; and models from such a text.

Of each collection there is one class. A source that is defined later is named as text, so that models may
refer to each other.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable
from dataclasses import dataclass, field

from treadle.advisor.declare import (
    LINE_LENGTH,
    Source,
    Wrap,
    class_name,
    index_model,
    quote,
    reference_keywords,
    with_reference_type,
)
from treadle.advisor.facts import CollectionFacts, Scan
from treadle.advisor.proposals import Derived, Draft
from treadle.errors import TreadleError, UsageError
from treadle.model.document import Document

_HEAD = '''"""Models of the database {database}, with what the advisor proposes.

Each maintained value follows the change stream, so that writers which do not use
Treadle are covered too: `treadle watch --app models:store` keeps it right.
"""

'''
_STORE = """def store() -> Store:
    return Store.open(environ["MONGODB_URI"], models=MODELS)"""
_PATTERNS = {"sum": "Sum", "average": "Average", "min": "Min", "max": "Max"}


def render(scan: Scan, draft: Draft, *, maintain: str | None = None, validation: str | None = None) -> str:
    """The models of a draft's collections. `maintain` and `validation` are said where they are given."""
    text = _Text(scan, draft, maintain, validation)
    text.classes()
    return text.source.text()


def render_module(scan: Scan, draft: Draft) -> str:
    """The same as a module for `treadle watch`: with a list of the models, and a function that opens a Store.

    The types of a generated model may be those of a sample, so it validates nothing.
    """
    text = _Text(scan, draft, "stream", "off")
    text.classes()
    line = f"MODELS = [{', '.join(text.models)}]"
    if len(line) > LINE_LENGTH:
        line = "\n".join(["MODELS = [", *(f"    {name}," for name in text.models), "]"])
    text.source.blocks += [line, _STORE]
    head = _HEAD.format(database=ascii(scan.database)[1:-1].replace('"', "'"))
    return head + text.source.text()


def load_models(text: str) -> list[type[Document]]:
    """The models that a text of `render` declares, in its order.

    Runs the text: only what this process rendered, or what the user's own folder holds, never what a
    database holds.
    """
    name = "models"
    module = types.ModuleType(name)
    # Pydantic looks there for the names in annotations. To a worker, rules are the same as those of
    # `treadle watch --app models:store`, which has this name for them.
    former = sys.modules.get(name)
    sys.modules[name] = module
    try:
        exec(compile(text, "models.py", "exec", dont_inherit=True), vars(module))
    except TreadleError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UsageError(
            f"models.py does not run ({reason}); restore it, or make the plan again",
            code="plan-folder-invalid",
        ) from error
    finally:
        sys.modules.pop(name)
        if former is not None:
            sys.modules[name] = former
    return [
        each
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, Document) and each.__module__ == name
    ]


@dataclass(slots=True)
class _Text:
    scan: Scan
    draft: Draft
    maintain: str | None
    validation: str | None
    source: Source = field(default_factory=Source)
    # Collection -> the name of its class, as far as it is defined.
    defined: dict[str, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    cards: dict[tuple[str, tuple[str, ...]], str] = field(default_factory=dict)
    facts: dict[str, CollectionFacts] = field(default_factory=dict)

    @property
    def models(self) -> list[str]:
        return list(self.defined.values())

    def classes(self) -> None:
        collections = self._order()
        self.facts = {name: self._typed(self.scan.collections[name]) for name in collections}
        # Names first: a class may be named before it is defined.
        self.names = {name: self.source.name(class_name(name)) for name in collections}
        for name in collections:
            self._class(self.facts[name])
        self.source.blocks += self.draft.classes

    def _order(self) -> list[str]:
        """The collections, each after the sources of its fields where that is possible."""
        draft = self.draft
        others = [each.collection for each in draft.indexes]
        others += [each.collection for each in draft.wrapped] + [each.collection for each in draft.lines]
        ends = [name for each in draft.derived for name in (each.source, each.target)]
        waiting = list(dict.fromkeys([*ends, *others]))
        placed: list[str] = []
        while waiting:
            ready = (name for name in waiting if not self._sources(name) - {*placed, name})
            chosen = next(ready, waiting[0])
            waiting.remove(chosen)
            placed.append(chosen)
        return placed

    def _sources(self, collection: str) -> set[str]:
        return {each.source for each in self.draft.derived if each.target == collection}

    def _typed(self, facts: CollectionFacts) -> CollectionFacts:
        """The facts, in which references have the type of what they refer to."""
        for each in self.draft.derived:
            child, parent = ends(each)
            if child == facts.name:
                facts = with_reference_type(facts, each.by, self.scan.collections[parent], each.key)
        return facts

    def _class(self, facts: CollectionFacts) -> None:
        own = [each for each in self.draft.derived if each.target == facts.name]
        lines = [line for each in own for line in self._field(each)]
        replaced = [each for each in self.draft.lines if each.collection == facts.name]
        lines += [each.source for each in replaced]
        self.source.wraps = {
            each.path: _wrap(each.pattern) for each in self.draft.wrapped if each.collection == facts.name
        }
        self.source.document(
            facts,
            keywords=self._keywords(facts.name),
            without=frozenset(each.replaces for each in replaced if each.replaces),
            needed=self._referred(facts.name),
            added=lines,
            reserved=self.names[facts.name],
        )
        self.source.wraps = {}
        self.defined[facts.name] = self.names[facts.name]

    def _referred(self, collection: str) -> frozenset[str]:
        """The stored fields that declarations name, so that none of them is left out of a long model."""
        derived = self.draft.derived
        named = {each.by.partition(".")[0] for each in derived if ends(each)[0] == collection}
        named |= {each.key for each in derived if ends(each)[1] == collection}
        of_sources = [each for each in derived if each.source == collection]
        return frozenset(named | {path for each in of_sources for path in (*each.of, *dict(each.sort))})

    def _keywords(self, collection: str) -> list[str]:
        own = [each for each in self.draft.indexes if each.collection == collection]
        lines = "".join(f"    {index_model(each.keys, each.name)},\n" for each in own)
        keywords = [f"indexes=[\n{lines}]"] if lines else []
        return [*keywords, *([f"validation={quote(self.validation)}"] if self.validation else [])]

    def _field(self, each: Derived) -> list[str]:
        """The lines of one derived field."""
        child, parent = ends(each)
        names = {**Source.names(self.facts[child]), "_id": "id"}
        keywords = [reference_keywords(names[each.by], self.facts[parent], each.key)]
        source = self.facts[each.source]
        of = {**Source.names(source), "_id": "id"}
        if each.operator == "copy":
            card = self._card(source, each.of)
            return self._declared(each, f"{card} | None", "ExtendedReference", keywords, "None")
        if each.operator == "top":
            card = self._card(source, each.of)
            sort = [quote(("-" if way < 0 else "") + of[path]) for path, way in each.sort]
            order = sort[0] if len(sort) == 1 else f"[{', '.join(sort)}]"
            keywords += [f"sort={order}", f"size={each.size}"]
            return self._declared(each, f"list[{card}]", "Subset", keywords, "[]")
        if each.operator == "count":
            return self._declared(each, "int", "Count", keywords, "0")
        kind = self.source.annotation(source, source.fields[each.of[0]], self.names[each.source])
        default = "Decimal(0)" if kind == "Decimal" else "0"
        if each.operator != "sum":
            kind = "float" if each.operator == "average" and kind == "int" else kind
            kind, default = f"{kind} | None", "None"
        pattern = _PATTERNS[each.operator]
        return self._declared(each, kind, pattern, [quote(of[each.of[0]]), *keywords], default)

    def _declared(
        self, each: Derived, annotation: str, pattern: str, keywords: Iterable[str], default: str
    ) -> list[str]:
        name = self.names[each.source]
        parts = [name if each.source in self.defined else quote(name), *keywords]
        if self.maintain is not None:
            parts.append(f"maintain={quote(self.maintain)}")
        call = f"{pattern}({', '.join(parts)})"
        line = f"{each.name}: Annotated[{annotation}, {call}] = {default}"
        if pattern != "Subset" and len(line) + 4 <= LINE_LENGTH:
            return [line]
        inside = f"    {annotation}, {call}"
        parts = [inside] if len(inside) + 4 <= LINE_LENGTH else [f"    {annotation},", f"    {call},"]
        return [f"{each.name}: Annotated[", *parts, f"] = {default}"]

    def _card(self, source: CollectionFacts, fields: tuple[str, ...]) -> str:
        """The model of some of a source's fields, once for all that show the same."""
        key = source.name, fields
        if key not in self.cards:
            name = f"{class_name(source.name)}Card"
            self.cards[key] = self.source.card(name, source, [source.fields[each] for each in fields])
        return self.cards[key]


def _wrap(pattern: str) -> Wrap:
    return lambda annotation: f"Annotated[\n        {annotation}, {pattern}\n    ]"


def ends(each: Derived) -> tuple[str, str]:
    """The collection that holds the reference of a derived field, and the one that it refers to."""
    return (each.target, each.source) if each.operator == "copy" else (each.source, each.target)

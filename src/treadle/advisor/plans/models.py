"""One `models.py` for a set of findings: the advisor's own declarations, merged per collection.

A finding changes the plain model of a collection: it adds a field, puts a
pattern on one, gives a reference the type of the ids that it holds, or adds a
keyword of the class. Those changes are collected. What cannot be merged is
left out with the reason.
"""

from __future__ import annotations

import copy
import itertools
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from treadle.advisor.declare import LINE_LENGTH, Source, camel_case, declaration, styled
from treadle.advisor.facts import CollectionFacts, Scan
from treadle.advisor.interface import Finding
from treadle.advisor.naming import words
from treadle.advisor.plans.folder import Place
from treadle.advisor.plans.pieces import Class, Line, parse
from treadle.errors import TreadleError, UsageError
from treadle.graph.graph import Graph
from treadle.model.document import Document

CARD_WORDS_MAX = 4
_MODULES = itertools.count()
_HEAD = '''"""Models of the database {database}, with what the advisor proposes.

Each maintained value follows the change stream, so that writers which do not use
Treadle are covered too: `treadle watch --app models:store` keeps it right.
"""

'''
_HEAD_BY_WRITE = '''"""Models of the database {database}, with what the advisor proposes."""

'''
_STORE = """def store() -> Store:
    return Store.open(environ["MONGODB_URI"], models=MODELS)"""


@dataclass(frozen=True, slots=True)
class Combined:
    """The text, the findings in it, the fields that they fill, and the findings that it does without."""

    text: str
    findings: tuple[Finding, ...]
    places: tuple[Place, ...]
    left_out: tuple[tuple[Finding, str], ...] = ()


class Unmergeable(Exception):
    """Two declarations ask for different things in one place."""


def combine(scan: Scan, findings: Sequence[Finding], maintain: str | None = "stream") -> Combined:
    """Merge the declarations of these findings, the first ones first."""
    merged, left_out = _Merge(scan, maintain), list[tuple[Finding, str]]()
    for each in findings:
        attempt = copy.deepcopy(merged)
        try:
            attempt.add(each)
            Graph(load_models(attempt.text()))
        except (Unmergeable, TreadleError) as error:
            reason = f"It does not go together with the others: {getattr(error, 'message', error)}"
            left_out.append((each, reason))
        else:
            merged = attempt
    merged.prune_indexes()
    return Combined(
        merged.text(), tuple(merged.findings), tuple(dict.fromkeys(merged.places)), tuple(left_out)
    )


def fields_kept_by_hand(scan: Scan, finding: Finding) -> list[str]:
    """The fields of documents on which a finding puts a pattern: a program writes them already."""
    found: list[str] = []
    for each in parse(finding.declaration):
        facts = scan.collections.get(each.collection) if each.collection is not None else None
        stored = {field.name for field in facts.top()} if facts is not None else set()
        found += [
            f"{each.collection}.{line.stored}"
            for line in each.lines.values()
            if line.carries_pattern and line.stored in stored
        ]
    return found


def load_models(text: str) -> list[type[Document]]:
    """The models that a module declares, in its order."""
    name = f"treadle_models_{next(_MODULES)}"
    module = types.ModuleType(name)
    # Pydantic looks there for the names in annotations.
    sys.modules[name] = module
    try:
        exec(compile(text, "models.py", "exec", dont_inherit=True), vars(module))
    except TreadleError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UsageError(
            f"models.py does not run ({reason}); restore it, or make the plan anew",
            code="plan-folder-invalid",
        ) from error
    finally:
        sys.modules.pop(name)
    return [
        each
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, Document) and each.__module__ == name
    ]


@dataclass(slots=True)
class _Merge:
    """The classes so far, and what each collection's plain model says."""

    scan: Scan
    maintain: str | None
    classes: dict[str, Class] = field(default_factory=dict)
    # Per collection the stored names of its plain model, with what they declare.
    plain: dict[str, dict[str, str]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)

    def __deepcopy__(self, memo: object) -> _Merge:
        """A copy whose parts can change; facts and findings are shared."""
        return _Merge(
            self.scan, self.maintain, {name: copy.copy(each) for name, each in self.classes.items()},
            dict(self.plain), [*self.findings], [*self.places],
        )  # fmt: skip

    def add(self, finding: Finding) -> None:
        classes = parse(finding.declaration, self.maintain)
        for each in classes:
            facts = self.facts(each.collection)
            if facts is not None and facts.name not in self.plain:
                self._include(self._read_plain(facts), None)
        self._include(classes, finding)
        self.findings.append(finding)

    def prune_indexes(self) -> None:
        """Let go of declared indexes whose keys another one of the collection begins with."""
        graph = Graph(load_models(self.text()))
        for each in self.classes.values():
            needed = [
                tuple(index.document["key"].items())
                for rule in graph.rules
                for source, index in rule.storage().indexes
                if source.collection == each.collection
            ]
            each.prune_indexes(needed)

    def _read_plain(self, facts: CollectionFacts) -> list[Class]:
        """The plain model of a collection, with the classes that it uses."""
        plain = parse(declaration(facts))
        self.plain[facts.name] = {stored: line.meaning for stored, line in plain[-1].lines.items()}
        return plain

    def facts(self, collection: str | None) -> CollectionFacts | None:
        return self.scan.collections.get(collection) if collection is not None else None

    def text(self) -> str:
        """The module: every class after those that it uses."""
        source, defined = Source(), dict[str, None]()
        waiting = list(self.classes.values())
        while waiting:
            each = _next(waiting, defined, self.classes)
            waiting.remove(each)
            source.blocks.append(_without_validation(each).text(defined, self.classes))
            defined[each.name] = None
        models = [name for name in defined if self._is_document(self.classes[name])]
        source.blocks += [_list(models), _STORE]
        head = _HEAD if self.maintain == "stream" else _HEAD_BY_WRITE
        return head.format(database=ascii(self.scan.database)[1:-1].replace('"', "'")) + source.text()

    # -- merging ---------------------------------------------------------------------------

    def _include(self, classes: list[Class], finding: Finding | None) -> None:
        """Take over the classes of one declaration."""
        names: dict[str, str] = {}
        for each in classes:
            collection = each.collection
            known = self._model(collection)
            if known is not None:
                names[each.name] = known.name
                self._merge(known, each.with_names(names), finding)
                continue
            renamed = each.with_names(names)
            names[each.name] = renamed.name = self._free_name(renamed)
            self.classes[renamed.name] = renamed
            if collection is not None and finding is not None:
                self._note(collection, list(renamed.lines.values()))

    def _merge(self, known: Class, other: Class, finding: Finding | None) -> None:
        """Give a collection's model what a finding changes in its plain one."""
        collection = other.collection or ""
        plain = self.plain.get(collection, {})
        merged = dict(known.lines)
        changed: list[Line] = []
        for stored, line in other.lines.items():
            if plain.get(stored) == line.meaning:
                continue
            current = merged.get(stored)
            if current is None or plain.get(stored) == current.meaning:
                if stored not in plain and line.is_required:
                    raise Unmergeable(
                        f"the documents of {collection} have no {stored} yet; migrate them first"
                    )
                merged[stored] = line
                changed.append(line)
            elif current.meaning != line.meaning:
                line = self._beside(collection, merged, current, line, stored in plain)
                changed += [line] if merged.get(line.stored) is line else []
        for stored in plain:
            if stored not in other.lines:
                merged.pop(stored, None)
        known.lines = merged
        known.comments = list(dict.fromkeys([*known.comments, *other.comments]))
        known.keywords = _joined(known.name, known.keywords, other.keywords)
        if finding is not None:
            self._note(collection, changed)

    def _beside(
        self, collection: str, merged: dict[str, Line], current: Line, line: Line, existing: bool
    ) -> Line:
        """A line for a place that another finding has changed as well; the one that was put in, or is in."""
        if not line.carries_pattern:
            # Two types for one field: the pattern's, else the one that allows more.
            if not current.carries_pattern and "None" in line.text and "None" not in current.text:
                merged[line.stored] = line
            return merged[line.stored]
        if not current.carries_pattern and existing:
            merged[line.stored] = line
            return line
        if existing or line.by is None or line.stored != line.name:
            raise Unmergeable(f"{collection}.{line.stored} carries another pattern already")
        name = "_".join((*words(line.name), "by", *words(line.by)))
        facts = self.facts(collection)
        line = line.renamed(styled(facts, name) if facts is not None else name)
        if line.stored in merged:
            raise Unmergeable(f"{collection}.{line.stored} is there already")
        merged[line.stored] = line
        return line

    def _note(self, collection: str, lines: list[Line]) -> None:
        self.places += [Place(collection, line.stored) for line in lines if line.carries_pattern]

    # -- names -----------------------------------------------------------------------------

    def _model(self, collection: str | None) -> Class | None:
        found = (each for each in self.classes.values() if each.collection == collection)
        return None if collection is None else next(found, None)

    def _free_name(self, each: Class) -> str:
        """Its own name; where that is another class, one that says what it shows."""
        same = [name for name, other in self.classes.items() if other.body == each.body]
        if each.collection is None and each.name in same:
            return each.name
        tried = [each.name]
        if each.collection is not None:
            tried += [camel_case(words(each.collection)), camel_case((*words(each.collection), "document"))]
        else:
            shown = camel_case(
                [part for line in each.lines.values() for part in words(line.name)][:CARD_WORDS_MAX]
            )
            about = each.name.removesuffix("Card")
            tried += [f"{about}{shown}Card", f"{about}{shown}AndMoreCard"]
        for name in tried:
            if name not in self.classes or (each.collection is None and name in same):
                return name
        raise Unmergeable(f"there is another class {each.name}")

    def _is_document(self, each: Class) -> bool:
        return each.collection is not None or any(
            base in self.classes and self._is_document(self.classes[base]) for base in each.bases
        )


def _without_validation(each: Class) -> Class:
    """The types of a generated model may be those of a sample, so it is no validator."""
    if each.collection is None:
        return each
    return replace(each, keywords={**each.keywords, "validation": '"off"'})


def _list(models: list[str]) -> str:
    line = f"MODELS = [{', '.join(models)}]"
    return (
        line
        if len(line) <= LINE_LENGTH
        else "\n".join(["MODELS = [", *(f"    {name}," for name in models), "]"])
    )


def _joined(name: str, keywords: dict[str, str], others: dict[str, str]) -> dict[str, str]:
    """The keywords of two declarations of one class; lists of indexes become one."""
    joined = dict(keywords)
    for keyword, value in others.items():
        current = joined.get(keyword)
        if keyword == "indexes" and current is not None:
            lines = dict.fromkeys([*current.split("\n")[1:-1], *value.split("\n")[1:-1]])
            joined[keyword] = "\n".join(["[", *lines, "]"])
        elif current is None or current == value:
            joined[keyword] = value
        else:
            raise Unmergeable(f"{name} has {keyword}= already")
    return joined


def _next(waiting: list[Class], defined: dict[str, None], classes: dict[str, Class]) -> Class:
    """The next class whose parts are all defined; else one that only names others as sources."""
    for soft in (False, True):
        for each in waiting:
            used = [name for name, source in each.references() if name in classes and not (soft and source)]
            if all(name in defined for name in used):
                return each
    raise Unmergeable("its classes contain each other")

"""What the writes of documents share: encoding, clear errors, auto fields, validation and write hooks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from treadle.engine.pipelines import derivation
from treadle.errors import Conflict, DataError, InvalidValue, TreadleError, UsageError
from treadle.graph.batch import Batch
from treadle.graph.changes import Changes
from treadle.graph.model_entry import ModelEntry
from treadle.graph.owned import Touch
from treadle.graph.rule import Rule
from treadle.model.bson_types import too_deep
from treadle.model.codec import Codec, InvalidDocument
from treadle.model.document import Document
from treadle.model.text import escape_text, get_logger
from treadle.plan import Plan, Raw, Update, by_id, find_one, outside, update_one
from treadle.plan.capabilities import clock
from treadle.plan.server_errors import translate
from treadle.query.comparison import identical
from treadle.query.field_types import load_what_fits
from treadle.query.filters import parse_filter
from treadle.query.keys import freeze
from treadle.query.paths import put, value_at

D = TypeVar("D", bound=Document)
# The rules that act on a write, each with the documents as it sees them.
Hooks: TypeAlias = Sequence[tuple[Rule, Batch]]

_ABSENT = object()

log = get_logger(__name__)


class translated:
    """Raises the clear error in place of the driver's, for what runs inside."""

    # By hand: every write goes through one, and one that is made of a generator takes three times as long.
    __slots__ = ("_documents", "_entry", "_name", "_translate")

    def __init__(
        self,
        name: str,
        documents: Sequence[Mapping[str, Any]] = (),
        entry: ModelEntry | None = None,
        *,
        translate: Callable[..., Exception] = translate,
    ) -> None:
        self._name = name
        self._documents = documents
        self._entry = entry
        self._translate = translate

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not isinstance(error, Exception):
            return
        for rule in self._entry.rules.implementing("storage") if self._entry is not None else ():
            explain = rule.storage().explain
            if explain is not None and (clear := explain(error)) is not None:
                raise clear from error
        better = self._translate(error, self._name, self._documents)
        if better is not error:
            raise better from error


# -- what callers give -----------------------------------------------------------------------------


def dump(entry: ModelEntry[D], document: D, altered: list[Any]) -> Raw:
    """Return the document to store; refuses what the server would."""
    return dump_all(entry, [document], altered)[0]


def dump_all(
    entry: ModelEntry[D], documents: Sequence[D], altered: list[Any], codec: Codec[D] | None = None
) -> list[Raw]:
    """Return the documents to store, by the entry's codec or another; refuses what the server would."""
    codec = codec or entry.codec
    try:
        return codec.dump_all(documents, altered)
    except RecursionError:
        raise too_deep(entry.model.__name__) from None


def as_stored(entry: ModelEntry[D], document: D, raw: Raw, altered: list[Any]) -> D:
    """Return the document as a later read will give it; called before anything is written."""
    document.__pydantic_fields_set__.add("id")
    if not altered:
        return document
    try:
        return entry.codec.load(copy.deepcopy(raw))
    except DataError as error:
        raise UsageError(
            f"this {entry.model.__name__} could not be read back: with dates in UTC and cut to milliseconds "
            f"it no longer fits its own model ({error.message})",
            code="model-inconsistent",
        ) from None


def filter_of(entry: ModelEntry, id_or_filter: Any) -> Raw:
    """Return the stored filter that an id or a filter means; an id never becomes an operator."""
    if isinstance(id_or_filter, Mapping):
        return parse_filter(entry.paths.fields, id_or_filter)
    return entry.filter_for_id(entry.ids.encode(id_or_filter))


def require_filter(entry: ModelEntry, filter: Any) -> None:
    """Refuse None where all documents would be written by mistake; {} says so on purpose."""
    if filter is None:
        raise UsageError(
            f"which {entry.model.__name__} documents? A filter is needed here; {{}} means all of them",
            code="filter-invalid",
        )


def require_soft_delete(entry: ModelEntry, call: str) -> str:
    """Return the path of the date of a deletion; refuses a model without soft delete."""
    if entry.paths.deletion is None:
        raise UsageError(
            f"{call} is for models that keep their deleted documents, and {entry.model.__name__} does not; "
            'declare soft_delete="deleted_at" with a field deleted_at: datetime | None = None',
            code="soft-delete-undeclared",
        )
    return entry.paths.deletion


def refuse_group(entry: ModelEntry, done: str) -> None:
    """Refuse to make, replace or remove the document of a group."""
    if entry.rules.group is not None:
        source = entry.rules.group.source
        raise UsageError(
            f"{entry.model.__name__} documents cannot be {done}, because Treadle makes and removes them as "
            f"their groups of {source.model.__name__} come and go; write the {source.model.__name__} "
            "documents instead",
            code="rollup-maintained",
        )


def gone(entry: ModelEntry, identity: Any, done: str = "replaced") -> DataError:
    """Return the error for a document that is not stored."""
    return DataError(
        f"{entry.model.__name__} {identity!r} is not stored (any more), so it cannot be {done}; "
        + (
            "insert it if it should exist"
            if entry.kinds.family is None
            else "insert it if it should exist; if it is stored as another kind, use change_kind()"
        ),
        code="document-gone",
    )


# -- auto fields -----------------------------------------------------------------------------------


def auto_fields(entry: ModelEntry, *, new: bool) -> dict[str, Touch]:
    """Return the stored paths that a caller's write sets by itself, and how: dates and revisions."""
    return derivation(entry).touches[new]


def revisions(entry: ModelEntry) -> dict[str, int]:
    """Return the revisions that any write of a document raises, as increments."""
    return {path: 1 for path, how in auto_fields(entry, new=False).items() if how == "next"}


def stamp(entry: ModelEntry, raws: Sequence[Raw], *, new: bool) -> Plan[None]:
    """Set the auto fields of documents that are about to be stored as wholes."""
    fields = auto_fields(entry, new=new)
    if not fields:
        return
    # Outside of a transaction, which does not begin with such a command.
    now = (yield from outside(clock)) if "now" in fields.values() else None
    for raw in raws:
        for path, how in fields.items():
            put(raw, path, now if how == "now" else _revision(raw, path, new=new))


def _revision(raw: Raw, path: str, *, new: bool) -> int:
    # A new document has its first revision, however often its transaction begins again.
    return 1 if new else (value_at(raw, path) or 0) + 1


def stamping(entry: ModelEntry, update: Update) -> Update:
    """Return an update that sets the auto fields as well."""
    fields = auto_fields(entry, new=False)
    if not fields:
        return update
    if isinstance(update, Mapping):
        dates = {path: True for path, how in fields.items() if how == "now"}
        stamped = dict(update)
        for operator, paths in (("$currentDate", dates), ("$inc", revisions(entry))):
            if paths:
                stamped[operator] = {**stamped.get(operator, {}), **paths}
        return stamped
    return [*update, {"$set": stamp_expressions(entry)}]


def stamp_expressions(entry: ModelEntry) -> Raw:
    """Return the auto fields as expressions of a pipeline."""
    return {
        path: "$$NOW" if how == "now" else {"$add": [{"$ifNull": [f"${path}", 0]}, 1]}
        for path, how in auto_fields(entry, new=False).items()
    }


def unchanged(entry: ModelEntry, raw: Raw) -> Raw:
    """Return the condition that a document was not written since the caller read it."""
    known = {path: value_at(raw, path) for path in revisions(entry)}
    # Documents from before the declaration have no revision.
    return {path: {"$eq": value} if value else {"$in": [0, None]} for path, value in known.items()}


def not_written(
    entry: ModelEntry, filter: Raw, identity: Any, condition: Raw, done: str
) -> Plan[TreadleError]:
    """Return the error for a document that was not written: it was changed concurrently, or there is none."""
    if condition and (yield from find_one(entry.collection, filter, {"_id": 1})) is not None:
        return Conflict(entry.model.__name__, identity)
    return gone(entry, identity, done)


# -- rules -----------------------------------------------------------------------------------------


def hooks_of(entry: ModelEntry, batch: Batch) -> Hooks:
    """Return the rules of a class that act on a write of its documents."""
    return [(rule, batch) for rule in derivation(entry).acting]


def run_before(hooks: Hooks, changes: Changes) -> Plan[None]:
    for rule, batch in hooks:
        yield from rule.before(batch, changes)


def run_after(hooks: Hooks, changes: Changes) -> Plan[None]:
    for rule, batch in hooks:
        yield from rule.after(batch, changes)


# -- validation ------------------------------------------------------------------------------------


def require_valid(
    entry: ModelEntry, befores: Sequence[Raw], afters: Sequence[Raw], changes: Changes
) -> Plan[None]:
    """Refuse documents, written but not committed, that could not be read; undone without a transaction.

    A field that the update has left as it was is no reason to refuse it.
    """
    by_key = {freeze(each["_id"]): each for each in befores}
    for after in afters:
        try:
            require_readable(entry, after, "the update would leave", by_key.get(freeze(after["_id"])))
        except DataError:
            if not changes.transactional:
                yield from _undo(entry, by_key, afters)
            raise


def require_readable(entry: ModelEntry, raw: Raw, what: str, before: Raw | None = None) -> None:
    """Refuse a document that could not be read again; `what` says what makes it so."""
    try:
        entry.codec.load(copy.deepcopy(raw))
    except InvalidDocument as error:
        changed = [loc for loc, _ in error.faults if before is None or not loc or _differs(before, raw, loc)]
        if not changed:
            return
        reason = str(error).partition("): ")[2].partition(";")[0]
        raise InvalidValue(
            f"{what} {entry.model.__name__} {raw['_id']!r} in a form that its model refuses ({reason}); "
            "nothing was changed",
            code="document-invalid",
        ) from None


def _differs(before: Raw, after: Raw, location: tuple[int | str, ...]) -> bool:
    name = str(location[0])
    return not identical(before.get(name, _ABSENT), after.get(name, _ABSENT))


def as_written(entry: ModelEntry[D], raw: Raw) -> D:
    """Return the model of a document that a write has left, or removed; takes the document over.

    The write is done, so nothing is refused any more: a field that does not fit
    the model is returned as it is stored.
    """
    try:
        return entry.codec.load(raw)
    except DataError as error:
        log.warning(
            "%s %s was written, but does not fit its model (%s); what does not is returned as it is stored",
            entry.model.__name__,
            escape_text(raw.get("_id")),
            error.code,
        )
    exact = entry.kinds.of(raw) if entry.kinds.family is not None else entry
    codec: Codec[D] = getattr(exact.codec, "own", exact.codec)
    return load_what_fits(codec, raw)


def _undo(entry: ModelEntry, befores: Mapping[Any, Raw], afters: Iterable[Raw]) -> Plan[None]:
    """Write back what documents were, where they were not written concurrently."""
    for after in afters:
        before = befores.get(freeze(after["_id"]), after)
        changed = [name for name in {**before, **after} if _differs(before, after, (name,))]
        if changed:
            as_left = {name: {"$eq": after.get(name)} for name in changed}
            values = {name: {"$literal": before[name]} if name in before else "$$REMOVE" for name in changed}
            yield from update_one(entry.collection, {**by_id(after["_id"]), **as_left}, [{"$set": values}])

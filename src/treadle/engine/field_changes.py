"""Some fields of a document that the caller has read, by their Python names; nothing else is written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from treadle.engine.auto_fields import unchanged, why_not
from treadle.engine.updates import UpdateOneDocument
from treadle.errors import InvalidValue, UsageError
from treadle.graph.changes import Changes
from treadle.graph.model_entry import ModelEntry
from treadle.model.codec import Codec
from treadle.model.document import Document
from treadle.plan import Plan, Raw, by_id
from treadle.query.paths import unknown_field

D = TypeVar("D", bound=Document)


class ChangeFields(UpdateOneDocument[D]):
    """Some fields, by their Python names, of a document that the caller has read."""

    def __init__(self, entry: ModelEntry[D], document: D, fields: Mapping[str, Any]) -> None:
        raw, update = change_of(entry, document, fields)
        super().__init__(entry, document.id, update)
        self.identity = raw["_id"]
        self.which = {**by_id(self.identity), **entry.targets.exact.filter()}
        self.unchanged = unchanged(entry, raw)
        self.filter = {**self.which, **self.unchanged}

    def command(self) -> Plan[Raw] | None:
        command = super().command()
        return None if command is None else self._there(command)

    def apply(self, changes: Changes) -> Plan[Raw]:
        return (yield from self._there(super().apply(changes)))

    def _there(self, update: Plan[Raw | None]) -> Plan[Raw]:
        raw = yield from update
        if raw is None:
            raise (yield from why_not(self.entry, self.which, self.identity, self.unchanged, "changed"))
        return raw


def change_of(entry: ModelEntry[D], document: D, fields: Mapping[str, Any]) -> tuple[Raw, Raw]:
    """A document with other values in these fields, as it is stored, and the update that writes them."""
    changed = _with(entry, document, fields)
    # In the current version, whatever this Store writes: an update speaks of that one.
    codec: Codec[D] = getattr(entry.codec, "own", entry.codec)
    raw = codec.dump_all([changed], [])[0]
    names = [entry.codec.by_name[name].stored for name in fields]
    sets = {name: raw[name] for name in names if name in raw}
    gone = dict.fromkeys((name for name in names if name not in raw), "")
    return raw, {key: value for key, value in {"$set": sets, "$unset": gone}.items() if value}


def _with(entry: ModelEntry[D], document: D, fields: Mapping[str, Any]) -> D:
    """The document with other values in these fields, validated as a whole."""
    model, known = entry.model.__name__, entry.codec.by_name
    if not fields or "id" in fields:
        what = "the id of a document" if fields else "nothing"
        raise UsageError(
            f"change of {model} was asked to change {what}; name the fields to change, such as "
            "change(document, status='paid')",
            code="update-invalid",
        )
    for name in fields:
        if name not in known:
            raise unknown_field(f"change of {model} names", name, model, list(known))
    present = {name: value for name, value in document.__dict__.items() if name in known}
    try:
        return entry.model.model_validate({**present, **fields}, by_name=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the document as a whole"
        raise InvalidValue(
            f"change of {model}: {where}: {first['msg']}; nothing was written", code="document-invalid"
        ) from error

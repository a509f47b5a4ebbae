"""Filters, updates and sorts as callers give them, made safe and storable.

They are MongoDB's own language with stored names. Python's Decimal, enums,
dates and sets are converted as in models. What would run code on the server
is refused at any depth, and so is a Python name where a stored one is meant,
because it would silently match nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from treadle.errors import UsageError
from treadle.model.bson_types import RESERVED, Update, to_bson
from treadle.model.codec import Codec
from treadle.model.encodable import refuse_unsendable
from treadle.model.text import quote
from treadle.query.names import Unchecked, checked_update, named_filter, target_of
from treadle.query.pairs import paired_filter

Sort: TypeAlias = str | Sequence[str | tuple[str, int]] | Mapping[str, int]

FORBIDDEN = frozenset({"$where", "$function", "$accumulator"})
UPDATE_OPERATORS = frozenset(
    {
        "$set", "$unset", "$setOnInsert", "$inc", "$mul", "$min", "$max", "$rename", "$currentDate", "$bit",
        "$push", "$addToSet", "$pull", "$pullAll", "$pop",
    }
)  # fmt: skip
_POSITION = re.compile(r"\$(\[[A-Za-z0-9]*\])?")
UPDATE_STAGES = frozenset({"$set", "$addFields", "$unset", "$project", "$replaceWith", "$replaceRoot"})


def clean(value: Any) -> Any:
    """The value as BSON, with every operator that runs code, and what no driver can send, refused."""
    try:
        converted = to_bson(value, [])
        # After the conversion, because only then is everything a plain dict or list.
        _check_values(converted)
    except RecursionError:
        raise UsageError(
            "this is nested too deeply to be sent; MongoDB takes at most 180 levels", code="document-too-deep"
        ) from None
    return converted


def _check_values(value: Any) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if key in FORBIDDEN:
                raise UsageError(
                    f"{key} runs code on the server and is not accepted; write the condition with ordinary "
                    "operators",
                    code="operator-forbidden",
                )
            if not key.isascii():
                refuse_unsendable(key)
            _check_values(item)
    elif isinstance(value, list):
        for item in value:
            _check_values(item)
    else:
        refuse_unsendable(value)


def refuse_operators(value: Any, operators: frozenset[str], reason: str, code: str) -> None:
    """Refuse a cleaned value that has one of these operators at any depth."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key in operators:
                raise UsageError(f"{key} {reason}", code=code)
            refuse_operators(item, operators, reason, code)
    elif isinstance(value, list):
        for item in value:
            refuse_operators(item, operators, reason, code)


def clean_filter(codec: Codec[Any], filter: Any, scope: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A filter that the driver can send, within the model's own documents or another scope."""
    if filter is None:
        return dict(codec.scope if scope is None else scope)
    if not isinstance(filter, Mapping):
        raise UsageError(
            f"a filter for {codec.model.__name__} is a mapping such as {{'status': 'open'}}, "
            f"not {type(filter).__name__}",
            code="filter-invalid",
        )
    for key in filter:
        _check_name(codec, key, "filter")
    cleaned = clean(filter)
    if isinstance(filter, Unchecked):
        return confine(codec, cleaned, scope)
    return confine(codec, paired_filter(codec, named_filter(codec, cleaned)), scope)


def confine(
    codec: Codec[Any], cleaned: dict[str, Any], scope: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A filter that finds only the model's own documents, or those of another scope."""
    scope = codec.scope if scope is None else scope
    if not scope:
        return cleaned
    # Beside the caller's own conditions, so that the server sees that a partial index will do.
    return {**scope, **cleaned} if not scope.keys() & cleaned.keys() else {"$and": [dict(scope), cleaned]}


def _refuse_owned(codec: Codec[Any], update: Update) -> None:
    """Refuse an update of what says how a document is to be read: its kind or its version."""
    if not codec.owned:
        return
    touched = touched_paths(update)
    if touched is None:
        raise UsageError(
            f"this pipeline rewrites the whole {codec.model.__name__}, kind and version included; "
            "set the fields that change with $set",
            code="field-maintained",
        )
    for path in touched:
        if path.split(".", 1)[0] in codec.owned:
            raise UsageError(
                f"{path!r} says of which kind or version a {codec.model.__name__} is, and an update cannot "
                "change that; use change_kind() for the kind, migrate() for the version",
                code="field-maintained",
            )


def _check_name(codec: Codec[Any], path: Any, place: str) -> None:
    if not isinstance(path, str):
        raise UsageError(
            f"the {place} for {codec.model.__name__} has the key {path!r}; keys are text",
            code="filter-invalid",
        )
    head = path.split(".", 1)[0]
    field = codec.by_name.get(head)
    if field is not None and field.stored != head and head not in codec.by_stored:
        raise UsageError(
            f"the {place} names {head!r}, but {codec.model.__name__}.{head} is stored as "
            f"{field.stored!r}; filters, updates and sorts use stored names",
            code="python-name",
        )


def _check_updated(codec: Codec[Any], path: Any) -> None:
    """Refuse a path that no field can have, and what is Treadle's own."""
    head, *rest = path.split(".") if isinstance(path, str) else [""]
    if head == RESERVED:
        raise UsageError(f"{RESERVED} is Treadle's own and cannot be updated", code="field-maintained")
    named = [head, *(part for part in rest if not _POSITION.fullmatch(part))]
    if any(not part or part.startswith("$") or "\0" in part for part in named):
        raise UsageError(
            f"the update of {codec.model.__name__} names {path!r}, which is no path of a field: names are "
            "text, not empty, and do not begin with '$'",
            code="update-invalid",
        )


def is_update_stage(stage: Any) -> bool:
    """Whether this is a stage that an update pipeline may have."""
    return isinstance(stage, Mapping) and len(stage) == 1 and next(iter(stage)) in UPDATE_STAGES


def clean_update(codec: Codec[Any], update: Any) -> Update:
    """An update with operators, or a pipeline, that the driver can send."""
    # A dict is found to be one in less time than a Mapping.
    if isinstance(update, (dict, Mapping)):
        if not update or [key for key in update if not (isinstance(key, str) and key.startswith("$"))]:
            raise UsageError(
                f"an update of {codec.model.__name__} uses MongoDB's operators, such as "
                "{'$set': {'status': 'paid'}}; to write a whole document use replace()",
                code="update-invalid",
            )
        for operator, changes in update.items():
            if operator not in UPDATE_OPERATORS:
                listed = ", ".join(sorted(UPDATE_OPERATORS))
                raise UsageError(
                    f"{operator!r} is no operator of updates; there are {listed}", code="update-invalid"
                )
            if not isinstance(changes, (dict, Mapping)):
                raise UsageError(f"{operator} in an update takes a mapping of fields", code="update-invalid")
            for path in changes if operator != "$rename" else [*changes, *changes.values()]:
                if operator == "$rename" or path not in codec.plain_names:
                    _check_name(codec, path, "update")
                    _check_updated(codec, path)
    elif isinstance(update, Sequence) and update and not isinstance(update, (str, bytes)):
        for stage in update:
            if not is_update_stage(stage):
                raise UsageError(
                    f"an update pipeline is a list of stages, each one of {', '.join(sorted(UPDATE_STAGES))}",
                    code="update-invalid",
                )
        for path in touched_paths(update) or ():
            _check_updated(codec, path)
    else:
        raise UsageError(
            f"an update is a mapping with operators or a pipeline of stages, not {type(update).__name__}"
            f"{'' if update else ' without anything in it'}",
            code="update-invalid",
        )
    _refuse_owned(codec, update)
    cleaned: Update = clean(update)
    return cleaned if isinstance(update, Unchecked) else checked_update(codec, cleaned)


def touched_paths(update: Update) -> set[str] | None:
    """The stored paths that an update may change; None where it may change any."""
    paths: set[str] = set()
    if isinstance(update, Mapping):
        for operator, changes in update.items():
            # What else $rename may be given, the server refuses.
            renamed = changes.values() if operator == "$rename" else ()
            paths.update(changes, (new for new in renamed if type(new) is str))
        return paths
    for stage in update:
        ((operator, body),) = stage.items()
        if operator in ("$set", "$addFields"):
            paths.update(body)
        elif operator == "$unset":
            paths.update([body] if isinstance(body, str) else body)
        else:
            return None
    return paths


def sort_keys(
    sort: Sort | None, codec: Codec[Any] | None = None, *, tie_breaker: bool = True
) -> list[tuple[str, int]] | None:
    """PyMongo's form of a sort, with ties broken by `_id`."""
    if sort is None:
        return None
    keys: list[tuple[str, int]] = []
    if isinstance(sort, Mapping):
        sort = list(sort.items())
    if not isinstance(sort, Sequence):
        raise UsageError(
            f"sort= takes '-date', ['-likes', 'date'] or [('likes', -1)], not {type(sort).__name__}",
            code="sort-invalid",
        )
    for part in [sort] if isinstance(sort, str) else sort:
        if isinstance(part, str):
            descending = part.startswith("-")
            keys.append((part[1:] if descending or part.startswith("+") else part, -1 if descending else 1))
        elif isinstance(part, (tuple, list)) and len(part) == 2 and part[1] in (1, -1):
            keys.append((part[0], part[1]))
        else:
            raise UsageError(
                f"the sort has {quote(part)}; write '-date', ['-likes', 'date'] or [('likes', -1)]",
                code="sort-invalid",
            )
    for path, _ in keys:
        if not isinstance(path, str) or not path or path.startswith("$"):
            raise UsageError(f"the sort names {path!r}, which is no field", code="sort-invalid")
        if codec is not None:
            _check_name(codec, path, "sort")
            if not codec.has_former_names:
                target_of(codec, path, "sort")
    if tie_breaker and not any(path == "_id" for path, _ in keys):
        keys.append(("_id", 1))
    return keys

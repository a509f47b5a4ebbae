"""How one model is stored: its fields, and what writes and reads its documents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticSerializationError

from treadle.errors import DataError, UsageError
from treadle.model.shape import Shape

M = TypeVar("M", bound=BaseModel)
Dump = Callable[[Any, list[Any]], Any]

PATHS_SHOWN_MAX = 5


@dataclass(frozen=True)
class StoredField:
    """One field: its Python name, its stored name, its shape."""

    name: str
    stored: str
    shape: Shape
    info: FieldInfo


class InvalidDocument(DataError):
    """A stored document does not fit its model: `faults` are the places, and what is wrong there."""

    faults: frozenset[tuple[tuple[int | str, ...], str]] = frozenset()


class Codec(Generic[M]):
    """How one model is written to and read from BSON documents."""

    # What confines the model within its collection, and the fields that only Treadle writes;
    # both belong to the codec that a Store makes for a model with kinds or versions.
    scope: Mapping[str, Any] = MappingProxyType({})
    owned: frozenset[str] = frozenset()
    # The codecs of the kinds that its documents may be of, and whether documents may have other names.
    kinds: tuple[Codec[Any], ...] = ()
    has_former_names = False

    def __init__(self, model: type[M], codec_of: Callable[[type[BaseModel]], Codec[Any]]) -> None:
        self.model = model
        # The codecs of the models inside it.
        self.codec_of = codec_of
        self.fields: tuple[StoredField, ...] = ()
        self.by_name: dict[str, StoredField] = {}
        self.by_stored: dict[str, StoredField] = {}
        # The maps that are stored as pairs, by stored path.
        self.pairs: dict[str, Shape] = {}
        self.bounded_depth = True
        self.ready = False
        self._dump: Dump = _not_compiled
        self._adapt: Callable[[dict[str, Any]], dict[str, Any]] | None = None
        self._validate: Callable[[Any], M] = model.__pydantic_validator__.validate_python

    def dump(self, value: Any, altered: list[Any]) -> dict[str, Any]:
        """The document to store; notes in `altered` what it had to change."""
        try:
            raw: dict[str, Any] = self._dump(value, altered)
        except (KeyError, AttributeError, TypeError, PydanticSerializationError) as error:
            raise self._inconsistent(error) from error
        return raw

    def dump_all(self, values: Iterable[Any], altered: list[Any]) -> list[dict[str, Any]]:
        """The documents to store; one tight loop, because bulk inserts live by it."""
        dump = self._dump
        try:
            return [dump(value, altered) for value in values]
        except (KeyError, AttributeError, TypeError, PydanticSerializationError) as error:
            raise self._inconsistent(error) from error

    def _inconsistent(self, error: Exception) -> UsageError:
        return UsageError(
            f"this {self.model.__name__} holds something that its declaration does not allow "
            f"({type(error).__name__}: {error}); build it through its constructor",
            code="model-inconsistent",
        )

    def load(self, raw: dict[str, Any]) -> M:
        """The validated model of a stored document; takes the document over."""
        if self._adapt is not None:
            raw = self._adapt(raw)
        try:
            return self._validate(raw)
        except ValidationError as error:
            # Not chained: Pydantic repeats the values that it refuses.
            raise invalid(self.model, raw, error) from None
        except Exception as error:
            # A validator of the user's own may raise anything; Pydantic turns only a few into its own error.
            raise validator_failed(self.model, raw, error) from error


def _not_compiled(value: Any, altered: list[Any]) -> Any:
    raise AssertionError("the codec is not compiled yet")


def validator_failed(model: type[BaseModel], raw: Any, error: Exception) -> InvalidDocument:
    """Return the error where a user's own validator raises for a stored document."""
    identity = raw.get("_id") if isinstance(raw, dict) else None
    return InvalidDocument(
        f"a validator of {model.__name__} raises {type(error).__name__} for the stored document with _id "
        f"{identity!r}; repair the document, or the validator",
        code="document-invalid",
    )


def invalid(model: type[BaseModel], raw: Any, error: ValidationError) -> InvalidDocument:
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    places = "; ".join(
        f"{'.'.join(str(part) for part in problem['loc'])}: {problem['type']}"
        for problem in problems[:PATHS_SHOWN_MAX]
    )
    if len(problems) > PATHS_SHOWN_MAX:
        places += f"; and {len(problems) - PATHS_SHOWN_MAX} more"
    identity = raw.get("_id") if isinstance(raw, dict) else None
    found = InvalidDocument(
        f"a stored document does not fit {model.__name__} (_id {identity!r}): {places}; "
        "mend the document, or widen the model",
        code="document-invalid",
    )
    found.faults = frozenset((problem["loc"], problem["type"]) for problem in problems)
    return found

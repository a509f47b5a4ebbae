"""Python source that declares a collection in Treadle's own language.

What a scan saw becomes a model: names, types, what may be absent. Names that
Python or Pydantic cannot have get an alias; names that no path can reach are
left out with a comment. Every name from the database goes through `quoted`,
so that none can break out of its string.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pydantic import BaseModel

from treadle.advisor.facts import NUMBERS, CollectionFacts, FieldFacts
from treadle.advisor.relations import singular as singular_of
from treadle.advisor.relations import words
from treadle.advisor.structure import is_plain_name

FIELDS_SHOWN_MAX = 30
NESTED_DEPTH_MAX = 3
COMMENT_LENGTH_MAX = 60
LINE_LENGTH = 100

_TYPES = {
    "string": "str",
    "int": "int",
    "long": "int",
    "double": "float",
    "bool": "bool",
    "binData": "bytes",
}
_IMPORTED = {
    "date": ("datetime", "datetime"),
    "decimal": ("decimal", "Decimal"),
    "objectId": ("treadle", "Id"),
    "uuid": ("uuid", "UUID"),
}
_RESERVED = frozenset({name for name in dir(BaseModel) if not name.startswith("_")} | {"id"})
# A field of such a name would hide the type from the fields below it.
_HIDING = frozenset(
    {"str", "int", "float", "bool", "bytes", "list", "dict", "datetime", "timedelta", "migration"}
)
_ORDER = ("datetime", "decimal", "typing", "uuid", "pydantic", "pymongo", "treadle")
_STANDARD = {"datetime", "decimal", "typing", "uuid"}


def quoted(name: str) -> str:
    """A name as a Python literal in ASCII, with double quotes where that reads better."""
    text = ascii(name)
    return f'"{text[1:-1]}"' if text[0] == "'" and '"' not in text else text


def commented(text: str) -> str:
    """A name in a comment: on one line, without surprises, not too long."""
    shown = text.encode("unicode_escape").decode() if not text.isprintable() else text
    return shown if len(shown) <= COMMENT_LENGTH_MAX else shown[: COMMENT_LENGTH_MAX - 1] + "…"


def class_name(collection: str) -> str:
    """`shop.order_items` -> OrderItem."""
    parts = [
        part
        for part in words(collection.rpartition(".")[2] or collection)
        if part.isidentifier() or part.isalnum()
    ]
    if parts:
        parts[-1] = singular_of(parts[-1])
    made = "".join(part.capitalize() for part in parts)
    made = re.sub(r"\W", "", made, flags=re.ASCII)
    if not made or made[0].isdigit():
        made = f"Collection{made}"
    return f"{made}_" if keyword.iskeyword(made) or made in _USED_NAMES else made


# Names that the generated source imports or builds on.
_USED_NAMES = frozenset(
    [
        "Action",
        "AncestorArray",
        "Annotated",
        "Any",
        "Approximate",
        "AsyncStore",
        "Average",
        "BaseModel",
        "Bucket",
        "ChildReferences",
        "Count",
        "DataError",
        "Day",
        "Decimal",
        "DeclarationError",
        "Document",
        "ExtendedReference",
        "Field",
        "Finding",
        "Formula",
        "Hour",
        "Id",
        "IndexModel",
        "Indexed",
        "MaterializedPath",
        "Max",
        "Min",
        "Month",
        "None",
        "Outlier",
        "ParentReference",
        "Progress",
        "Rollup",
        "Store",
        "Subset",
        "Sum",
        "TimeSeries",
        "TreadleError",
        "True",
        "False",
        "UUID",
        "UsageError",
        "Week",
    ]
)


def python_name(stored: str, taken: set[str]) -> str:
    """An attribute name for a stored name, the same one where that is possible."""
    name = re.sub(r"\W", "_", stored, flags=re.ASCII).lstrip("_")
    # Pydantic keeps names that begin with model_ for itself.
    if not name or name[0].isdigit() or name.startswith("model_"):
        name = f"field_{name}".rstrip("_")
    if keyword.iskeyword(name) or name in _RESERVED or name in _HIDING or name in _USED_NAMES:
        name = f"{name}_"
    base, number = name, 2
    while name in taken:
        name, number = f"{base}_{number}", number + 1
    taken.add(name)
    return name


Wrap = Callable[[str], str]


@dataclass(slots=True)
class Source:
    """A piece of Python in the making: imports, then classes."""

    imports: dict[str, set[str]] = field(default_factory=dict)
    blocks: list[str] = field(default_factory=list)
    classes: set[str] = field(default_factory=set)
    # What is put around the annotation of a field, by its path.
    wraps: dict[str, Wrap] = field(default_factory=dict)

    def use(self, module: str, *names: str) -> None:
        self.imports.setdefault(module, set()).update(names)

    def name(self, wanted: str) -> str:
        """A class name that is still free."""
        made, number = wanted, 2
        while made in self.classes or made in _USED_NAMES:
            made, number = f"{wanted}{number}", number + 1
        self.classes.add(made)
        return made

    def text(self) -> str:
        lines: list[str] = []
        for standard in (True, False):
            group = [
                module for module in _ORDER if module in self.imports and (module in _STANDARD) is standard
            ]
            lines += [_import(module, sorted(self.imports[module])) for module in group]
            if group:
                lines.append("")
        return "\n".join([*lines, ""]) + "\n" + "\n\n\n".join(self.blocks) + "\n"

    # -- models ---------------------------------------------------------------------

    def names(self, facts: CollectionFacts) -> dict[str, str]:
        """Stored top-level name -> attribute name, for the fields that can be declared."""
        taken: set[str] = set()
        return {each.name: python_name(each.name, taken) for each in facts.top() if _declarable(each)}

    def document(
        self,
        facts: CollectionFacts,
        *,
        keywords: Sequence[str] = (),
        collection: str | None = None,
        wrapped: Mapping[str, Wrap] | None = None,
        without: frozenset[str] = frozenset(),
        only: frozenset[str] | None = None,
        added: tuple[str, ...] = (),
        name: str | None = None,
        base: str = "Document",
    ) -> str:
        """Declare a collection's model; the name of its class."""
        self.use("treadle", "Document")
        made = self.name(name or class_name(facts.name))
        names = self.names(facts)
        lines: list[str] = []
        comments: list[str] = []
        identity = facts.fields.get("_id")
        if base == "Document" and identity is not None and set(identity.filled) != {"objectId"}:
            lines.append(f"    id: {self.identity(facts)}")
        shown = 0
        for each in facts.top():
            if each.name in without or (only is not None and each.name not in only):
                continue
            if each.name not in names:
                comments.append(f"    # {commented(each.path)} is left out: no path can name it.")
                continue
            if shown == FIELDS_SHOWN_MAX and not (wrapped and each.name in wrapped):
                comments.append("    # … and further fields, which are kept as they are when left out.")
                break
            shown += 1
            lines.append(self._field(facts, each, names[each.name], made, (wrapped or {}).get(each.name)))
        lines += [f"    {line}" for line in added]
        parts = [
            base,
            *([f"collection={quoted(collection or facts.name)}"] if base == "Document" else []),
            *keywords,
        ]
        head = _head(made, parts)
        self.blocks.append("\n".join([head, *(lines or ["    pass"]), *dict.fromkeys(comments)]))
        return made

    def card(self, name: str, facts: CollectionFacts, fields: list[FieldFacts]) -> str:
        """A plain model of some of a collection's fields."""
        self.use("pydantic", "BaseModel")
        made = self.name(name)
        names = self.names(facts)
        lines = [self._field(facts, each, names[each.name], made, None) for each in fields]
        self.blocks.append("\n".join([f"class {made}(BaseModel):", *(lines or ["    pass"])]))
        return made

    def identity(self, facts: CollectionFacts) -> str:
        """The type of a collection's `_id`, and so of whatever refers to it."""
        identity = facts.fields.get("_id")
        if identity is None:
            return self.scalar("objectId")
        if not has_one_identity(facts):
            return self._any()
        return self._number(identity) or self.scalar(identity.kind)

    def _number(self, each: FieldFacts) -> str | None:
        """One type for numbers of several, or None where these are no such numbers."""
        filled = set(each.filled)
        if len(filled) < 2 or not filled <= NUMBERS:
            return None
        kind = "decimal" if "decimal" in filled else "double" if "double" in filled else "long"
        return self.scalar(kind)

    def scalar(self, kind: str) -> str:
        if kind in _IMPORTED:
            module, name = _IMPORTED[kind]
            self.use(module, name)
            return name
        if kind in _TYPES:
            return _TYPES[kind]
        self.use("typing", "Any")
        return "Any"

    def annotation(self, facts: CollectionFacts, each: FieldFacts, owner: str) -> str:
        """The type of a field, without whether it may be absent."""
        number = self._number(each)
        if number is not None:
            return number
        if each.type == "object":
            return self._object(facts, each.steps, each.is_map, owner)
        if each.type == "array":
            inside = facts.fields.get(each.path + "[]")
            if inside is None or len(inside.filled) != 1 or inside.type == "array":
                return f"list[{self._any()}]"
            if inside.type == "object":
                return f"list[{self._object(facts, inside.steps, inside.is_map, owner)}]"
            return f"list[{self.scalar(inside.kind)}]"
        return self.scalar(each.kind)

    def _any(self) -> str:
        self.use("typing", "Any")
        return "Any"

    def _object(self, facts: CollectionFacts, steps: tuple[str, ...], is_map: bool, owner: str) -> str:
        inside = _inside(facts, steps)
        if is_map or not inside:
            return f"dict[str, {self._any()}]"
        self.use("pydantic", "BaseModel")
        last = [step for step in steps if step != "[]"][-1]
        made = self.name(_nested_name(owner, last, "[]" in steps[-1:]))
        taken: set[str] = set()
        whole = facts.fields.get("".join(_joined(steps)))
        known = whole.filled.get("object", 0) if whole is not None else 0
        lines = [
            self._field(facts, field, python_name(field.name, taken), made, None, known) for field in inside
        ]
        self.blocks.append("\n".join([f"class {made}(BaseModel):", *lines]))
        return made

    def _field(
        self,
        facts: CollectionFacts,
        each: FieldFacts,
        name: str,
        owner: str,
        wrap: Wrap | None,
        whole: int | None = None,
    ) -> str:
        annotation = self.annotation(facts, each, owner)
        wrap = wrap or self.wraps.get(each.path)
        looked_at = each.looked_at if whole is None else whole
        absent = each.present < looked_at or len(each.filled) < len(each.types) or not each.filled
        default = None
        if annotation.startswith("list["):
            default = "[]" if absent or wrap is not None else None
            # A list that is null in some documents is no list to be maintained.
            if len(each.filled) < len(each.types) and wrap is None:
                annotation, default = f"{annotation} | None", "None"
        elif absent:
            annotation, default = f"{annotation} | None" if annotation != "Any" else "Any", "None"
        if wrap is not None:
            annotation = wrap(annotation)
        if name != each.name:
            self.use("pydantic", "Field")
            alias = f"alias={quoted(each.name)}"
            return f"    {name}: {annotation} = Field({alias if default is None else f'{default}, {alias}'})"
        return f"    {name}: {annotation}" + ("" if default is None else f" = {default}")


def _head(name: str, parts: Sequence[str]) -> str:
    """The first line of a class, or several where one would be too long."""
    line = f"class {name}({', '.join(parts)}):"
    if len(line) <= LINE_LENGTH and "\n" not in line and "#" not in line:
        return line
    inside = [each if each.startswith("#") else f"{each}," for each in parts]
    indented = [f"    {line}" for each in inside for line in each.split("\n")]
    return "\n".join([f"class {name}(", *indented, "):"])


def _joined(steps: tuple[str, ...]) -> list[str]:
    made: list[str] = []
    for step in steps:
        made.append(step if step == "[]" or not made else f".{step}")
    return made


def _declarable(each: FieldFacts) -> bool:
    return is_plain_name(each.name) and each.name not in ("_treadle", "*")


def _inside(facts: CollectionFacts, steps: tuple[str, ...]) -> list[FieldFacts]:
    """The fields of an object that can be a model of its own; none where it cannot."""
    inside = [
        field
        for field in facts.fields.values()
        if len(field.steps) == len(steps) + 1 and field.steps[: len(steps)] == steps and field.name != "[]"
    ]
    depth = sum(step != "[]" for step in steps)
    fits = depth <= NESTED_DEPTH_MAX and len(inside) <= FIELDS_SHOWN_MAX
    return inside if fits and all(_declarable(field) for field in inside) else []


def can_wrap(facts: CollectionFacts, each: FieldFacts) -> bool:
    """Whether a field of the document or of nested models can carry a pattern."""
    if each.in_array or not all(map(is_plain_name, each.steps)) or len(each.filled) != 1:
        return False
    for depth in range(1, len(each.steps)):
        above = next((field for field in facts.fields.values() if field.steps == each.steps[:depth]), None)
        if above is None or above.is_map or above.type != "object" or not _inside(facts, above.steps):
            return False
    return True


def has_one_identity(facts: CollectionFacts) -> bool:
    """Whether all ids are of one type that can be declared; else they are to be mended first."""
    identity = facts.fields.get("_id")
    if identity is None:
        return True
    kinds = set(identity.filled)
    return kinds <= NUMBERS or (len(kinds) == 1 and (identity.type in _TYPES or identity.type in _IMPORTED))


def referring(child: CollectionFacts, path: str, parent: CollectionFacts) -> CollectionFacts:
    """The child with its reference of the same type as what it refers to."""
    reference, identity = child.fields[path], parent.fields["_id"]
    absent = {"null": 1} if len(reference.filled) < len(reference.types) else {}
    # As often as before: only the type is another.
    types = {**dict.fromkeys(identity.filled, 0), identity.type: sum(reference.filled.values()), **absent}
    known = replace(reference, types=types, is_uuid=identity.is_uuid)
    return replace(child, fields={**child.fields, path: known})


def _nested_name(owner: str, last: str, in_list: bool) -> str:
    parts = list(words(last))
    if in_list and parts:
        parts[-1] = singular_of(parts[-1])
    made = re.sub(r"\W", "", "".join(part.capitalize() for part in parts), flags=re.ASCII)
    return f"{owner}{made or 'Part'}"


def _import(module: str, names: list[str]) -> str:
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= LINE_LENGTH:
        return line
    return f"from {module} import (\n" + "".join(f"    {name},\n" for name in names) + ")"

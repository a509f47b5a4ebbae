"""Python source that declares a collection in Treadle's own language.

What a scan saw becomes a model: names, types, what may be absent. Names that
Python or Pydantic cannot have get an alias; names that no path can reach are
left out with a comment. Every name from the database goes through `quote`,
so that none can break out of its string.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from pydantic import BaseModel

from treadle.advisor.facts import NUMBERS, CollectionFacts, FieldFacts, IndexFacts, Relation, Scan
from treadle.advisor.naming import singular, subject, words
from treadle.advisor.structure import Steps, is_plain_name
from treadle.advisor.wording import cut

FIELDS_SHOWN_MAX = 30
NESTED_DEPTH_MAX = 3
COMMENT_LENGTH_MAX = 60
INDEXES_SHOWN_MAX = 64
LINE_LENGTH = 100

_TYPES = {
    "string": "str",
    "int": "int",
    "long": "int",
    "double": "float",
    "bool": "bool",
    "binData": "bytes",
    "date": "datetime",
    "decimal": "Decimal",
    "objectId": "Id",
    "uuid": "UUID",
}
_STANDARD_NAMES = {
    "datetime": ("datetime", "timedelta"),
    "decimal": ("Decimal",),
    "os": ("environ",),
    "typing": ("Annotated", "Any"),
    "uuid": ("UUID",),
}
_OTHER_NAMES = {
    "pydantic": ("BaseModel", "Field"),
    "pymongo": ("IndexModel",),
    "treadle": (
        *("Document", "Id", "Indexed", "migration", "ExtendedReference", "Subset", "Outlier", "Approximate"),
        *("Count", "Sum", "Average", "Min", "Max", "Formula", "Rollup"),
        *("Minute", "Hour", "Day", "Week", "Month", "Quarter", "Year", "Total"),
        *("Archive", "Attributes", "History", "Links"),
        *("Bucket", "TimeSeries", "AncestorArray", "ChildReferences", "MaterializedPath", "ParentReference"),
        *("Store", "AsyncStore", "Action", "Finding", "Progress"),
        *("TreadleError", "DataError", "DeclarationError", "UsageError"),
    ),
}
# Names that the generated source imports, or that its reader will.
_USED_NAMES = frozenset(
    name for group in (_STANDARD_NAMES, _OTHER_NAMES) for names in group.values() for name in names
)
_RESERVED = frozenset(
    {
        *(name for name in dir(BaseModel) if not name.startswith("_")),
        "id",
        # A field of such a name would hide the type from the fields below it.
        *("str", "int", "float", "bool", "bytes", "list", "dict"),
        *_USED_NAMES,
    }
)
_LITERALS_AND_COMMENTS = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|#.*')

Wrap = Callable[[str], str]


def quote(name: str) -> str:
    """A name as a Python literal in ASCII, with double quotes where that reads better."""
    text = ascii(name)
    return f'"{text[1:-1]}"' if text[0] == "'" and '"' not in text else text


def snake_case(name: str, default: str) -> str:
    """What a collection or an array holds, as part of a field's name: `orderItems` -> order_item."""
    return "_".join(subject(name)) or default


def camel_case(parts: Sequence[str]) -> str:
    return re.sub(r"\W", "", "".join(part.capitalize() for part in parts), flags=re.ASCII)


def styled(facts: CollectionFacts, name: str) -> str:
    """A new name in snake case, or in camelCase where that is how the collection's own names are written."""
    names = [each.name for each in facts.top()]
    snake = sum("_" in each.strip("_") for each in names)
    camel = sum(re.search(r"[a-z0-9][A-Z]", each) is not None for each in names)
    if camel <= snake:
        return name
    first, *others = name.split("_")
    return first + "".join(each[:1].upper() + each[1:] for each in others)


def class_name(collection: str) -> str:
    """`shop.order_items` -> OrderItem."""
    parts = words(collection.rpartition(".")[2] or collection)
    name = camel_case(singular([part for part in parts if part.isidentifier() or part.isalnum()]))
    if not name or name[0].isdigit():
        name = f"Collection{name}"
    return f"{name}_" if keyword.iskeyword(name) or name in _USED_NAMES else name


def python_name(stored: str, taken: set[str]) -> str:
    """An attribute name for a stored name, the same one where that is possible."""
    name = re.sub(r"\W", "_", stored, flags=re.ASCII).lstrip("_")
    # Pydantic keeps names that begin with model_ for itself.
    if not name or name[0].isdigit() or name.startswith("model_"):
        name = f"field_{name}".rstrip("_")
    if keyword.iskeyword(name) or name in _RESERVED:
        name = f"{name}_"
    base, number = name, 2
    while name in taken:
        name, number = f"{base}_{number}", number + 1
    taken.add(name)
    return name


def inner_name(stored: str, taken: set[str]) -> str:
    """The same for a field of a nested model, in which `id` is free."""
    if stored in ("_id", "id") and "id" not in taken:
        taken.add("id")
        return "id"
    return python_name(stored, taken)


def _number_type(each: FieldFacts) -> str | None:
    """One type for numbers of several types; None for other fields."""
    types = set(each.value_types)
    if len(types) < 2 or not types <= NUMBERS:
        return None
    return "Decimal" if "decimal" in types else "float" if "double" in types else "int"


@dataclass(slots=True)
class Source:
    """A piece of Python in the making: classes, from which the imports follow."""

    # What is put around the annotation of a field, by its path.
    wraps: dict[str, Wrap] = field(default_factory=dict)
    blocks: list[str] = field(default_factory=list)
    classes: set[str] = field(default_factory=set)

    def name(self, preferred: str) -> str:
        """A class name that is still free."""
        name, number = preferred, 2
        while name in self.classes or name in _USED_NAMES or keyword.iskeyword(name):
            name, number = f"{preferred}{number}", number + 1
        self.classes.add(name)
        return name

    def text(self) -> str:
        """The source with its imports: no other identifier is spelt like a name that can be imported."""
        code = "\n\n\n".join(self.blocks)
        identifiers = set(re.findall(r"\w+", _LITERALS_AND_COMMENTS.sub("", code)))
        lines: list[str] = []
        for group in (_STANDARD_NAMES, _OTHER_NAMES):
            names = {module: sorted(identifiers & set(known)) for module, known in group.items()}
            imports = [_import(module, names[module]) for module in group if names[module]]
            lines += [*imports, ""] if imports else []
        return "\n".join([*lines, "", code, ""])

    @staticmethod
    def names(facts: CollectionFacts) -> dict[str, str]:
        """Stored top-level name -> attribute name, for the fields that can be declared."""
        taken: set[str] = set()
        return {each.name: python_name(each.name, taken) for each in facts.top() if _is_declarable(each)}

    @staticmethod
    def names_inside(facts: CollectionFacts, steps: Steps) -> dict[str, str]:
        """The same for the fields of the object that the steps lead to."""
        if not steps:
            return Source.names(facts)
        taken: set[str] = set()
        return {each.name: inner_name(each.name, taken) for each in _inside(facts, steps)}

    @staticmethod
    def new_name(facts: CollectionFacts, *preferred: str) -> str:
        """The first name that a collection does not use yet, in the style of its own names."""
        taken = {*Source.names(facts).values(), *(each.name for each in facts.top())}
        names = [python_name(styled(facts, each), set()) for each in preferred]
        free = next((name for name in names if name not in taken), None)
        return free or python_name(names[-1], taken)

    @staticmethod
    def scalar(kind: str) -> str:
        return _TYPES.get(kind, "Any")

    @staticmethod
    def identity(facts: CollectionFacts) -> str:
        """The type of a collection's `_id`, and so of whatever refers to it."""
        identity = facts.fields.get("_id")
        if identity is None:
            return "Id"
        if not has_one_identity(facts):
            return "Any"
        return _number_type(identity) or Source.scalar(identity.kind)

    def document(
        self,
        facts: CollectionFacts,
        *,
        keywords: Sequence[str] = (),
        collection: str | None = None,
        without: frozenset[str] = frozenset(),
        only: frozenset[str] | None = None,
        needed: frozenset[str] = frozenset(),
        added: Sequence[str] = (),
        name: str | None = None,
        reserved: str | None = None,
        base: str = "Document",
    ) -> str:
        """Declare a collection's model; gives the name of its class.

        `needed` are fields that are declared although there are many;
        `reserved` is a name that `name()` gave before.
        """
        name = reserved or self.name(name or class_name(facts.name))
        names = self.names(facts)
        lines: list[str] = []
        comments: list[str] = []
        fields = [each for each in facts.top() if each.name not in without]
        if len(fields) > FIELDS_SHOWN_MAX:
            # What is needed is not among those that are left out.
            fields.sort(key=lambda each: each.name not in needed)
        for each in fields if only is None else [each for each in fields if each.name in only]:
            if each.name not in names:
                comments.append(
                    f"    # {cut(each.path, COMMENT_LENGTH_MAX)} is left out: no path can name it."
                )
                continue
            if len(lines) == FIELDS_SHOWN_MAX:
                comments.append("    # … and further fields, which are kept as they are when left out.")
                break
            lines.append(self._field(facts, each, names[each.name], name))
        head = [base, *keywords]
        if base == "Document":
            head.insert(1, f"collection={quote(collection or facts.name)}")
            identity = facts.fields.get("_id")
            if identity is not None and set(identity.value_types) != {"objectId"}:
                lines.insert(0, f"    id: {self.identity(facts)}")
        lines += [f"    {line}" for line in added]
        self._class(class_head(name, head), [*(lines or ["    pass"]), *dict.fromkeys(comments)])
        return name

    def card(self, name: str, facts: CollectionFacts, fields: list[FieldFacts]) -> str:
        """A plain model of some of a collection's fields."""
        name = self.name(name)
        names = self.names(facts)
        lines = [self._field(facts, each, names[each.name], name) for each in fields]
        self._class(f"class {name}(BaseModel):", lines or ["    pass"])
        return name

    def annotation(self, facts: CollectionFacts, each: FieldFacts, owner: str) -> str:
        """The type of a field, without whether it may be absent."""
        number = _number_type(each)
        if number is not None:
            return number
        if each.type == "object":
            return self._object(facts, each, owner)
        if each.type == "array":
            inside = facts.fields.get(each.path + "[]")
            if inside is None or len(inside.value_types) != 1 or inside.type == "array":
                return "list[Any]"
            if inside.type == "object":
                return f"list[{self._object(facts, inside, owner)}]"
            return f"list[{self.scalar(inside.kind)}]"
        return self.scalar(each.kind)

    def _object(self, facts: CollectionFacts, each: FieldFacts, owner: str) -> str:
        inside = _inside(facts, each.steps)
        if each.is_map or not inside:
            return "dict[str, Any]"
        parts = words(each.own_name)
        name = self.name(owner + (camel_case(singular(parts) if each.name == "[]" else parts) or "Part"))
        taken: set[str] = set()
        objects = each.value_types.get("object", 0)
        lines = [self._field(facts, part, inner_name(part.name, taken), name, objects) for part in inside]
        self._class(f"class {name}(BaseModel):", lines)
        return name

    def _field(
        self,
        facts: CollectionFacts,
        each: FieldFacts,
        name: str,
        owner: str,
        looked_at: int | None = None,
    ) -> str:
        annotation = self.annotation(facts, each, owner)
        wrap = self.wraps.get(each.path)
        looked_at = each.looked_at if looked_at is None else looked_at
        has_null = len(each.value_types) < len(each.types)
        absent = each.present < looked_at or has_null or not each.value_types
        default = None
        if annotation.startswith("list["):
            default = "[]" if absent or wrap is not None else None
            # A list that is null in some documents cannot be maintained.
            if has_null and wrap is None:
                annotation, default = f"{annotation} | None", "None"
        elif absent:
            annotation, default = f"{annotation} | None" if annotation != "Any" else "Any", "None"
        if wrap is not None:
            annotation = wrap(annotation)
        if name != each.name:
            alias = f"alias={quote(each.name)}"
            default = f"Field({alias if default is None else f'{default}, {alias}'})"
        return f"    {name}: {annotation}" + ("" if default is None else f" = {default}")

    def _class(self, head: str, lines: Sequence[str]) -> None:
        self.blocks.append("\n".join([head, *lines]))


def declaration(facts: CollectionFacts, keywords: Sequence[str] = ()) -> str:
    """The source of a collection's model alone."""
    source = Source()
    source.document(facts, keywords=keywords)
    return source.text()


def class_head(name: str, parts: Sequence[str]) -> str:
    """The first line of a class, or several where one would be too long."""
    line = f"class {name}({', '.join(parts)}):"
    if len(line) <= LINE_LENGTH and "\n" not in line and "#" not in line:
        return line
    inside = [each if each.startswith("#") else f"{each}," for each in parts]
    indented = [f"    {line}" for each in inside for line in each.split("\n")]
    return "\n".join([f"class {name}(", *indented, "):"])


def _import(module: str, names: list[str]) -> str:
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= LINE_LENGTH:
        return line
    return f"from {module} import (\n" + "".join(f"    {name},\n" for name in names) + ")"


def _is_declarable(each: FieldFacts) -> bool:
    return is_plain_name(each.name) and each.name not in ("_treadle", "*")


def _inside(facts: CollectionFacts, steps: Steps) -> list[FieldFacts]:
    """The fields of an object that can be a model of its own; none where it cannot."""
    inside = [each for each in facts.fields.values() if each.steps[:-1] == steps and each.name != "[]"]
    depth = sum(step != "[]" for step in steps)
    fits = depth <= NESTED_DEPTH_MAX and len(inside) <= FIELDS_SHOWN_MAX
    return inside if fits and all(map(_is_declarable, inside)) else []


def can_wrap(facts: CollectionFacts, each: FieldFacts) -> bool:
    """Whether a field of the document or of nested models can carry a pattern."""
    if each.in_array or not all(map(is_plain_name, each.steps)) or len(each.value_types) != 1:
        return False
    for depth in range(1, len(each.steps)):
        above = next((field for field in facts.fields.values() if field.steps == each.steps[:depth]), None)
        if above is None or above.is_map or above.type != "object" or not _inside(facts, above.steps):
            return False
    return True


def has_one_identity(facts: CollectionFacts) -> bool:
    """Whether all ids are of one type that can be declared; `mixed-types` advises on the others."""
    identity = facts.fields.get("_id")
    if identity is None:
        return True
    kinds = set(identity.value_types)
    return kinds <= NUMBERS or (len(kinds) == 1 and identity.type in _TYPES)


def has_one_key(parent: CollectionFacts, key: str) -> bool:
    """Whether what refers to this key of a collection can be declared: its values are of one type."""
    if key == "_id":
        return has_one_identity(parent)
    kinds = set(parent.fields[key].value_types) if key in Source.names(parent) else set()
    return bool(kinds) and (kinds <= NUMBERS or (len(kinds) == 1 and kinds <= set(_TYPES)))


def can_declare(scan: Scan, relation: Relation) -> bool:
    """Whether a pattern can be declared on a relation: one reference per document, to a key of one type."""
    is_single = not relation.many and is_plain_name(relation.path)
    return is_single and has_one_key(scan.collections[relation.parent], relation.key)


def reference_keywords(child_name: str, parent: CollectionFacts, key: str) -> str:
    """`by=`, the attribute that holds the reference, and `to=` where that is no id."""
    to = "" if key == "_id" else f", to={quote(Source.names(parent)[key])}"
    return f"by={quote(child_name)}{to}"


def with_reference_type(
    child: CollectionFacts, path: str, parent: CollectionFacts, key: str = "_id"
) -> CollectionFacts:
    """The child with its reference of the same type as the ids, or other keys, that it refers to."""
    reference, identity = child.fields[path], parent.fields[key]
    absent = {"null": 1} if len(reference.value_types) < len(reference.types) else {}
    number = sum(reference.value_types.values())
    types = {**dict.fromkeys(identity.value_types, 0), identity.type: number, **absent}
    typed = replace(reference, types=types, is_uuid=identity.is_uuid)
    return replace(child, fields={**child.fields, path: typed})


def declare_without(facts: CollectionFacts, dropped: Iterable[str]) -> str:
    """The model with the indexes that stay, declared as they are.

    An index that the facts do not describe in full is left to the database.
    """
    names = {"_id_", *dropped}
    indexes = [index for index in facts.indexes if index.name not in names and _is_plain_index(index)]
    models = [
        index_model(index.keys, index.name, ", unique=True" if index.unique else "") for index in indexes
    ]
    return declare_indexes(facts, models)


def declare_indexes(facts: CollectionFacts, models: Sequence[str]) -> str:
    lines = "".join(f"    {line},\n" for line in models[:INDEXES_SHOWN_MAX])
    return declaration(facts, [f"indexes=[\n{lines}]"] if lines else [])


def _is_plain_index(index: IndexFacts) -> bool:
    return not (index.special or index.partial or index.expires or index.collation_strength)


def free_name(facts: CollectionFacts, keys: Sequence[tuple[str, int]]) -> str | None:
    """A name for a new index; None where the default one is free."""
    default = name = "_".join(f"{path}_{way}" for path, way in keys)
    taken = {index.name for index in facts.indexes}
    number = 2
    while name in taken:
        name, number = f"{default}_{number}", number + 1
    return None if name == default else name


def index_model(keys: Iterable[tuple[str, int]], name: str | None = None, options: str = "") -> str:
    """The source of an `IndexModel`."""
    pairs = ", ".join(f"({quote(path)}, {way})" for path, way in keys)
    return f"IndexModel([{pairs}]{'' if name is None else f', name={quote(name)}'}{options})"

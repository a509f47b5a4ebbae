"""A declaration taken apart into classes and fields, which can be merged and written out again.

The advisor declares each finding by itself, as text. What is merged is that
text: every annotation stays as its rule wrote it.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from treadle.advisor.declare import LINE_LENGTH, class_head, quote

# The patterns whose first argument is a model, and that can follow the change stream.
FOLLOWING = frozenset({"ExtendedReference", "Subset", "Count", "Sum", "Average", "Min", "Max"})
Edit = tuple[ast.expr, str]
Keys = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Line:
    """One field: its attribute name, its stored name, and its source."""

    name: str
    stored: str
    text: str

    @property
    def meaning(self) -> str:
        """Equal for lines that declare the same, however they are broken."""
        node = _field(self.text)
        return ast.dump(node.annotation) + (ast.dump(node.value) if node.value is not None else "")

    @property
    def is_required(self) -> bool:
        """Whether a document without it does not fit."""
        value = _field(self.text).value
        return value is None or (isinstance(value, ast.Call) and not value.args)

    @property
    def carries_pattern(self) -> bool:
        return "Annotated[" in self.text

    @property
    def by(self) -> str | None:
        """The `by=` of its pattern."""
        for call in _calls(_field(self.text)):
            for keyword in call.keywords:
                if keyword.arg == "by" and isinstance(keyword.value, ast.Constant):
                    return str(keyword.value.value)
        return None

    def renamed(self, name: str) -> Line:
        if self.stored != self.name:
            raise ValueError(f"{self.name} has an alias")
        return Line(name, name, name + self.text[len(self.name) :])


@dataclass(slots=True)
class Class:
    """One class of a declaration: its bases, its keywords and its fields by stored name."""

    name: str
    bases: list[str]
    keywords: dict[str, str] = field(default_factory=dict)
    lines: dict[str, Line] = field(default_factory=dict)
    comments: list[str] = field(default_factory=list)

    @property
    def collection(self) -> str | None:
        """The collection of a Document; None of any other class."""
        return ast.literal_eval(self.keywords["collection"]) if "collection" in self.keywords else None

    @property
    def body(self) -> tuple[str, ...]:
        """What makes two classes the same, whatever their names."""
        return (
            *self.bases,
            *self.keywords.values(),
            *(line.name + line.meaning for line in self.lines.values()),
        )

    def prune_indexes(self, others: Iterable[Keys]) -> None:
        """Drop the plain indexes of `indexes=` that begin another one, or one of the `others`."""
        lines = self.keywords.get("indexes", "").split("\n")[1:-1]
        keys = {line: _index_keys(line) for line in lines}
        known = [*others, *(each for each in keys.values() if each is not None)]

        def begins_another(own: Keys) -> bool:
            return any(len(own) < len(each) and each[: len(own)] == own for each in known)

        kept = [line for line, own in keys.items() if own is None or not begins_another(own)]
        if not kept:
            self.keywords.pop("indexes", None)
        elif len(kept) < len(lines):
            self.keywords["indexes"] = "\n".join(["[", *kept, "]"])

    def references(self) -> Iterator[tuple[str, bool]]:
        """The names that it uses, and whether a name may be text instead: that of a pattern's source."""
        yield from ((base, False) for base in self.bases)
        for line in self.lines.values():
            node = _field(line.text)
            sources = [id(each) for each in _sources(node)]
            yield from ((each.id, id(each) in sources) for each in _names(node))

    def with_names(self, names: Mapping[str, str]) -> Class:
        """The same with other classes' names replaced."""
        lines = {
            stored: replace(line, text=_edited(line.text, _renames(line.text, names)))
            for stored, line in self.lines.items()
        }
        return replace(
            self, name=names.get(self.name, self.name), bases=[names.get(base, base) for base in self.bases],
            lines=lines,
        )  # fmt: skip

    def text(self, defined: Collection[str], own: Collection[str]) -> str:
        """Its source; the classes among `own` that are not yet defined are named by text."""
        keywords = [f"{name}={value}" for name, value in self.keywords.items()]
        head = class_head(self.name, [*self.bases, *keywords])
        body = []
        for line in self.lines.values():
            sources = [each for each in _sources(_field(line.text)) if isinstance(each, ast.Name)]
            early = [(each, quote(each.id)) for each in sources if each.id in own and each.id not in defined]
            text = _broken(_edited(line.text, early))
            body += [f"    {each}" for each in text.split("\n")]
        return "\n".join([head, *(body or ["    pass"]), *self.comments])


def parse(text: str, maintain: str | None = None) -> list[Class]:
    """The classes of a declaration, in order; `maintain` goes on its patterns."""
    return [_class(text, node, maintain) for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]


def _class(text: str, node: ast.ClassDef, maintain: str | None) -> Class:
    made = Class(node.name, [ast.unparse(base) for base in node.bases])
    for keyword in node.keywords:
        made.keywords[str(keyword.arg)] = _dedented(ast.get_source_segment(text, keyword.value) or "")
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            source = _dedented(ast.get_source_segment(text, each) or "")
            line = Line(each.target.id, _stored(each), source)
            if maintain is not None:
                line = replace(line, text=_maintained(source, maintain))
            made.lines[line.stored] = line
    block = text.split("\n")[node.body[0].lineno - 1 : _end(text, node)]
    made.comments = [line for line in block if line.startswith("    #")]
    return made


def _end(text: str, node: ast.ClassDef) -> int:
    """The last line of a class with the comments that end it."""
    lines, end = text.split("\n"), node.end_lineno or 0
    while end < len(lines) and lines[end].startswith("    #"):
        end += 1
    return end


def _index_keys(line: str) -> Keys | None:
    """The keys of an `IndexModel` that has no option but a name; None of any other."""
    try:
        node = ast.parse(line.strip().removesuffix(","), mode="eval").body
    except SyntaxError:
        # One that takes several lines.
        return None
    if not isinstance(node, ast.Call) or any(each.arg != "name" for each in node.keywords):
        return None
    return tuple(ast.literal_eval(node.args[0]))


def _dedented(text: str) -> str:
    """A source segment with its later lines relative to its first."""
    first, *others = text.split("\n")
    return "\n".join([first, *(line.removeprefix("    ") for line in others)])


def _stored(node: ast.AnnAssign) -> str:
    name = node.target.id if isinstance(node.target, ast.Name) else ""
    if isinstance(node.value, ast.Call):
        for keyword in node.value.keywords:
            if keyword.arg == "alias" and isinstance(keyword.value, ast.Constant):
                return str(keyword.value.value)
    return "_id" if name == "id" else name


def _field(text: str) -> ast.AnnAssign:
    node = ast.parse(text).body[0]
    assert isinstance(node, ast.AnnAssign)
    return node


def _parts(node: ast.AnnAssign) -> Iterator[ast.AST]:
    """All nodes but the field's own name."""
    for part in (node.annotation, node.value):
        if part is not None:
            yield from ast.walk(part)


def _names(node: ast.AnnAssign) -> list[ast.Name]:
    return [each for each in _parts(node) if isinstance(each, ast.Name)]


def _calls(node: ast.AnnAssign) -> list[ast.Call]:
    calls = [each for each in _parts(node) if isinstance(each, ast.Call)]
    return [each for each in calls if isinstance(each.func, ast.Name) and each.func.id in FOLLOWING]


def _sources(node: ast.AnnAssign) -> list[ast.expr]:
    return [call.args[0] for call in _calls(node) if call.args]


def _renames(text: str, names: Mapping[str, str]) -> list[Edit]:
    changes: list[Edit] = [(each, names[each.id]) for each in _names(_field(text)) if each.id in names]
    for each in _sources(_field(text)):
        # A source that is named by text.
        if isinstance(each, ast.Constant) and each.value in names:
            changes.append((each, quote(names[str(each.value)])))
    return changes


def _edited(text: str, edits: Iterable[Edit]) -> str:
    """The text with some of its expressions replaced; names are ASCII, so that columns count characters."""
    for node, instead in sorted(edits, key=_position, reverse=True):
        lines = text.split("\n")
        line, end = lines[node.lineno - 1], node.end_col_offset or 0
        lines[node.lineno - 1] = line[: node.col_offset] + instead + line[end:]
        text = "\n".join(lines)
    return text


def _position(edit: Edit) -> tuple[int, int]:
    return edit[0].lineno, edit[0].col_offset


def _maintained(text: str, maintain: str) -> str:
    """The field with `maintain=` on those of its patterns that say nothing of it."""
    edits: list[Edit] = []
    for call in _calls(_field(text)):
        if call.keywords and not any(each.arg == "maintain" for each in call.keywords):
            value: Any = call.keywords[-1].value
            segment = ast.get_source_segment(text, value)
            edits.append((value, f"{segment}, maintain={quote(maintain)}"))
    return _edited(text, edits)


def _broken(text: str) -> str:
    """A field whose line is too long, with its annotation on lines of its own."""
    if len(text) + 4 <= LINE_LENGTH and "\n" not in text:
        return text
    node = _field(text)
    annotation = node.annotation
    if not isinstance(annotation, ast.Subscript) or not isinstance(annotation.slice, ast.Tuple):
        return text
    parts = [" ".join((ast.get_source_segment(text, each) or "").split()) for each in annotation.slice.elts]
    name = text.partition(":")[0]
    outer = ast.get_source_segment(text, annotation.value)
    default = "" if node.value is None else f" = {ast.get_source_segment(text, node.value)}"
    inside = ", ".join(parts)
    lines = [f"    {inside}"] if len(inside) + 8 <= LINE_LENGTH else [f"    {part}," for part in parts]
    return "\n".join([f"{name}: {outer}[", *lines, f"]{default}"])

"""`treadle scan`, `explain` and `decide`: the advisor on the command line."""

from __future__ import annotations

import difflib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import bson
from bson import json_util
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.errors import BSONError
from pymongo.errors import ConfigurationError, ConnectionFailure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar
from rich.text import Text

from treadle.advisor import Decision, Limits, Relationship, Report, Step, decide, scan
from treadle.advisor.html import html
from treadle.advisor.reading import Lost, Refused
from treadle.advisor.report import printable, show, show_decisions
from treadle.advisor.rules import load
from treadle.commands.connection import Target, cannot_connect, connected, hosts
from treadle.errors import DataError, UsageError

WORKLOAD_BYTES_MAX = 2_000_000_000
# A list is read at once; documents one by one.
WORKLOAD_LIST_BYTES_MAX = 50_000_000
# Dates beyond the year 9999 stand in queries for "never"; they must not refuse a file.
_CODEC = CodecOptions[dict[str, Any]](tz_aware=True, datetime_conversion=DatetimeConversion.DATETIME_AUTO)
_JSON = json_util.JSONOptions(tz_aware=True, datetime_conversion=DatetimeConversion.DATETIME_AUTO)
_UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, BSONError)


def scan_target(
    target: Target,
    limits: Limits,
    workload: Path | None,
    secondary: bool,
    show_values: bool,
    progress: Callable[[Step], None] | None = None,
) -> Report:
    """The report on the URI's database."""
    recorded: Iterable[dict[str, Any]] | None = None if workload is None else read_workload(workload)
    with connected(target.uri) as client:
        try:
            database = client.get_default_database()
        except ConfigurationError:
            raise UsageError(
                "The URI names no database; add it as the path, as in mongodb://host:27017/shop.",
                code="database-missing",
            ) from None
        try:
            return scan(
                database,
                limits=limits,
                workload=recorded,
                secondary=secondary,
                show_values=show_values,
                progress=progress,
            )
        except (Lost, ConnectionFailure):
            raise cannot_connect(hosts(target.uri), ConnectionFailure()) from None
        except Refused as refused:
            raise DataError(
                f"The collections of {database.name} could not be listed: {refused.reason}; log in as a user "
                "with the role read on it.",
                code="scan-refused",
            ) from None


def read_workload(path: Path) -> Iterator[dict[str, Any]]:
    """Profiler documents from a file, one by one: BSON, a JSON list, or one JSON document per line.

    A file that begins with none is refused at once, one that holds something
    else later when that is come to.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            is_list = file.read(4096).removeprefix(_MARK).lstrip()[:1] == b"["
    except OSError as error:
        raise UsageError(
            f"--workload {path} cannot be read: {error.strerror}", code="workload-invalid"
        ) from None
    listed = is_list and path.suffix != ".bson"
    most = WORKLOAD_LIST_BYTES_MAX if listed else WORKLOAD_BYTES_MAX
    if size > most:
        raise UsageError(
            f"--workload {path} is larger than {most // 1_000_000} MB; give a part of it"
            + (", or one document per line" if listed else ""),
            code="workload-invalid",
        )
    documents = _documents(path, listed)
    first = list(itertools.islice(documents, 1))
    return itertools.chain(first, documents)


_MARK = b"\xef\xbb\xbf"


def _documents(path: Path, listed: bool) -> Iterator[dict[str, Any]]:
    number = 0
    try:
        for found in _parsed(path, listed):
            if not isinstance(found, dict):
                raise TypeError
            yield found
            number += 1
    except OSError as error:
        raise UsageError(
            f"--workload {path} cannot be read: {error.strerror}", code="workload-invalid"
        ) from None
    except _UNREADABLE:
        what = f"something else after {number:,} profiler documents" if number else "no profiler documents"
        raise UsageError(
            f"--workload {path} holds {what}; it takes .bson, a JSON list, or one JSON document per line, as "
            "`mongoexport --collection system.profile` writes them",
            code="workload-invalid",
        ) from None


def _parsed(path: Path, listed: bool) -> Iterator[Any]:
    with path.open("rb") as file:
        if path.suffix == ".bson":
            yield from bson.decode_file_iter(file, codec_options=_CODEC)
        elif listed:
            yield from json_util.loads(file.read().removeprefix(_MARK).decode(), json_options=_JSON)
        else:
            # By line feeds alone: text may hold other characters that Python takes for the end of a line.
            for number, line in enumerate(file):
                text = (line.removeprefix(_MARK) if number == 0 else line).decode().strip()
                if text:
                    yield json_util.loads(text, json_options=_JSON)


def write_html(report: Report, path: Path) -> None:
    """Write the report as one file."""
    try:
        path.write_text(html(report), encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"--html {path} cannot be written: {error.strerror}", code="output-invalid"
        ) from None


def as_json(report: Report) -> str:
    return json.dumps(report.as_json(), indent=2, ensure_ascii=False, allow_nan=False, default=str)


@contextmanager
def progress_bar(console: Console) -> Iterator[Callable[[Step], None]]:
    """A bar that names what is looked at now, on the console given (which should be standard error)."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("scan", total=None)

        def report(step: Step) -> None:
            name = printable(step.what)
            bar.update(task, description=name[:40].ljust(40), completed=step.done, total=step.total)

        yield report


def explain(code: str, console: Console) -> None:
    """What a code means, why it matters and when it does not."""
    rules = load()
    if code not in rules:
        near = difflib.get_close_matches(code, rules, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(rules))}"
        raise UsageError(f"there is no finding with the code {code!r}; {hint}", code="code-unknown")
    rule, _ = rules[code]
    console.print(Text(f"{rule.code}: {rule.title}", style="bold"))
    for name, said in (
        ("Pattern", rule.pattern),
        ("Symptom", rule.symptom),
        ("Remedy", rule.remedy),
        ("Costs", rule.costs),
        ("Gains", rule.gains),
        ("When not", rule.when_not),
    ):
        console.print(Text(f"{name}: {said}"))


def explained_as_json(code: str | None) -> str:
    """A rule as JSON, or all of them."""
    rules = load()
    if code is None:
        return json.dumps([asdict(rule) for rule, _ in rules.values()], indent=2)
    if code not in rules:
        explain(code, Console(quiet=True))
    return json.dumps(asdict(rules[code][0]), indent=2)


def list_codes(console: Console) -> None:
    for code, (rule, _) in load().items():
        console.print(Text(f"{code:26} {rule.title}"))


def ask(prompt: Callable[[str], str], console: Console, as_json: bool = False) -> None:
    """Embed or reference, by questions; only those that can still matter are asked."""
    many = _yes(prompt, "Does a child belong to several parents?")
    most = typical = size = 0
    together: bool | None = None
    atomic = often = grows = False
    if not many:
        most = _number(prompt, "How many children has the largest parent?")
        typical = _number(prompt, "And a usual one?", most)
        size = _number(prompt, "How many bytes has a child, about?")
        grows = _yes(prompt, "Do children keep coming?")
        together = _yes(prompt, "Are children always read together with their parent?")
        atomic = _yes(prompt, "Must children change together with their parent, in one write?")
        often = _yes(prompt, "Do children change often?")
    show_decision(
        decide(Relationship(most, typical, many, together, atomic, size, often, grows)), console, as_json
    )


def answer(relationship: Mapping[str, Any], console: Console, as_json: bool) -> None:
    """Embed or reference, by what the options say of one relationship."""
    given = dict(relationship)
    if given.get("children_max") is None and not given.get("many_to_many"):
        raise UsageError(
            "say how many children the largest parent has: --children-max, or --many-to-many",
            code="relationship-invalid",
        )
    given["children_max"] = given.get("children_max") or 0
    show_decision(decide(Relationship(**given)), console, as_json)


def show_decision(found: Decision, console: Console, as_json: bool) -> None:
    """One decision with the way that led to it."""
    if as_json:
        console.print(json.dumps(_decided(found), indent=2), markup=False, highlight=False, soft_wrap=True)
        return
    console.print(Text(found.advice, style="bold"))
    for answer in found.path:
        console.print(Text(f"  {answer.question} {answer.answer}"))
    for factor in found.factors:
        console.print(Text(f"  {factor}"))


def _decided(found: Decision) -> dict[str, Any]:
    return {
        "choice": found.choice,
        "advice": found.advice,
        "answers": [asdict(answer) for answer in found.path],
        "factors": list(found.factors),
    }


ANSWERS_MAX = 5


def _yes(prompt: Callable[[str], str], question: str) -> bool:
    for _ in range(ANSWERS_MAX):
        said = prompt(f"{question} (yes/no)").strip().lower()
        if said in ("y", "yes"):
            return True
        if said in ("n", "no", ""):
            return False
    raise UsageError(f"the answer to {question!r} is yes or no", code="answer-invalid")


def _number(prompt: Callable[[str], str], question: str, most: int | None = None) -> int:
    for _ in range(ANSWERS_MAX):
        said = prompt(question).strip().replace(",", "").replace("_", "")
        if said.isdecimal() and (most is None or int(said) <= most):
            return int(said)
    limit = "" if most is None else f" of at most {most:,}"
    raise UsageError(f"the answer to {question!r} is a whole number{limit}", code="answer-invalid")


def shown(report: Report, console: Console, brief: bool) -> None:
    show(report, console, declarations=not brief)


def show_decided(report: Report, console: Console, as_json: bool) -> None:
    """Embed or reference for each relation that was measured."""
    if not as_json:
        show_decisions(report, console)
        return
    rows = [
        {
            "child": relation.child,
            "path": relation.path,
            "parent": relation.parent,
            **_decided(decision),
        }
        for relation, decision in report.decisions
    ]
    console.print(json.dumps(rows, indent=2), markup=False, highlight=False, soft_wrap=True)

"""Very many tiny documents, each one reading of something at some time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from treadle.advisor.decide import has_own_key
from treadle.advisor.declare import Source, class_name, quote
from treadle.advisor.facts import CollectionFacts, Scan, Series
from treadle.advisor.interface import Finding, Rule
from treadle.advisor.naming import words
from treadle.advisor.probes import reading_fields
from treadle.advisor.proposals import Draft
from treadle.advisor.wording import duration, nice, share, size

RULE = Rule(
    "bucket",
    "Bucket",
    "Millions of tiny time-stamped documents",
    "Small flat documents with a time, a key that recurs, and numbers.",
    "Keep the readings of one key and one window of time in one document, or use a native time "
    "series collection.",
    "A reading is no longer a document; raw readings are read through a view.",
    "Fewer documents and index entries; statistics of a window without unpacking it.",
    "Not where readings are often changed one by one, nor where each is looked up by its own id.",
)
READINGS_PER_SERIES_MIN = 100
SUMMARY_GAP_SECONDS = 43_200
SUMMARY_DOCUMENTS_MAX = 50_000
# What goes through states is more than a reading.
STATES = frozenset({"status", "state", "stage", "phase", "owner", "user", "customer", "assignee"})
UPDATES_SHARE_MAX = 0.2
READINGS_PER_BUCKET = 200
SPANS_SECONDS = (60, 300, 900, 3_600, 21_600, 86_400, 604_800, 2_592_000)


def find(scan: Scan) -> Iterator[Finding]:
    for facts in scan.plain():
        series = facts.series
        if series is None or series.lengths.median < READINGS_PER_SERIES_MIN or not _are_readings(series):
            continue
        # A few numbers a day are a summary, which is looked up by its day.
        if series.gap_seconds >= SUMMARY_GAP_SECONDS and facts.count < SUMMARY_DOCUMENTS_MAX:
            continue
        # What is referred to is looked up by its own id.
        is_parent = any(relation.parent == facts.name for relation in scan.relations)
        if not is_parent and not has_own_key(facts) and not _is_updated(scan, facts):
            yield _finding(facts, series)


def _are_readings(series: Series) -> bool:
    """Whether nothing but numbers varies within a series, or at whole steps of time also a description."""
    if not series.varying:
        return True
    is_state = any(STATES & set(words(name)) for name in series.varying)
    return series.grid_seconds > 0 and len(series.measures) > len(series.varying) and not is_state


def _is_updated(scan: Scan, facts: CollectionFacts) -> bool:
    if scan.workload is None:
        return False
    others = scan.workload.count(facts.name, ("insert", "find", "aggregate"))
    return scan.workload.count(facts.name, ("update",)) > UPDATES_SHARE_MAX * max(1, others)


def _finding(facts: CollectionFacts, series: Series) -> Finding:
    # The window that holds some two hundred readings.
    ideal = series.gap_seconds * READINGS_PER_BUCKET
    span = min(SPANS_SECONDS, key=lambda seconds: abs(seconds - ideal))
    per_bucket = max(1, round(span / series.gap_seconds)) if series.gap_seconds else READINGS_PER_BUCKET
    source = _declaration(facts, series, span, per_bucket)
    return Finding(
        RULE,
        facts.name,
        series.time,
        f"{facts.count:,} documents of {size(facts.mean_bytes)} are readings of "
        f"{series.lengths.count:,} series.",
        {
            "documents": facts.count,
            "mean document size": size(facts.mean_bytes),
            "series": series.lengths.count,
            "readings per series, median": series.lengths.median,
            "time between readings": duration(series.gap_seconds),
            **({"at whole steps of": duration(series.grid_seconds)} if series.grid_seconds else {}),
            "index size": size(facts.index_bytes),
            "index size, share of data size": share(facts.index_bytes, facts.data_bytes),
            "buckets instead of documents": max(
                1, round(facts.count / min(per_bucket, READINGS_PER_BUCKET * 5))
            ),
        },
        source.text(),
        (
            f"The declaration names a new collection; copy the readings of {facts.name} into it with "
            "insert_many.",
            *(("What stands in objects is a field of the reading there.",) if _has_objects(facts) else ()),
            *((f"{series.time} is text; the model makes a date of it.",) if _is_text(facts, series) else ()),
            "On MongoDB 5.0 and newer, timeseries= uses the server's native kind instead of bucket=.",
        ),
        severity="warning" if facts.count >= 50_000 else "info",
        confidence="high" if not series.metadata or series.gap_seconds < 3_600 else "medium",
        draft=Draft(classes=tuple(source.blocks)),
    )


def _has_objects(facts: CollectionFacts) -> bool:
    return any(len(each.steps) > 1 for each in reading_fields(facts))


def _is_text(facts: CollectionFacts, series: Series) -> bool:
    return facts.fields[series.time].type == "string"


def _flat(facts: CollectionFacts) -> tuple[CollectionFacts, dict[str, str]]:
    """The readings without objects, and what each path is called then."""
    fields = {name: each for name, each in facts.fields.items() if name == "_id"}
    names: dict[str, str] = {}
    for each in reading_fields(facts):
        name = each.name if each.name not in fields and each.name.lower() != "value" else "_".join(each.steps)
        names[each.path] = name
        fields[name] = replace(each, path=name, steps=(name,))
    return replace(facts, fields=fields), names


def _declaration(facts: CollectionFacts, series: Series, span: int, per_bucket: int) -> Source:
    source = Source()
    facts, flat = _flat(facts)
    series = replace(
        series,
        key=flat[series.key],
        time=flat[series.time],
        measures=tuple(flat[each] for each in series.measures),
        metadata=tuple(flat[each] for each in series.metadata),
    )
    if _is_text(facts, series):
        time_field = facts.fields[series.time]
        dated = replace(time_field, types={"date": time_field.present})
        facts = replace(facts, fields={**facts.fields, series.time: dated})
    names = Source.names(facts)

    def tuple_of(fields: Iterable[str]) -> str:
        return f"({', '.join(quote(names[name]) for name in fields)},)"

    key, time = f"key={quote(names[series.key])}", f"time={quote(names[series.time])}"
    parts = [key, time, f"span={_timedelta(span)}", f"limit={nice(per_bucket * 1.5)}"]
    if series.measures:
        parts.append(f"stats={tuple_of(series.measures)}")
    if series.metadata:
        parts.append(f"metadata={tuple_of(series.metadata)}")
    keywords = [
        "bucket=Bucket(\n" + "".join(f"    {part},\n" for part in parts) + ")",
        f"# Native: timeseries=TimeSeries({time}, {key})",
    ]
    source.document(facts, keywords=keywords, collection=f"{facts.name}_buckets", name=class_name(facts.name))
    return source


def _timedelta(seconds: int) -> str:
    for unit, length in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds % length == 0:
            return f"timedelta({unit}={seconds // length})"
    return f"timedelta(seconds={seconds})"

"""A report as one self-contained HTML file: no network, printable, light and dark.

Everything that comes from the database is escaped. A content security policy
allows one script, the one below, by its hash, and no request at all.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
from collections.abc import Iterator

from treadle.advisor.facts import CollectionFacts, FieldFacts
from treadle.advisor.interface import Finding
from treadle.advisor.pictures import graph, histogram, table, text
from treadle.advisor.report import Report
from treadle.advisor.wording import duration, number, plural, share, size

FIELDS_SHOWN_MAX = 60
COLLECTIONS_SHOWN_MAX = 200

STYLE = """
:root { color-scheme: light dark; --paper: #faf9f6; --card: #ffffff; --ink: #22262b; --quiet: #646b75;
  --line: #e3e1da; --accent: #3f6382; --bar: #8fabc2; --tail: #c8733f; --code: #f4f2ec;
  --info: #47788c; --warning: #a06a12; --problem: #b23b36; --well: #4b7a52; }
@media screen and (prefers-color-scheme: dark) { :root { --paper: #15181c; --card: #1c2025; --ink: #e4e2dc;
  --quiet: #9aa1ab; --line: #2e343b; --accent: #8fb4d3; --bar: #4f7391; --tail: #d98a57; --code: #12151a;
  --info: #7fb2c6; --warning: #d9a94f; --problem: #e5857f; --well: #86b98c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); overflow-wrap: anywhere;
  font: 16px/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 3rem 1.5rem 5rem; }
h1 { font-size: 2rem; font-weight: 600; letter-spacing: -0.02em; margin: 0 0 .25rem; }
h2 { font-size: 1.25rem; font-weight: 600; margin: 3.5rem 0 1rem; }
h3 { font-size: 1.05rem; font-weight: 600; margin: 0; }
h4 { font-size: .9rem; font-weight: 600; margin: 1.25rem 0 .25rem; }
p { margin: .5rem 0; max-width: 46rem; }
.quiet, .about, dt { color: var(--quiet); }
.numbers { display: flex; flex-wrap: wrap; gap: 2.5rem; margin: 2rem 0 0; padding: 0; list-style: none; }
.numbers b { display: block; font-size: 1.75rem; font-weight: 600; line-height: 1.2;
  font-variant-numeric: tabular-nums; }
.numbers span { color: var(--quiet); font-size: .875rem; }
article, .collection { background: var(--card); border: 1px solid var(--line); border-radius: 12px;
  padding: 1.25rem 1.5rem; margin: 0 0 1rem; }
article header { display: flex; flex-wrap: wrap; gap: .25rem .75rem; align-items: baseline; }
.badge { font-size: .75rem; font-weight: 600; letter-spacing: .02em; border: 1px solid currentColor;
  border-radius: 99px; padding: .05rem .6rem; }
.info { color: var(--info); } .warning { color: var(--warning); } .problem { color: var(--problem); }
.well { color: var(--well); }
code, pre, .path { font: .84rem/1.55 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.path { color: var(--accent); }
pre { background: var(--code); border: 1px solid var(--line); border-radius: 8px; padding: .9rem 1rem;
  margin: .25rem 0 0;
  overflow-x: auto; white-space: pre; overflow-wrap: normal; }
dl { display: grid; grid-template-columns: minmax(10rem, max-content) 1fr; gap: .15rem 1.5rem; margin: 1rem 0;
  font-size: .9rem; }
dd { margin: 0; font-variant-numeric: tabular-nums; }
.advice { font-size: .9rem; }
.advice b { font-weight: 600; }
.code { position: relative; }
button { position: absolute; top: .6rem; right: .6rem; font: inherit; font-size: .8rem; color: var(--quiet);
  background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: .1rem .6rem;
  cursor: pointer; }
button:hover { color: var(--ink); }
table { border-collapse: collapse; font-size: .85rem; width: 100%; font-variant-numeric: tabular-nums;
  margin: .5rem 0; }
th { text-align: left; font-weight: 600; color: var(--quiet); }
th, td { padding: .25rem .75rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
details { margin: .35rem 0; } summary { cursor: pointer; font-size: .85rem; color: var(--quiet); }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(20rem, 100%), 1fr)); gap: 0
  2rem; }
figure { margin: .75rem 0 0; min-width: 0; } figcaption { font-size: .85rem; color: var(--quiet); }
figure.wide { overflow-x: auto; }
svg { display: block; width: 100%; height: auto; }
svg text { font: 11px system-ui, sans-serif; fill: var(--quiet); }
svg .tick { text-anchor: middle; } svg .mark { text-anchor: end; }
svg .bar { fill: var(--bar); } svg .tail { fill: var(--tail); } svg .axis { stroke: var(--line); }
.graph .node rect { fill: var(--card); stroke: var(--line); stroke-width: 1.5; }
.graph .node.warning rect { stroke: var(--warning); } .graph .node.problem rect { stroke: var(--problem); }
.graph .node.info rect { stroke: var(--info); }
.graph .name { font-size: 13px; font-weight: 600; fill: var(--ink); }
.graph path { fill: none; stroke: var(--quiet); stroke-width: 1.2; opacity: .75; }
.graph path.broken { stroke: var(--tail); stroke-dasharray: 5 3; } .graph path.tip { fill: var(--quiet);
  stroke: none; }
@media (max-width: 40rem) { dl { display: block; } dd { margin: 0 0 .5rem; } main { padding: 2rem 1rem; }
  article, .collection { padding: 1rem; } .numbers { gap: 1.25rem 2rem; } }
@media print { :root { color-scheme: light; } .graph { min-width: 0 !important; }
  figure.wide { overflow: visible; } body { background: #fff; }
  main { padding: 0; max-width: none; } button { display: none; }
  article, .collection, figure { break-inside: avoid; } pre { white-space: pre-wrap; overflow-wrap:
  anywhere; } }
"""

SCRIPT = """
for (const button of document.querySelectorAll("button")) {
  button.hidden = false;
  button.addEventListener("click", async () => {
    const code = button.parentElement.querySelector("code");
    try { await navigator.clipboard.writeText(code.textContent); button.textContent = "Copied"; }
    catch { const range = document.createRange(); range.selectNodeContents(code);
      const selection = getSelection(); selection.removeAllRanges(); selection.addRange(range);
      button.textContent = "Selected"; }
  });
}
addEventListener("beforeprint", () => { for (const each of document.querySelectorAll("details"))
  each.open = true; });
"""

_SEVERITIES = {"problem": "should be fixed soon", "warning": "is worth changing", "info": "is worth knowing"}


def html(report: Report, before: str = "") -> str:
    """One inert file: it runs one script, by its hash, and requests nothing.

    `before` is escaped HTML that goes above the findings.
    """
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="referrer" content="no-referrer">'
        f"<title>{text(report.scan.database)} – Treadle scan</title><style>{STYLE}</style></head><body><main>"
        + "".join(_parts(report, before))
        + f"</main><script>{SCRIPT}</script></body></html>\n"
    )


def _parts(report: Report, before: str) -> Iterator[str]:
    scan = report.scan
    yield f"<h1>{text(scan.database)}</h1><p class='quiet'>What this database asks for, judging by what it"
    yield " holds and how it is used.</p>" if scan.workload else " holds. No workload was seen.</p>"
    yield _numbers(report)
    yield before
    for note in (*scan.notes, *report.failures):
        yield f"<p class='warning'>{text(note)}</p>"
    worst: dict[str, str] = {}
    for each in report.findings:
        worst.setdefault(each.collection, each.severity)
    yield f"<h2>Collections and references</h2><figure class='wide'>{graph(scan, worst)}</figure>"
    if scan.relations:
        yield "<p class='quiet'>An arrow leads from the document that holds an id to the one that it names. "
        yield "A dashed one has orphans.</p>"
    yield "<h2>What to change</h2>"
    if not report.findings:
        yield "<p class='well'>Nothing to change was found.</p>"
    for each in report.findings:
        yield _finding(each)
    if report.healthy:
        yield "<h2>What is fine</h2><p>" + ", ".join(
            f"<span class='path'>{text(facts.name)}</span>" for facts in report.healthy
        )
        yield " – read, and no rule found anything to change.</p>"
    yield "<h2>What was measured</h2>"
    first = list(scan.collections.values())[:COLLECTIONS_SHOWN_MAX]
    numbers = itertools.count(1)
    for facts in first:
        yield from _collection(facts, numbers)
    if len(scan.names) > len(first):
        yield f"<p class='quiet'>{len(scan.names) - len(first):,} more collections are not shown.</p>"


def _numbers(report: Report) -> str:
    scan = report.scan
    documents = sum(facts.count for facts in scan.collections.values())
    data = sum(facts.data_bytes for facts in scan.collections.values())
    rows = [
        (number(len(scan.names)), "collections"),
        (number(documents), "documents"),
        (size(data), "of data"),
        (number(len(scan.relations)), "references"),
        (number(len(report.findings)), "findings"),
    ]
    if scan.workload is not None:
        rows.append((number(scan.workload.operations), f"operations in {duration(scan.workload.seconds)}"))
    items = "".join(f"<li><b>{text(value)}</b><span>{text(name)}</span></li>" for value, name in rows)
    return f"<ul class='numbers'>{items}</ul>"


def _finding(each: Finding) -> str:
    evidence = "".join(
        f"<dt>{text(name)}</dt><dd>{text(number(value) if isinstance(value, (int, float)) else value)}</dd>"
        for name, value in each.evidence.items()
    )
    steps = "".join(f"<li>{text(step)}</li>" for step in each.steps)
    pattern = "" if each.rule.pattern == "anti-pattern" else f" · {text(each.rule.pattern)}"
    return (
        f"<article><header><span class='badge {each.severity}' "
        f"title='{_SEVERITIES[each.severity]}'>{each.severity}</span>"
        f"<h3>{text(each.rule.title)}</h3><span class='path'>{text(each.where)}</span></header>"
        f"<p>{text(each.summary)}</p><dl>{evidence}</dl>"
        f"<div class='advice'><p><b>Do</b> {text(each.rule.remedy)}</p><p><b>Costs</b> "
        f"{text(each.rule.costs)}</p>"
        f"<p><b>Gains</b> {text(each.rule.gains)}</p><p><b>When not</b> {text(each.rule.when_not)}</p></div>"
        f"<h4>Declaration</h4><div class='code'><button hidden type='button'>Copy</button>"
        f"<pre><code>{code(each.declaration)}</code></pre></div>"
        + (f"<ol class='advice'>{steps}</ol>" if steps else "")
        + f"<p class='quiet advice'>{text(each.code)}{pattern} · confidence {each.confidence}</p></article>"
    )


def code(source: str) -> str:
    return "\n".join(text(line) for line in source.rstrip("\n").split("\n"))


def _collection(facts: CollectionFacts, numbers: Iterator[int]) -> Iterator[str]:
    """One section; each chart takes the next of the numbers."""
    yield f"<section class='collection'><h3 class='path'>{text(facts.name)}</h3>"
    if facts.skipped:
        yield f"<p class='quiet'>Not looked into: {text(facts.skipped)}.</p></section>"
        return
    yield f"<p class='quiet'>{text(_about(facts))}</p>"
    for note in facts.notes:
        yield f"<p class='quiet'>{text(note)}.</p>"
    yield "<div class='charts'>"
    if facts.sizes is not None and facts.sizes.count:
        chart = histogram(next(numbers), f"Document sizes of {facts.name}", facts.sizes, size)
        yield f"<figure><figcaption>Document sizes</figcaption>{chart}</figure>"
    for each in facts.fields.values():
        if each.lengths is not None and each.lengths.count:
            title = f"Lengths of {each.path} in {facts.name}"
            chart = histogram(next(numbers), title, each.lengths, number)
            yield f"<figure><figcaption>Items in {text(each.path)}</figcaption>{chart}</figure>"
    yield "</div>"
    if facts.fields:
        yield _fields(facts)
    if facts.indexes:
        rows = [
            (index.name, ", ".join(f"{path} {way}" for path, way in index.keys),
             "unique" if index.unique else "", "not seen" if index.uses is None else f"{index.uses:,}",
             size(index.bytes or 0))
            for index in facts.indexes
        ]  # fmt: skip
        yield table(("index", "keys", "", "uses", "size"), rows, plural(len(rows), "index", "indexes"))
    yield "</section>"


def _about(facts: CollectionFacts) -> str:
    parts = [
        facts.kind,
        plural(facts.count, "document"),
        f"{size(facts.data_bytes)} of data",
        f"{size(facts.index_bytes)} of indexes",
    ]
    if facts.growth is not None and (facts.growth.last - facts.growth.first).days > 1:
        parts.append(f"{number(facts.growth.per_day)} new a day since {facts.growth.first:%Y-%m-%d}")
    if facts.validated is not None:
        parts.append("with a validator" if facts.validated else "without a validator")
    return ", ".join(parts)


def _fields(facts: CollectionFacts) -> str:
    rows = [(each.path, share(each.present, each.looked_at), _types(each)) for each in facts.fields.values()]
    more = "" if len(rows) <= FIELDS_SHOWN_MAX else f" (the first {FIELDS_SHOWN_MAX})"
    return table(("field", "present", "types"), rows[:FIELDS_SHOWN_MAX], plural(len(rows), "field") + more)


def _types(each: FieldFacts) -> str:
    types = sorted(each.types.items(), key=lambda pair: (-pair[1], pair[0]))
    return ", ".join(kind if len(types) == 1 else f"{kind} {share(n, each.present)}" for kind, n in types)

"""How Sphinx makes the site: `make docs`.

The pages are plain Markdown that reads the same in a repository browser, so
nothing of Sphinx stands in them. The source folder is the whole project, for
links that lead out of `docs/` (the report of the benchmarks, the changelog).
What is not in NAVIGATION fails the build, and so does a broken link.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent

NAVIGATION = {
    "Start": ["tutorial", "how-it-works", "choosing", "advisor", "faq"],
    "Patterns": [
        "patterns/extended-reference",
        "patterns/computed",
        "patterns/rollup",
        "patterns/subset",
        "patterns/bucket",
        "patterns/time-series",
        "patterns/outlier",
        "patterns/approximation",
        "patterns/attributes",
        "patterns/links",
        "patterns/history",
        "patterns/archive",
        "patterns/polymorphic",
        "patterns/schema-versioning",
        "patterns/validation",
        "trees",
        "patterns/ancestor-array",
        "patterns/parent-reference",
        "patterns/child-references",
        "patterns/materialized-path",
    ],
    "How-to": [
        "adopting",
        "beside-another-odm",
        "closed-loop",
        "fastapi",
        "testing",
        "production-checklist",
        "deploying",
        "worker",
        "monitoring",
        "verification",
        "releases",
        "failover",
        "backup",
        "dashboard",
        "local-server",
        "extending",
    ],
    "Coming from": ["coming-from/pymongo", "coming-from/beanie", "coming-from/mongoengine"],
    "Reference": [
        "models",
        "store",
        "api-reference",
        "cli",
        "cli-reference",
        "errors",
        "limits",
        "servers",
        "glossary",
        "architecture",
    ],
    "Project": ["/examples/README", "/benchmarks/RESULTS", "/CONTRIBUTING", "/SECURITY", "/CHANGELOG"],
}

project = "Treadle"
# Read, not imported: the site can be built where the library's own dependencies are missing.
version = release = re.findall(r'__version__ = "(.+)"', (ROOT / "src/treadle/__init__.py").read_text())[0]
language = "en"

extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = [
    "docs/*.md",
    "docs/**/*.md",
    "benchmarks/RESULTS.md",
    "examples/README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
]
# Folders that are not even walked through.
exclude_patterns = [".*", "build", "dist", "examples/*/**", "src", "tests", "**/__pycache__"]
myst_heading_anchors = 4
nitpicky = True

html_theme = "furo"
html_title = f"Treadle {version}"
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True, "footer_icons": []}
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
templates_path: list[str] = []
pygments_style = "friendly"
pygments_dark_style = "github-dark"


def add_navigation(app: Any, name: str, source: list[str]) -> None:
    """The side bar, at the end of the index page."""
    if name == root_doc:
        for caption, pages in NAVIGATION.items():
            listed = "\n".join(pages)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{listed}\n```\n"


def name_folders(app: Any, name: str, source: list[str]) -> None:
    """A folder has no page: where one is linked to, its name stays."""
    source[0] = re.sub(r"\[[^\]\n]+\]\(([\w./-]+)/\)", r"`\1`", source[0])


def link_home(app: Any, exception: Exception | None) -> None:
    """Whoever opens the folder gets the index page."""
    if exception is None:
        (Path(app.outdir) / "index.html").write_text(
            '<!doctype html><html lang="en"><meta charset="utf-8"><title>Treadle</title>'
            '<meta http-equiv="refresh" content="0; url=docs/index.html">'
            '<a href="docs/index.html">Treadle</a></html>\n'
        )


def write_texts(app: Any, exception: Exception | None) -> None:
    """The text of every page, for excerpts of a search in a folder (static/site.js)."""
    if exception is None and app.builder.format == "html":
        texts = {name: app.env.get_doctree(name).astext() for name in sorted(app.env.found_docs)}
        static = Path(app.outdir) / "_static"
        (static / "texts.js").write_text(f"window.treadleTexts = {json.dumps(texts)};\n")


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", add_navigation)
    app.connect("source-read", name_folders)
    app.connect("build-finished", link_home)
    app.connect("build-finished", write_texts)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

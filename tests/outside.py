"""The patterns of docs/extending.md, imported as modules of a user's own, which are not part of Treadle."""

from __future__ import annotations

import importlib.util
import re
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

from treadle import Document

PAGE = Path(__file__).parent.parent / "docs" / "extending.md"


def load(pattern: str) -> ModuleType:
    """The module that the page's block about a pattern is, in a file of its own."""
    name = f"{pattern.lower()}_of_a_user"
    if name not in sys.modules:
        (code,) = re.findall(rf'```python\n("""{pattern}: .*?)```', PAGE.read_text(), re.DOTALL)
        path = Path(tempfile.mkdtemp()) / f"{name}.py"
        path.write_text(code)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


Slug = load("Slug").Slug
Outbox = load("Outbox").Outbox


class Page(Document, collection="pages"):
    title: str
    section: str = "news"
    slug: Annotated[str | None, Slug("title", among="section")] = None


def pages() -> dict[str, list[dict[str, Any]]]:
    return {
        "pages": [
            {"title": "Old", "section": "news"},
            {"title": "Old", "section": "news", "slug": "wrong"},
            {"title": "Old", "section": "sport", "slug": None},
        ]
    }

"""The pattern of docs/extending.md, imported as a user's own module, which is not part of Treadle."""

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
NAME = "slug_of_a_user"


def load() -> ModuleType:
    """The module that the page's first block is, in a file of its own."""
    if NAME not in sys.modules:
        code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
        path = Path(tempfile.mkdtemp()) / f"{NAME}.py"
        path.write_text(code)
        spec = importlib.util.spec_from_file_location(NAME, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[NAME] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[NAME])
    return sys.modules[NAME]


Slug = load().Slug


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

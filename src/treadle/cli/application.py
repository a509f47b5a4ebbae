"""The application's own Store, which `--app package.module:name` names."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from treadle.cli.progress import model_bars
from treadle.errors import UsageError

if TYPE_CHECKING:
    from treadle.model.document import Document
    from treadle.store.async_store import AsyncStore
    from treadle.store.blocking.store import Store

    AnyStore = Store | AsyncStore

Call = Callable[..., Any]


def load_store(app: str) -> AnyStore:
    """The store that `package.module:name` names; if that is a function, what it returns."""
    from treadle.store.async_store import AsyncStore
    from treadle.store.blocking.store import Store

    module_name, _, name = app.partition(":")
    if not module_name or not name:
        raise UsageError(f"--app {app!r} is not of the form package.module:store", code="app-invalid")
    if "" not in sys.path and "." not in sys.path:
        sys.path.insert(0, "")
    try:
        value: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(error.name + ".")):
            raise
        raise UsageError(
            f"--app names the module {module_name!r}, which cannot be found from this folder",
            code="app-invalid",
        ) from None
    for part in name.split("."):
        value = getattr(value, part, None)
        if value is None:
            raise UsageError(f"{module_name} has nothing called {name!r}", code="app-invalid")
    if inspect.isfunction(value):
        value = value()
    if not isinstance(value, (Store, AsyncStore)):
        raise UsageError(f"{app} is a {type(value).__name__}, not a Store or AsyncStore", code="app-invalid")
    return value


@contextmanager
def open_store(app: str) -> Iterator[tuple[AnyStore, Call]]:
    """The store, and a function that calls one of its methods and waits for the result.

    All calls of an AsyncStore share one event loop; it is closed afterwards.
    """
    import asyncio

    from treadle.store.blocking.store import Store

    store = load_store(app)
    if isinstance(store, Store):
        yield store, lambda method, *arguments, **options: method(*arguments, **options)
        return
    with asyncio.Runner() as runner:
        try:
            yield store, lambda method, *arguments, **options: runner.run(method(*arguments, **options))
        finally:
            runner.run(store.close())


def call_with_progress(app: str, method: str, names: list[str] | None) -> Any:
    """Call a method of the store that takes models, with a progress bar for each."""
    with model_bars() as report, open_store(app) as (store, call):
        return call(getattr(store, method), *models_named(store, names), progress=report)


def models_named(store: AnyStore, names: list[str] | None) -> list[type[Document]]:
    """The models of the store that were named on the command line."""
    known: dict[str, type[Document]] = {model.__name__: model for model in store.graph.entries}
    for name in names or ():
        if name not in known:
            raise UsageError(
                f"the store has no model {name!r}; it has {', '.join(sorted(known))}", code="model-unknown"
            )
    return [known[name] for name in names or ()]

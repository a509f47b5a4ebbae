"""The application's own Store, found by `--app package.module:name`."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

from treadle.errors import UsageError
from treadle.model.document import Document
from treadle.store.async_store import AsyncStore
from treadle.store.blocking.store import Store


def load_store(app: str) -> Store | AsyncStore:
    """The store that `package.module:name` names; a function is called for it."""
    module_name, _, name = app.partition(":")
    if not module_name or not name:
        raise UsageError(f"--app {app!r} is not of the form package.module:store", code="app-invalid")
    if "" not in sys.path and "." not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(error.name + ".")):
            raise
        raise UsageError(
            f"--app names the module {module_name!r}, which cannot be found from this folder",
            code="app-invalid",
        ) from None
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
        if found is None:
            raise UsageError(f"{module_name} has nothing called {name!r}", code="app-invalid")
    if inspect.isfunction(found):
        found = found()
    if not isinstance(found, (Store, AsyncStore)):
        raise UsageError(f"{app} is a {type(found).__name__}, not a Store or AsyncStore", code="app-invalid")
    return found


def call(store: Store | AsyncStore, method: str, *arguments: Any, **options: Any) -> Any:
    """A call of either kind of store, waited for."""
    if isinstance(store, Store):
        return getattr(store, method)(*arguments, **options)

    async def waited() -> Any:
        try:
            return await getattr(store, method)(*arguments, **options)
        finally:
            await store.close()

    return asyncio.run(waited())


def several(
    store: Store | AsyncStore,
    calls: Sequence[tuple[str, tuple[Any, ...], dict[str, Any]]],
    stop: Callable[[Any], bool] = lambda result: False,
) -> list[Any]:
    """The results of several calls, one after another; an asyncio store has one event loop for all."""
    results: list[Any] = []
    if isinstance(store, Store):
        for method, arguments, options in calls:
            results.append(getattr(store, method)(*arguments, **options))
            if stop(results[-1]):
                break
        return results

    async def waited() -> list[Any]:
        try:
            for method, arguments, options in calls:
                results.append(await getattr(store, method)(*arguments, **options))
                if stop(results[-1]):
                    break
            return results
        finally:
            await store.close()

    return asyncio.run(waited())


def models_named(store: Store | AsyncStore, names: list[str]) -> list[type[Document]]:
    """The models of the store that were named on the command line."""
    known: dict[str, type[Document]] = {model.__name__: model for model in store.graph.entries}
    for name in names:
        if name not in known:
            raise UsageError(
                f"the store has no model {name!r}; it has {', '.join(sorted(known))}", code="model-unknown"
            )
    return [known[name] for name in names]


Reporter = Callable[[Any], None]

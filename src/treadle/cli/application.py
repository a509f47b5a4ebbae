"""The application's own Store, which `--app package.module:name` names."""

from __future__ import annotations

import importlib
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.cli.progress import model_bars
from treadle.errors import TreadleError, UsageError

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
        # Told to keep the working directory out (-P, -I, PYTHONSAFEPATH), what is installed comes first.
        sys.path.insert(len(sys.path) if sys.flags.safe_path else 0, "")
    try:
        value: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(error.name + ".")):
            raise _broken(f"--app names the module {module_name!r}", error) from error
        raise UsageError(
            f"--app names the module {module_name!r}, which cannot be found from this folder",
            code="app-invalid",
        ) from None
    except (Exception, SystemExit) as error:
        raise _broken(f"--app names the module {module_name!r}", error) from error
    for part in name.split("."):
        value = getattr(value, part, None)
        if value is None:
            raise UsageError(f"{module_name} has nothing called {name!r}", code="app-invalid")
    if inspect.isfunction(value):
        try:
            value = value()
        except (Exception, SystemExit) as error:
            raise _broken(f"--app names the function {app!r}", error) from error
    if not isinstance(value, (Store, AsyncStore)):
        raise UsageError(f"{app} is a {type(value).__name__}, not a Store or AsyncStore", code="app-invalid")
    return value


def _broken(what: str, error: BaseException) -> BaseException:
    """One sentence on code of the application's own that fails; `--traceback` shows the rest."""
    from pymongo.errors import ConnectionFailure

    if isinstance(error, ConnectionFailure):
        return error
    lines = (error.message if isinstance(error, TreadleError) else str(error)).splitlines()
    reason = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    if isinstance(error, SyntaxError):
        where = error.filename, error.lineno
    else:
        frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
        # The application's own line, not that of a library which it calls.
        own = [frame for frame in frames if _is_own(frame[0])]
        where = (own or frames)[-1]
    place = f"{Path(where[0] or '?').name}, line {where[1]}"
    code = error.code if isinstance(error, TreadleError) else "app-invalid"
    return UsageError(f"{what}, which fails ({place}): {reason}; --traceback shows the rest.", code=code)


def _is_own(file: str) -> bool:
    library = Path(__file__).parent.parent
    return "site-packages" not in file and not file.startswith(
        ("<", str(library), sysconfig.get_path("stdlib"))
    )


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


def call_with_progress(app: str, method: str, names: list[str] | None, **options: Any) -> Any:
    """Call a method of the store that takes models, with a progress bar for each."""
    with model_bars() as report, open_store(app) as (store, call):
        return call(getattr(store, method), *models_named(store, names), progress=report, **options)


def pace(throttle: str | None) -> Any:
    """What `--throttle` means: a rate, or a word that the store knows."""
    try:
        return None if throttle is None else float(throttle)
    except ValueError:
        return throttle


def models_named(store: AnyStore, names: list[str] | None) -> list[type[Document]]:
    """The models of the store that were named on the command line."""
    known: dict[str, type[Document]] = {model.__name__: model for model in store.graph.entries}
    for name in names or ():
        if name not in known:
            raise UsageError(
                f"the store has no model {name!r}; it has {', '.join(sorted(known))}", code="model-unknown"
            )
    return [known[name] for name in names or ()]

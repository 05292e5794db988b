"""Starts of Disco's sessions, step by step, so that a thread or an event loop waits for each step.

The steps of a start are a generator. It yields operations and functions, gets their outcomes, and
returns the native session, with the functions of workers in this process.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

from tensor_rpc import _native
from tensor_rpc._functions import Registry, registry_of

if TYPE_CHECKING:
    Step = _native.Operation[Any] | Callable[[], Any]
    Started = tuple[_native.DiscoSession, Registry | None]
    Steps = Generator[Step, Any, Started]


def wait(steps: Steps) -> Started:
    """Make a start on this thread."""
    outcome = None
    while True:
        try:
            step = steps.send(outcome)
        except StopIteration as end:
            started: Started = end.value
            return started
        outcome = step.wait() if isinstance(step, _native.Operation) else step()


def threads(
    num_workers: int,
    num_groups: int = 1,
    *,
    functions: Sequence[Callable[..., Any]] | Registry = (),
    **settings: Any,
) -> Steps:
    """Start a `ThreadedSession`."""
    registry = _worker_registry(functions)
    session = yield _native.disco_threads(num_workers, num_groups, registry, settings)
    return session, registry


def processes(
    num_workers: int,
    num_groups: int = 1,
    entrypoint: Sequence[str] | None = None,
    *,
    functions: Sequence[Callable[..., Any]] = (),
    **settings: Any,
) -> Steps:
    """Start a `ProcessSession`."""
    if entrypoint is None:
        from tensor_rpc import _child

        # A process that imports the functions is waited for.
        entrypoint = [*(yield lambda: _child.command(functions)), "--disco-worker"]
    elif functions:
        raise ValueError("another program has functions of its own: give functions or entrypoint")
    session = yield _native.disco_processes(num_workers, num_groups, list(entrypoint), settings)
    return session, None


def nodes(
    num_nodes: int,
    num_workers_per_node: int,
    num_groups: int = 1,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    join_timeout: float | None = None,
    on_listen: Callable[[str], None] | None = None,
    controller_is_node: bool = True,
    functions: Sequence[Callable[..., Any]] | Registry = (),
    **settings: Any,
) -> Steps:
    """Start a `SocketSession`."""
    registry = _worker_registry(functions) if controller_is_node else None
    if registry is not None and num_nodes < 1:
        raise ValueError(f"{num_nodes} nodes, of which this process is one")
    if registry is None and functions:
        raise ValueError("functions are those of the workers of this process, which is to be no node")
    host = f"[{host}]" if ":" in host else host
    listener: _native.DiscoListener = yield _native.disco_listen(f"tcp://{host}:{port}")
    if on_listen is not None:
        on_listen(listener.address)
    session = yield listener.start_op(
        num_nodes - (registry is not None), num_workers_per_node, num_groups, join_timeout, registry, settings
    )
    return session, registry


def servers(
    addresses: Sequence[str],
    workers_per_server: int = 1,
    num_groups: int = 1,
    *,
    connect: dict[str, Any] | None = None,
    **settings: Any,
) -> Steps:
    """Start workers at servers."""
    session = yield _native.disco_servers(list(addresses), workers_per_server, num_groups, connect or {}, settings)
    return session, None


def from_tracker(
    tracker: str,
    key: str,
    count: int,
    workers_per_server: int = 1,
    num_groups: int = 1,
    *,
    connect: dict[str, Any] | None = None,
    **settings: Any,
) -> Steps:
    """Start workers at servers of a tracker."""
    session = yield _native.disco_from_tracker(
        tracker, key, count, workers_per_server, num_groups, connect or {}, settings
    )
    return session, None


def over(
    sessions: Sequence[_native.Session],
    workers_per_session: int = 1,
    num_groups: int = 1,
    **settings: Any,
) -> Steps:
    """Start workers at the far ends of sessions."""
    session = yield _native.disco_over(list(sessions), workers_per_session, num_groups, settings)
    return session, None


def _worker_registry(functions: Sequence[Callable[..., Any]] | Registry) -> Registry:
    given = functions if isinstance(functions, Registry) else registry_of(functions)
    # A registry of its own: what workers may import, clients of a server with the same functions may not.
    registry = registry_of([given, Registry()])
    install(registry)
    return registry


def install(registry: Registry) -> None:
    """Add what sessions of Disco need on workers of Python to their functions.

    Whatever has the workers keeps the registry, too.
    """
    # Not itself: the registry has the function, and the garbage collector does not see that.
    reference = weakref.ref(registry)

    def import_module(name: str) -> None:
        """Import a module, and register its functions."""
        registry = reference()
        if registry is None:
            raise RuntimeError("the session of these workers is gone")
        registry.add_module(importlib.import_module(name))

    registry.add("tensor_rpc.import_module", import_module)

"""Servers of functions of Python."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import socket
import sys
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

from tensor_rpc import _child, _native
from tensor_rpc._functions import Registry, registry_of


class BaseServer:
    """Base of servers of both forms: settings, addresses, and their state."""

    def __init__(
        self,
        *functions: Callable[..., Any] | types.ModuleType | Registry,
        listen: str | Sequence[str] = "tcp://127.0.0.1:0",
        **settings: Any,
    ) -> None:
        """Check the settings; nothing is started yet."""
        self._registry = registry_of(functions)
        addresses = [listen] if isinstance(listen, str) else list(listen)
        if "python" in settings:
            raise TypeError("the setting python is for rpc-server: give the modules themselves")
        # Foreign code of clients runs in processes of its own, as with rpc-server.
        isolate = "auto" if any(settings.get(name) for name in _FOREIGN_CODE) else "none"
        settings = {"listen": addresses, "isolate": isolate, **settings}
        self._has_processes = settings["isolate"] != "none"
        self._native = _native.Server(self._registry, as_toml(settings))

    @property
    def addresses(self) -> list[str]:
        """Addresses that the server listens on, with the ports that were chosen."""
        return self._native.addresses

    @property
    def address(self) -> str:
        """The first of `addresses`."""
        return self.addresses[0]

    @property
    def metrics_address(self) -> str | None:
        """Address of metrics and health (``metrics="127.0.0.1:0"``)."""
        return self._native.metrics_address

    @property
    def sessions(self) -> int:
        """Number of open sessions."""
        return self._native.sessions

    @property
    def is_running(self) -> bool:
        """True from `start` to `stop` or `drain`."""
        return self._native.is_running

    def reload(self) -> None:
        """Read certificates, tokens and the policy again."""
        self._native.reload()

    def _announce(self) -> None:
        try:
            addresses = self.addresses
        except RuntimeError:
            if self._native.is_stopped:
                return
            raise
        for address in addresses:
            print(f"listening on {address}", flush=True)

    def __repr__(self) -> str:
        """Return the addresses."""
        return f"<server on {', '.join(self.addresses)}>" if self.is_running else "<server, not running>"


class Server(BaseServer):
    """A server of functions.

    Parameters
    ----------
    *functions
        Functions (see `function`), modules that declare some, or a `Registry`.
    listen : str or sequence of str
        Addresses, such as ``tcp://127.0.0.1:9090``, ``quic://0.0.0.0:9090`` or
        ``unix:/run/a.sock``; port 0 is a free one.
    **settings
        Those of ``rpc-server serve``, with underscores: ``token_file="tokens"``,
        ``max_memory="1GiB"``, ``tracker="tcp://host:9190"``, ``idle_timeout="10m"``. A time may be
        a `datetime.timedelta`, and `None` is the default. With ``isolate="process"`` each session
        has an interpreter of its own, so that a crash, ``os._exit``, an endless loop, or too much
        memory (``isolate_memory``) is one client's error; the functions must be importable from
        modules or from a script whose work stands under ``if __name__ == "__main__":``. By default
        all sessions share this process, unless clients may bring code (``allow_run``,
        ``allow_modules``, ``library``). With ``log_level="info"`` events of the server go to
        standard error.

    Raises
    ------
    TypeError
        There is no such setting; the message names a similar one.
    ValueError
        The value of a setting, or an address, is wrong.

    Examples
    --------
    >>> import tensor_rpc as rpc
    >>> def add(a: int, b: int) -> int:
    ...     return a + b
    >>> with rpc.Server(add) as server:
    ...     with rpc.connect(server.address) as session:
    ...         session["add"](1, 2)
    3
    """

    def __init__(
        self,
        *functions: Callable[..., Any] | types.ModuleType | Registry,
        listen: str | Sequence[str] = "tcp://127.0.0.1:0",
        **settings: Any,
    ) -> None:
        """Check the settings; nothing is started yet."""
        super().__init__(*functions, listen=listen, **settings)
        self._ended = threading.Event()
        # What `serve` waits for, and the end that wakes it.
        self._wakes: tuple[socket.socket, socket.socket] | None = None

    def start(self) -> Server:
        """Start to serve in the background, on threads of the package.

        Returns
        -------
        Server
            This one. All its addresses are listened on.

        Raises
        ------
        RemoteIOError
            An address cannot be listened on, or a file not be used.
        TypeError
            With ``isolate="process"``: a function cannot be imported by the processes of sessions.
        RuntimeError
            They have failed to import the functions; this process is one of them; or another thread
            has stopped the server meanwhile.
        """
        if not self._start():
            raise RuntimeError("the server has been stopped")
        return self

    def _start(self) -> bool:
        _child.refuse_while_importing()
        self._native.begin_start()
        try:
            words = _child.set_up(self._registry) if self._has_processes else None
            return self._native.start_op(words).wait()
        except BaseException:
            self._native.give_up_start_op().wait()
            raise

    def stop(self) -> None:
        """End all sessions, and stop. A function that runs goes on, and its result is dropped.

        A start in progress is given up. A server that was not started can still be.
        """
        try:
            self._native.stop_op().wait()
        finally:
            if self._native.is_stopped:
                self._end()

    def drain(self) -> None:
        """Refuse new sessions, wait for the open ones (``drain_timeout``), and stop."""
        draining = self._native.drain_op()
        try:
            draining.wait()
        finally:
            self._end()

    def _end(self) -> None:
        self._ended.set()
        wakes = self._wakes
        if wakes is not None:
            # `serve` may have closed it meanwhile, or not have read what is in it.
            with contextlib.suppress(OSError):
                wakes[1].send(b"\0")

    def serve(self, *, announce: bool = True) -> None:
        """Serve until SIGTERM or Ctrl-C, or until another thread stops the server.

        A signal drains the server, and a second one stops it at once; SIGHUP reloads it. Signals
        are handled only on the main thread.

        Parameters
        ----------
        announce : bool
            Print ``listening on ADDRESS`` for each address.
        """
        if threading.current_thread() is not threading.main_thread():
            if self._start_and_announce(announce):
                self._ended.wait()
            return
        asked, twice, draining = False, False, False

        def on_signal(number: int, frame: types.FrameType | None) -> None:
            nonlocal asked, twice
            if draining:
                raise _SecondSignal
            twice = asked
            asked = True

        def on_hangup(number: int, frame: types.FrameType | None) -> None:
            try:
                self.reload()
            except Exception as error:
                print(f"cannot reload, what was in use stays: {error}", file=sys.stderr)

        # The interpreter itself writes to this, as soon as a signal is there: a wait for a lock or a queue would
        # miss one that comes just before it.
        self._wakes = socket.socketpair()
        self._wakes[1].setblocking(False)
        wakeup = signal.set_wakeup_fd(self._wakes[1].fileno(), warn_on_full_buffer=False)
        before = {
            signal.SIGINT: signal.signal(signal.SIGINT, on_signal),
            signal.SIGTERM: signal.signal(signal.SIGTERM, on_signal),
            signal.SIGHUP: signal.signal(signal.SIGHUP, on_hangup),
        }
        try:
            # Whoever reads the addresses may send a signal at once.
            serves = self._start_and_announce(announce)
            while serves and not asked and not self._ended.is_set():
                self._wakes[0].recv(64)
            if asked and self.is_running:
                draining = True
                # The second signal may have come before the first one was seen.
                if not twice:
                    self.drain()
        except _SecondSignal:
            pass
        finally:
            draining = False
            # After a second signal, and after what another handler raises.
            self.stop()
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            signal.set_wakeup_fd(wakeup)
            for end in self._wakes:
                end.close()
            self._wakes = None

    def _start_and_announce(self, announce: bool) -> bool:
        """Return false if another thread has stopped the server during its start."""
        if not self.is_running and not self._start():
            return False
        if announce:
            self._announce()
        return True

    def __enter__(self) -> Server:
        """Start to serve, unless the server serves already."""
        return self if self.is_running else self.start()

    def __exit__(self, *error: object) -> None:
        """Stop."""
        self.stop()


_FOREIGN_CODE = ("allow_modules", "allow_run", "library", "runtime_library")
"""Settings with which sessions have processes of their own by default."""


class _SecondSignal(BaseException):
    pass


def as_toml(settings: dict[str, Any]) -> str:
    """Return settings as the text of a configuration file."""
    lines = [
        f"{_text(name.replace('_', '-'))} = {_value(name, value)}"
        for name, value in settings.items()
        if value is not None
    ]
    return "\n".join(lines)


def _value(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (str, os.PathLike)):
        return _text(os.fspath(value))
    if isinstance(value, datetime.timedelta):
        return f'"{round(value.total_seconds() * 1000)}ms"'
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_value(name, each) for each in value)}]"
    raise TypeError(f"the setting {name} is text, a number, a truth value or a list, and not {value!r}")


def _text(text: str) -> str:
    # JSON's strings are those of TOML, but for one control character.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


__all__ = ["BaseServer", "Server"]

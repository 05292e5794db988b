"""The exceptions of the package.

All are an `RpcError`. Most are an exception of Python, too, so that code that knows nothing of this
package catches them where it would expect them.
"""

from __future__ import annotations

__all__ = [
    "ApiMisuseError",
    "BusyError",
    "CallCancelledError",
    "DeadlineExceededError",
    "DeviceError",
    "InternalError",
    "InvalidArgumentError",
    "InvalidHandleError",
    "LimitExceededError",
    "NotFoundError",
    "OutOfMemoryError",
    "PeerLostError",
    "PeerSilentError",
    "ProtocolError",
    "RefusedError",
    "RemoteError",
    "RemoteIOError",
    "RemotePanicError",
    "RpcError",
    "SessionClosedError",
    "SessionTimeoutError",
    "UnsupportedError",
]


_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


class RpcError(Exception):
    """An operation of a session failed.

    Attributes
    ----------
    kind : str
        What went wrong, in one word that does not change between versions, such as
        ``"not_found"``.
    message : str
        What went wrong, in words.
    hop : int
        Number of links between this process and the one where it went wrong: 0 for this process.
    peer : str or None
        Address of the peer, as far as it is known.
    remote_traceback : str or None
        Traceback of the function that failed, if it has one.
    remote_class : str or None
        Class of the exception of the function that failed, if it is one of Python, or another name
        that the function gave it.
    may_have_run : bool
        False if the request certainly had no effect, so that it may be repeated.
    is_retryable : bool
        True if the same request may succeed later.
    """

    kind: str = "internal"
    message: str = ""
    hop: int = 0
    peer: str | None = None
    remote_traceback: str | None = None
    remote_class: str | None = None
    may_have_run: bool = False
    is_retryable: bool = False

    def __str__(self) -> str:
        """Return the message, and the traceback of the function that failed."""
        text = self.message or (str(self.args[0]) if self.args else "")
        if self.remote_traceback:
            text += f"\n\nThe traceback there:\n{self.remote_traceback.rstrip()}"
        # A peer may send what a terminal would obey.
        return text.translate(_CONTROLS)

    def __reduce__(self) -> tuple[object, ...]:
        """Return what pickle needs."""
        return (type(self), self.args, self.__dict__)


class NotFoundError(RpcError, KeyError):
    """There is no function, module or loader of that name."""


class InvalidHandleError(RpcError, ReferenceError):
    """The object does not exist there, or not any more, or belongs to another session."""


class InvalidArgumentError(RpcError, ValueError):
    """An argument has the wrong type, count, shape, range or encoding."""


class RemoteError(RpcError):
    """The function ran and failed by itself; `remote_class` and `remote_traceback` say how."""


class RemotePanicError(RemoteError):
    """The function crashed. Other calls are not affected."""


class CallCancelledError(RpcError):
    """The request was cancelled."""


class DeadlineExceededError(RpcError, TimeoutError):
    """The timeout of the request passed."""


class SessionTimeoutError(RpcError, TimeoutError):
    """The time limit of the session passed."""


class LimitExceededError(RpcError):
    """A limit that the operator has set was reached; the message names it."""


class OutOfMemoryError(RpcError, MemoryError):
    """The device has not enough memory."""


class DeviceError(RpcError):
    """The device does not exist there, or has failed."""


class BusyError(RpcError):
    """A tensor or a device is in use where waiting is not possible."""


class UnsupportedError(RpcError, NotImplementedError):
    """The peer, the device or this build does not support the operation."""


class SessionClosedError(RpcError, ConnectionError):
    """The session was closed, by either side, or the peer is about to go."""


class PeerLostError(RpcError, ConnectionError):
    """The link to the peer broke, or the peer died."""


class PeerSilentError(PeerLostError, TimeoutError):
    """The peer is connected, and has been silent for too long."""


class RefusedError(RpcError, PermissionError):
    """The peer refuses the session or the request, or an identity was not proven."""


class ProtocolError(RpcError, ConnectionError):
    """A peer broke the protocol, or has no version of it in common with this one."""


class RemoteIOError(RpcError, OSError):
    """A file or socket operation failed."""


class ApiMisuseError(RpcError, RuntimeError):
    """The package was used in a way that cannot work."""


class InternalError(RpcError, RuntimeError):
    """A defect of this project."""


_CLASSES: dict[str, type[RpcError]] = {
    "not_found": NotFoundError,
    "invalid_handle": InvalidHandleError,
    "invalid_argument": InvalidArgumentError,
    "application": RemoteError,
    "panic": RemotePanicError,
    "cancelled": CallCancelledError,
    "deadline_exceeded": DeadlineExceededError,
    "session_timeout": SessionTimeoutError,
    "limit_exceeded": LimitExceededError,
    "out_of_memory": OutOfMemoryError,
    "device_unavailable": DeviceError,
    "device_lost": DeviceError,
    "busy": BusyError,
    "unsupported": UnsupportedError,
    "closed": SessionClosedError,
    "draining": SessionClosedError,
    "peer_lost": PeerLostError,
    "peer_silent": PeerSilentError,
    "protocol": ProtocolError,
    "refused": RefusedError,
    "unauthenticated": RefusedError,
    "version_mismatch": ProtocolError,
    "io": RemoteIOError,
    "api_misuse": ApiMisuseError,
    "internal": InternalError,
}

for _kind, _class in _CLASSES.items():
    # An error that a function raises itself arrives as its kind says.
    if "kind" not in vars(_class):
        _class.kind = _kind


def from_facts(
    kind: str,
    message: str,
    hop: int,
    peer: str | None,
    remote_traceback: str | None,
    remote_class: str | None,
    may_have_run: bool,
    is_retryable: bool,
) -> RpcError:
    """Return the exception for an error of a session. The native part calls this."""
    error = _CLASSES.get(kind, RpcError)(message)
    error.kind = kind
    error.message = message
    error.hop = hop
    error.peer = peer
    error.remote_traceback = remote_traceback
    error.remote_class = remote_class
    error.may_have_run = may_have_run
    error.is_retryable = is_retryable
    return error

"""Small classes that stand for values of a session, and for outcomes of its operations."""

from __future__ import annotations

import signal as _signal
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import NamedTuple


class Shape(tuple[int, ...]):
    """Dimensions of a tensor, as a value: functions of a session tell it from a list."""

    __slots__ = ()

    def __repr__(self) -> str:
        """Return the shape as it is written in Python."""
        return f"Shape({list(self)!r})"


class FunctionInfo(NamedTuple):
    """A function of a server or of a module, in a list.

    Attributes
    ----------
    name : str
        Its name.
    signature : str
        Types of its parameters and of what it returns, such as ``(i64, i64) -> i64``.
    description : str
        What it does; empty if nobody has said it.
    """

    name: str
    signature: str
    description: str


class FileEntry(NamedTuple):
    """A file of a workspace, in a list.

    Attributes
    ----------
    name : str
        Path from the root of the workspace, with ``/`` between the names.
    size : int
        Length in bytes.
    modified : datetime
        Time when it was last written to, in UTC.
    executable : bool
        True if its owner may execute it.
    """

    name: str
    size: int
    modified: datetime
    executable: bool


@dataclass(frozen=True)
class RunResult:
    """How a program has ended, and what it has written.

    Attributes
    ----------
    returncode : int or None
        Exit code; None if a signal has ended the program.
    signal : int or None
        Number of the signal that has ended the program.
    ended_by : str or None
        Why the server has ended the program, if it has.
    stdout, stderr : bytes or None
        Its output; None for a stream that a function has taken.
    """

    returncode: int | None
    signal: int | None
    ended_by: str | None
    stdout: bytes | None = None
    stderr: bytes | None = None

    @property
    def success(self) -> bool:
        """True if the program exited with code 0."""
        return self.returncode == 0

    def check(self) -> RunResult:
        """Return this, or raise if the program has failed.

        Raises
        ------
        ProgramError
            The exit code is not 0, or a signal has ended the program.
        """
        if not self.success:
            raise ProgramError(self)
        return self


class ProgramError(Exception):
    """A program has failed; `result` says how."""

    def __init__(self, result: RunResult) -> None:
        """Make the exception for the outcome of a program."""
        super().__init__(result)
        self.result = result

    def __str__(self) -> str:
        """Return how the program has ended, and the end of what it wrote to standard error."""
        result = self.result
        if result.signal is not None:
            try:
                name = _signal.Signals(result.signal).name
            except ValueError:
                name = f"signal {result.signal}"
            text = f"the program was ended by {name}"
        else:
            text = f"the program exited with code {result.returncode}"
        if result.ended_by:
            text += f", because {result.ended_by}"
        if result.stderr:
            text += ":\n" + result.stderr[-2000:].decode(errors="replace").rstrip()
        return text


@dataclass(frozen=True)
class RetryPolicy:
    """Terms on which a session repeats requests: ``connect(…, retry=RetryPolicy(…))``.

    A request is repeated if its session was lost or is going away, or if what it needs is busy, and
    if a second run does no harm: it certainly did not run; it only asks or makes objects; or it
    calls a function that is declared idempotent. While most requests fail, nothing is repeated. A
    call that takes a tensor, an array, a function of this process or another object, which went
    with its session, is not repeated either: it fails with the error of its connection.

    Attributes
    ----------
    idempotent : sequence of str
        Names of functions that may run twice; ``*`` stands for any text.
    attempts : int
        Largest number of attempts of one request, the first one included.
    first_pause, longest_pause : float
        Seconds before the second attempt, and at most. Each pause is up to twice as long as the one
        before, and shortened by a random part.
    """

    idempotent: Sequence[str] = ()
    attempts: int = 4
    first_pause: float = 0.1
    longest_pause: float = 5.0

    def _terms(self) -> tuple[int, float, float, list[str]]:
        if isinstance(self.idempotent, str):
            raise TypeError("idempotent are several names: [name]")
        return (self.attempts, self.first_pause, self.longest_pause, list(self.idempotent))


@dataclass(frozen=True)
class SendRoute:
    """Route that the bytes of a `Session.send` have taken.

    Attributes
    ----------
    kind : str
        ``direct`` from one server to the other, ``client`` through this process, or ``session``
        within one session.
    address : str or None
        Address at which the source has connected to the destination, of a direct send.
    reason : str or None
        Reason why they went through this process.
    """

    kind: str
    address: str | None = None
    reason: str | None = None

    @property
    def is_direct(self) -> bool:
        """True if the bytes went from one server to the other."""
        return self.kind == "direct"


@dataclass(frozen=True)
class Timing:
    """Run times of a function, measured at the server.

    Attributes
    ----------
    results : tuple of float
        Seconds per call, one number for each sample.
    """

    results: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean of the samples in seconds."""
        return statistics.fmean(self.results)

    @property
    def median(self) -> float:
        """Median of the samples in seconds."""
        return statistics.median(self.results)

    @property
    def min(self) -> float:
        """Shortest sample in seconds."""
        return min(self.results)

    @property
    def max(self) -> float:
        """Longest sample in seconds."""
        return max(self.results)

    @property
    def std(self) -> float:
        """Standard deviation of the samples in seconds."""
        return statistics.pstdev(self.results)

    def __str__(self) -> str:
        """Return the numbers in milliseconds."""
        numbers = (self.mean, self.median, self.min, self.max, self.std)
        names = ("mean", "median", "min", "max", "std")
        return ", ".join(f"{name} {number * 1e3:.4g} ms" for name, number in zip(names, numbers, strict=True))


def functions(rows: Sequence[Sequence[str]]) -> list[FunctionInfo]:
    """Return a list of functions, some without a description."""
    return [FunctionInfo(row[0], row[1], row[2] if len(row) > 2 else "") for row in rows]


def files(rows: Sequence[tuple[str, int, float, bool]]) -> list[FileEntry]:
    """Return a list of files."""
    return [
        FileEntry(name, size, datetime.fromtimestamp(modified, timezone.utc), executable)
        for name, size, modified, executable in rows
    ]


def run_result(
    facts: tuple[int | None, int | None, str | None, bytes | None, bytes | None],
) -> RunResult:
    """Return the outcome of a program."""
    return RunResult(*facts)


def run_status(facts: tuple[int | None, int | None, str | None]) -> RunResult:
    """Return how a program has ended."""
    return RunResult(*facts)


def send_route(facts: tuple[str, str | None, str | None]) -> SendRoute:
    """Return the route of a send."""
    return SendRoute(*facts)


def timing(samples: list[float]) -> Timing:
    """Return the outcome of a measurement."""
    return Timing(tuple(samples))

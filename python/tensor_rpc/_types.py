"""Small classes that stand for values of a session."""

from __future__ import annotations


class Shape(tuple[int, ...]):
    """Dimensions of a tensor, as a value: functions of a session tell it from a list."""

    __slots__ = ()

    def __repr__(self) -> str:
        """Return the shape as it is written in Python."""
        return f"Shape({list(self)!r})"

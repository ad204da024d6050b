"""Deprecated names: they keep working, with a warning that gives the current name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def warn_renamed(old: str, new: str, stacklevel: int = 3) -> None:
    """Issue a DeprecationWarning for a name, at the caller's caller by default."""
    warnings.warn(
        f"{old} is now {new}; the old name will be removed.",
        DeprecationWarning,
        stacklevel=stacklevel,
    )


class _RenamedMethod:
    """A former name of a method."""

    def __init__(self, old: str, new: str) -> None:
        self._old, self._new = old, new

    def __get__(self, instance: Any, owner: type[Any]) -> Any:
        warn_renamed(f"{owner.__name__}.{self._old}", f"{owner.__name__}.{self._new}")
        return getattr(owner if instance is None else instance, self._new)


def renamed_methods(**current: str) -> Callable[[type[T]], type[T]]:
    """Return a class decorator that keeps former names of methods.

    Calls of a former name reach the current method. A subclass that overrides a method by its
    former name overrides the current one. Both raise a DeprecationWarning.

    Args:
        current: current name of each former one.
    """

    def decorate(cls: type[T]) -> type[T]:
        base: Any = cls

        def rename_overrides(subclass: Any, /, **keywords: Any) -> None:
            super(base, subclass).__init_subclass__(**keywords)
            for old, new in current.items():
                if old in vars(subclass):
                    warn_renamed(f"{subclass.__name__}.{old}", f"{subclass.__name__}.{new}")
                    setattr(subclass, new, vars(subclass)[old])

        for old, new in current.items():
            setattr(base, old, _RenamedMethod(old, new))
        base.__init_subclass__ = classmethod(rename_overrides)
        return cls

    return decorate

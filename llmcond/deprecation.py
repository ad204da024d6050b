"""Deprecated names: they keep working, with a warning that gives the current name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def warn_renamed(old: str, new: str) -> None:
    """Issue a DeprecationWarning for a name, at the caller's caller."""
    warnings.warn(
        f"{old} is now {new}; the old name will be removed.", DeprecationWarning, stacklevel=3
    )


class _RenamedMethod:
    """A former name of a method, in the class that defines the method."""

    def __init__(self, old: str, new: str, method: Any) -> None:
        self._old, self._new, self._method = old, new, method

    def __get__(self, instance: Any, owner: type[Any]) -> Any:
        warn_renamed(f"{owner.__name__}.{self._old}", f"{owner.__name__}.{self._new}")
        return self._method.__get__(instance, owner)


def renamed_methods(**current: str) -> Callable[[type[T]], type[T]]:
    """Return a class decorator that keeps former names of methods.

    Calls of a former name reach the current method, also by ``super()``. A subclass that overrides
    a method by its former name overrides the current one. Both raise a DeprecationWarning.

    Args:
        current: current name of each former one.
    """

    def decorate(cls: type[T]) -> type[T]:
        base: Any = cls

        def add_names(subclass: Any, /, **keywords: Any) -> None:
            super(base, subclass).__init_subclass__(**keywords)
            add_missing_names(subclass)

        def add_missing_names(subclass: Any) -> None:
            for old, new in current.items():
                methods = vars(subclass)
                if new in methods and old not in methods:
                    setattr(subclass, old, _RenamedMethod(old, new, methods[new]))
                elif old in methods and new not in methods:
                    warn_renamed(f"{subclass.__name__}.{old}", f"{subclass.__name__}.{new}")
                    setattr(subclass, new, methods[old])

        add_missing_names(base)
        base.__init_subclass__ = classmethod(add_names)
        return cls

    return decorate

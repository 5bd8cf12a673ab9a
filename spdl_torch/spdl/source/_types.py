"""The kinds of sources: protocols, which ``isinstance`` checks by the methods present."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Iterator

T_co = TypeVar("T_co", covariant=True)


@runtime_checkable
class IterableWithShuffle(Protocol[T_co]):
    """An iterable whose order can be changed."""

    def __iter__(self) -> Iterator[T_co]: ...

    def shuffle(self, seed: int) -> None:
        """Make iterations from now on use the order that belongs to ``seed``."""
        ...


@runtime_checkable
class SizedIterable(Protocol[T_co]):
    """An iterable with a length."""

    def __iter__(self) -> Iterator[T_co]: ...

    def __len__(self) -> int: ...


@runtime_checkable
class SizedIterableWithShuffle(Protocol[T_co]):
    """An iterable with a length, whose order can be changed."""

    def __iter__(self) -> Iterator[T_co]: ...

    def __len__(self) -> int: ...

    def shuffle(self, seed: int) -> None:
        """Make iterations from now on use the order that belongs to ``seed``."""
        ...

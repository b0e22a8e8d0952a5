"""Bounded caches of plans, one per process group. Knows nothing of masks or plans: it stores what it is given.

Entries leave in least-recently-used order, and every rank of a group makes the same calls, so every rank holds the same entries.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from magi_attention.comm.group import CommGroup

V = TypeVar("V")

MAX_PLANS_PER_GROUP = 64


class BoundedCache(Generic[V]):
    """At most `max_entries` values; the least recently used one leaves first. Safe to use from several threads."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._entries: OrderedDict[Hashable, V] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> V | None:
        """The value of `key`, now the most recently used, or None."""
        with self._lock:
            value = self._entries.get(key)
            if value is not None:
                self._entries.move_to_end(key)
            return value

    def put(self, key: Hashable, value: V) -> None:
        """Store a value as the most recently used one."""
        with self._lock:
            self._entries[key] = value
            self._entries.move_to_end(key)
            if len(self._entries) > self._max_entries:
                self._entries.popitem(last=False)

    def get_or_make(self, key: Hashable, make: Callable[[], V]) -> V:
        """The stored value, or the one that `make` returns, stored."""
        value = self.get(key)
        if value is None:
            value = make()
            self.put(key, value)
        return value

    def keys(self) -> list[Hashable]:
        """From the least to the most recently used."""
        return list(self._entries)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()


class GroupCache:
    """What one group remembers: its plans, and how to make the key that was asked for last."""

    def __init__(self) -> None:
        self.plans: BoundedCache[Any] = BoundedCache(MAX_PLANS_PER_GROUP)
        self.most_recent: Any = None  # must not hold the group, which would then live for as long as this cache

    def clear(self) -> None:
        """Forget everything. Keys that callers hold stay usable: they carry their plan."""
        self.plans.clear()
        self.most_recent = None


_caches_lock = threading.Lock()  # another thread's new group must not appear while clear_all walks
_caches: weakref.WeakKeyDictionary[CommGroup, GroupCache] = weakref.WeakKeyDictionary()


def cache_of(group: CommGroup) -> GroupCache:
    """The cache of a group, made at first use; it goes with its group."""
    with _caches_lock:
        return _caches.setdefault(group, GroupCache())


def clear_all() -> None:
    """Empty the caches of every group."""
    with _caches_lock:
        caches = list(_caches.values())
    for cache in caches:
        cache.clear()

"""The LRU eviction order of the cold tier: files of orphans first, then least recently used, pinned last.

Each namespace has an LRU list of its own, so that making one an orphan, or an installed model again,
moves no file. The oldest of several lists is found through a heap of their heads. A head's age only
ever grows less (files leave the front, join and move to the back), so an entry of the heap that is
out of date is too old at worst, and is put right when it comes up: O(log namespaces) a file.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Set as AbstractSet

_STUCK = ""
"""The list of files that could not be removed: no namespace, and never an orphan."""

_PINNED = "pinned"
"""The list of files that go last, of whatever namespace."""

_Files = OrderedDict[str, tuple[int, int]]
"""Path → (bytes, stamp), oldest first. Stamps grow with every use, over all lists."""


class FileOrder:
    """LRU lists of files. Paths are `<namespace>/…`, relative to the cache dir; sizes are bytes."""

    def __init__(self, pins: AbstractSet[str] = frozenset()) -> None:
        self.pins = pins
        self._lists: dict[str, _Files] = {}
        self._orphans: frozenset[str] = frozenset()
        self._heaps: list[list[tuple[int, str]]] = [[], [], []]
        self._stamp = 0
        self._count = 0
        self.nbytes = 0
        """Bytes of all files."""
        self.by_namespace = Counter[str]()
        """Bytes of each namespace's files."""

    def __len__(self) -> int:
        return self._count

    def nbytes_of(self, path: str) -> int | None:
        """Return the bytes of a file; None if it is not on the account."""
        files = self._list_of(path)
        return None if files is None else files[path][0]

    @property
    def namespaces(self) -> list[str]:
        """Namespaces that hold files."""
        return [name for name, files in self._lists.items() if files and name not in (_STUCK, _PINNED)]

    def is_orphan(self, namespace: str) -> bool:
        return namespace in self._orphans

    def holds_any(self, namespace: str) -> bool:
        return bool(self._lists.get(namespace))

    def set_orphans(self, namespaces: AbstractSet[str]) -> None:
        """Have the files of these namespaces, and of no others, go first."""
        self._orphans = frozenset(namespaces)
        self._heaps = [[], [], []]
        self._lists = {namespace: files for namespace, files in self._lists.items() if files}
        for namespace, files in self._lists.items():
            self._queue(namespace, files)

    def pin(self, paths: AbstractSet[str]) -> None:
        """Have these files, and no others, go last, in the order of `paths`, which keys of a dict have."""
        changed, self.pins = [*(path for path in self.pins if path not in paths), *paths], paths
        for path in changed:
            if nbytes := self.nbytes_of(path):
                self.add(path, nbytes)

    def add(self, path: str, nbytes: int) -> None:
        """Add a file as the most recently used."""
        self.remove(path)
        self._append(_PINNED if path in self.pins else path.partition("/")[0], path, nbytes)

    def add_stuck(self, path: str, nbytes: int) -> None:
        """Put a file that could not be removed behind all that can go."""
        self.remove(path)
        self._append(_STUCK, path, nbytes)

    def remove(self, path: str) -> int:
        """Forget a file; returns its bytes, 0 where it is not on the account."""
        files = self._list_of(path)
        if files is None:
            return 0
        nbytes = files.pop(path)[0]
        self.nbytes -= nbytes
        self.by_namespace[path.partition("/")[0]] -= nbytes
        self._count -= 1
        return nbytes

    def touch(self, path: str) -> None:
        """Make a file the most recently used of its list."""
        files = self._list_of(path)
        if files is not None:
            self._stamp += 1
            files[path] = files[path][0], self._stamp
            files.move_to_end(path)

    def pop_oldest(self) -> tuple[str, int] | None:
        """Forget the file that goes next; returns its path and bytes, None without one."""
        for heap in self._heaps:
            while heap:
                stamp, namespace = heap[0]
                files = self._lists[namespace]
                if not files:
                    heapq.heappop(heap)
                    del self._lists[namespace]
                    continue
                path, (nbytes, head) = next(iter(files.items()))
                if head != stamp:
                    heapq.heapreplace(heap, (head, namespace))
                    continue
                self.remove(path)
                return path, nbytes
        return None

    def _list_of(self, path: str) -> _Files | None:
        """Return the list that holds `path`."""
        for namespace in (path.partition("/")[0], _STUCK, _PINNED):
            files = self._lists.get(namespace)
            if files is not None and path in files:
                return files
        return None

    def _append(self, namespace: str, path: str, nbytes: int) -> None:
        self._stamp += 1
        is_new = namespace not in self._lists
        files = self._lists.setdefault(namespace, OrderedDict())
        files[path] = nbytes, self._stamp
        if is_new:
            self._queue(namespace, files)
        self.nbytes += nbytes
        self.by_namespace[path.partition("/")[0]] += nbytes
        self._count += 1

    def _queue(self, namespace: str, files: _Files) -> None:
        """Give a list without an entry in a heap one."""
        head = next(iter(files.values()))[1]
        heap = 0 if namespace in self._orphans else 2 if namespace == _PINNED else 1
        heapq.heappush(self._heaps[heap], (head, namespace))

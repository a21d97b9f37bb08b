"""`LargestPartition`: whose snapshots go from the cache that all partitions share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ggml_engine.control.retention import CacheEntry


class LargestPartition:
    """A `RetentionPolicy`: of the partition that has most entries, the newcomer's counted, the one used longest ago.

    An entry's partition is its scope. So each of N partitions keeps `max_entries // N` entries whatever the others ask
    for, and one alone has them all. Of several that have most it is the entry that was used longest ago of all theirs.
    """

    def is_over(self) -> bool:
        """Never: the cache's own bounds are all there is."""
        return False

    def victim(self, entries: Sequence[CacheEntry], newcomer: CacheEntry | None) -> CacheEntry | None:
        """The first one of those that have most."""
        held = Counter(entry.scope for entry in (*entries, *([] if newcomer is None else [newcomer])))
        most = max(held[entry.scope] for entry in entries)
        return next(entry for entry in entries if held[entry.scope] == most)

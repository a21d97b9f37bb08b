"""`Shares`: how much of something bounded each partition holds, and which of them may have more."""

from __future__ import annotations


class Shares:
    """`most` of something, for partitions that nobody counted beforehand.

    Whoever asks gets it while there is room for all together. Beyond that a partition may have its share: `most`
    divided by the number of partitions that hold something, itself included. So one partition alone has everything, one
    of N can always have `most // N`, whatever the others hold, and nothing is taken away from anybody. All together
    never hold more than `most * (1 + 1/2 + ... + 1/N)`. Not locked.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.total = 0
        self._held: dict[str, int] = {}

    def held(self, partition: str) -> int:
        """What a partition holds."""
        return self._held.get(partition, 0)

    def largest(self) -> str:
        """The partition that holds most, the one that came first of several. Raises ValueError where none holds any."""
        return max(self._held, key=self._held.__getitem__)

    def has_room(self, partition: str, n: int = 1) -> bool:
        """Whether a partition may have `n` more."""
        if self.total + n <= self.most:
            return True
        n_partitions = len(self._held.keys() | {partition})
        return self.held(partition) + n <= self.most // n_partitions

    def take(self, partition: str, n: int = 1) -> None:
        """Note that a partition holds `n` more."""
        if n:
            self._held[partition] = self.held(partition) + n
            self.total += n

    def give_back(self, partition: str, n: int = 1) -> None:
        """Note that a partition holds `n` less."""
        left = self.held(partition) - n
        self.total -= n
        if left:
            self._held[partition] = left
        else:
            self._held.pop(partition, None)

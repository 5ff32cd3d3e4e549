"""Which slots of a device are free."""

from __future__ import annotations

from array import array


class Slots:
    """The slots of one device. Free ones form a stack, so that a chain gets neighbours."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.retired, self.doomed = capacity, 0, 0
        self.free = array("i", range(capacity - 1, -1, -1))

    @property
    def used(self) -> int:
        """Slots that hold something, or did until it is safe to reuse them."""
        return self.capacity - self.retired - len(self.free)

    def give_back(self, slot: int, retire: bool) -> None:
        """Free a slot, or take it out of use for good."""
        if retire:
            self.retired += 1
        else:
            self.free.append(slot)

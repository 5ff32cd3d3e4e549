"""Which device gets the next chunk of a prefix, and which copy is read. Pure functions.

`load[d]` is what a load that ends at the chunk would read from device d, in bytes (of one rank);
`bandwidth[d]` is that device's read bandwidth in bytes/s. Devices are named by index.
"""

from __future__ import annotations

from collections.abc import Sequence

POLICIES = ("proportional", "link_aware", "serial")


def rank_proportional(
    load: Sequence[float], size: float, bandwidth: Sequence[float], devices: Sequence[int]
) -> list[int]:
    """Return `devices`, the one that would finish this prefix first at the front.

    A device that the chunk would put a whole chunk above its share of the prefix comes behind all
    others: taking the soonest alone lets a device that is far faster than the rest run ahead by
    more than a chunk. (This is the quota method of apportionment, Balinski and Young 1975; it
    keeps every prefix within one chunk of proportional, for any number of devices.)
    """
    total, together = size, 0.0
    for d in devices:
        total += load[d]
        together += bandwidth[d]
    ranked = [
        (load[d] * together >= bandwidth[d] * total, (load[d] + size) / bandwidth[d], d)
        for d in devices
    ]
    ranked.sort()
    return [d for _, _, d in ranked]


def rank_link_aware(
    load: Sequence[float],
    size: float,
    bandwidth: Sequence[float],
    devices: Sequence[int],
    together_bytes_s: float,
) -> list[int]:
    """Return `devices`: first those that still finish within the shared link's time, slowest first.

    `together_bytes_s` is what all of them deliver at the same time. Where that is no less than
    the sum of what each delivers alone, the link is no limit and the order is proportional.
    """
    if together_bytes_s >= sum([bandwidth[d] for d in devices]):
        return rank_proportional(load, size, bandwidth, devices)
    link_s = (sum([load[d] for d in devices]) + size) / together_bytes_s
    in_time = [d for d in devices if (load[d] + size) / bandwidth[d] <= link_s]
    late = [d for d in devices if d not in in_time]
    in_time.sort(key=lambda d: (bandwidth[d], d))
    return in_time + rank_proportional(load, size, bandwidth, late)


def rank_serial(devices: Sequence[int], memory: Sequence[bool]) -> list[int]:
    """Return `devices`, memory first, each kind in order: one is filled before the next."""
    return sorted(devices, key=lambda d: (not memory[d], d))


def choose_copies(
    load: list[float],
    size: Sequence[float],
    first: Sequence[int],
    second: Sequence[int],
    bandwidth: Sequence[float],
) -> list[bool]:
    """For chunks with two copies: whether to read the second, so that the prefix finishes sooner.

    `load` holds what chunks with one copy read, and is added to; the other arguments but
    `bandwidth` have one item a chunk.
    """
    seconds = []
    for bytes_, one, other in zip(size, first, second, strict=True):
        take = (load[other] + bytes_) / bandwidth[other] < (load[one] + bytes_) / bandwidth[one]
        load[other if take else one] += bytes_
        seconds.append(take)
    return seconds


def choose_returns(
    in_memory: Sequence[bool], size: Sequence[float], share: float, limit: int
) -> list[int]:
    """Return positions of at most `limit` chunks to keep a copy of in memory, as they are read.

    Memory's part of the whole prefix comes up to `share` of its bytes and not above, and along the
    prefix it follows `share` as closely as what is already in memory allows.
    """
    held = sum([bytes_ for bytes_, there in zip(size, in_memory, strict=True) if there])
    budget = share * sum(size) - held
    passed = kept = 0.0
    chosen: list[int] = []
    for i, bytes_ in enumerate(size):
        if len(chosen) == limit or budget <= 0:
            break
        passed += bytes_
        if in_memory[i]:
            kept += bytes_
        elif bytes_ <= budget and kept + bytes_ <= share * passed:
            chosen.append(i)
            kept += bytes_
            budget -= bytes_
    return chosen

"""First-come-first-served servers, the one building block of the model.

Every path of a message is a row of servers (proxy, NIC, link), and no later server acts on an
earlier one. So the servers can be worked off one kind after the other: sorting the arrivals of a
server gives the same times as a queue of events over all servers, at ten million messages a second
instead of one hundred thousand (simpy) or three hundred thousand (heapq), and 1024 ranks need no
approximation. The tests compare both ways on random networks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Floats", "Ints", "Served", "busy", "serve"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Served(NamedTuple):
    """What servers did with messages, in the order in which the messages were given.

    Attributes:
        start: ``[n]`` when service began, µs.
        finish: ``[n]`` when it ended, µs.
        switched: ``[n]`` what each message paid for another origin than its predecessor's, µs.
    """

    start: Floats
    finish: Floats
    switched: Floats


def serve(
    server: Ints,
    arrival: Floats,
    service: Floats,
    origin: Ints | None = None,
    switch: Floats | None = None,
) -> Served:
    """Serves each message in the order of arrival at its server; equal arrivals in given order.

    Args:
        server: ``[n]`` which server each message needs.
        arrival: ``[n]`` when it arrives there, µs, at least 0.
        service: ``[n]`` how long the server needs for it, µs, at least 0.
        origin: ``[n]`` where it comes from; with ``switch``.
        switch: ``[n]`` what the server needs on top, µs, if the message before it had another
            origin.
    """
    count = len(server)
    switched = np.zeros(count)
    if count == 0:
        return Served(switched, switched, switched)
    order = np.lexsort((arrival, server))
    servers, arrivals, services = server[order], arrival[order], service[order]
    first = np.ones(count, bool)
    first[1:] = servers[1:] != servers[:-1]
    if origin is not None and switch is not None:
        origins = origin[order]
        other = ~first
        other[1:] &= origins[1:] != origins[:-1]
        extra = np.where(other, switch[order], 0.0)
        switched[order] = extra
        services = services + extra
    done = np.cumsum(services)
    group = np.cumsum(first) - 1
    done -= (done - services)[first][group]  # the work of this server only
    # A message starts once all before it are done: finish = work done + latest wait for an arrival.
    wait = arrivals - (done - services)
    lift = (np.ptp(wait) + 1.0) * group  # so that one running maximum serves all servers
    latest = np.maximum.accumulate(wait + lift) - lift
    finish = np.empty(count)
    finish[order] = done + latest
    total = np.empty(count)
    total[order] = services
    return Served(finish - total, finish, switched)


def busy(server: Ints, service: Floats, servers: int) -> Floats:
    """``[servers]`` how long each server works, µs; or any other sum by group."""
    total = np.zeros(servers)
    total[: int(server.max(initial=-1)) + 1] = np.bincount(server, weights=service)
    return total

"""Chaos on real processes: nodes are killed, stopped and cut off while requests run.

::

    command    the run: starts the set, lets the faults happen, prints the verdict
    leaders    the same of managers alone: the one that leads is killed again and again
    processes  one node: a process that is started again in its place whenever it died
    faults     PURE: which fault comes next, so that never too much is hurt at once
    sockets    closes a connection inside another process
    requests   a stream of requests, each followed to its end by a client of both proxies
    ledger     PURE: what became of each request, and the verdict
    workflow   the synthetic diamond, with two actors for each stage
"""

"""Ranks on nodes: containers of one machine, each with a network of its own.

Nodes share a process table, memory-backed files and the machine's clock, so that leaders watch,
ask and end ranks on any of them as their own.  Only where a rank is forked differs: by an agent in
its node (``agent.py``), for a leader anywhere (``ranks.py``).
"""

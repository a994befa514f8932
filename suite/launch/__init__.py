"""From a case to running ranks: fork server, leaders, rank processes, and how each ended."""

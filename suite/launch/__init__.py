"""From a case to running ranks: zygote, leaders, rank processes and what is left when they end."""

"""The same training in one process: what every strategy is compared with."""

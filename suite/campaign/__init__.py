"""Random clean cases, and planted faults in them: options of ``run``, ``list`` and ``mutants``."""

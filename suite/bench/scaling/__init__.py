"""``shardproof bench scaling/strong``: what do more ranks gain, and does 80 % of it arrive?

``plan``     what is measured: scenario files, cells (system x backend x world), what fits here
``ranks``    the rank program: the plain program, the wrapped one alone, and all ranks, in blocks
``judge``    pure functions: efficiencies with intervals, verdicts, the table
``session``  launches on ranks, modelled figures, and the evidence of it
"""

from shardproof.bench.scaling.judge import table

__all__ = ["table"]

"""``shardproof bench scaling/strong``: what do more ranks gain, and does 80 % of it arrive?

``matrix``    what is measured: scenario files, cells (system x backend x world), what fits here
``judge``     efficiencies with intervals, verdicts, the table
``modelled``  figures beside what is measured: worlds that are not here, the scorecard
``tables``    cells in tables and words
"""

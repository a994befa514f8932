"""``shardproof bench``: compare two implementations on this machine, or one rank with many.

``subjects``       what is timed: pairs of sides, and cells of scaling scenarios
``sides``          scenario files and options of pairs, the procedure's constants
``scaling``        scenario files of cells, their efficiencies and verdicts
``launches``       what ranks are asked to time, and what they return: plain data
``arm``            one side on one rank, ready to step
``timed_ranks``    the rank programs: blocks in turns, memory, a side alone
``profile``        the rank program that shows where a step's time goes
``pinning``        a core for every rank while the clock runs
``leader_tasks``   what runs in the processes that start ranks
``session``        fresh ranks for every launch, and what they measured
``time_budget``    what fits into the minutes there are
``stats``          block ratios, intervals, permutation, verdicts: pure
``same_training``  whether sides train the same, without which times decide nothing
``lines``          lines of ``cases.jsonl`` as models; reports and comparisons read them, too
``evidence``       lines and raw times of a run folder: written, judged again
``tables``         comparisons in words; ``peers``: the table of every strategy beside its peer
``model``          a step predicted from its calls, compute, alpha and beta; the scorecard
``telemetry``      resident memory and GPU figures while sides run
"""

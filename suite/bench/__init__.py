"""``shardproof bench``: is one implementation faster than another on this machine, can we tell, and
what do more ranks gain?

``sides``          what is compared: sides, pairs, their scenario files, the procedure's constants
``scaling``        one rank beside N: cells, their scenario files, efficiencies and verdicts
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
``evidence``       lines and raw times of a run folder: written, read, judged again
``tables``         comparisons in words; ``peers``: the table of every strategy beside its peer
``model``          a step predicted from its calls, compute, alpha and beta; the scorecard
``telemetry``      resident memory and GPU figures while sides run
"""

"""``shardproof bench``: is one implementation faster than another, on this machine, or can we tell?

``stats``    pure functions: block ratios, intervals, permutation, verdicts
``plan``     what is compared: sides, pairs, their scenario files, the constants of the procedure
``blocks``   the rank program that times A B B A, and the one that looks at memory
``pinning``  a core for every rank while the clock runs
``losses``   whether sides train the same, without which times decide nothing
``profile``  the rank program that says where a step's time goes
``nvml``     what NVIDIA's management library answers
``telemetry``  resident memory and GPU figures while sides run, seen by a thread of the leader
``session``  launches on ranks, and what they measured
``leaders``  what runs in the processes that start ranks for it
``evidence``  lines and raw times of a run folder: written, read, judged again
``alarms``   how often the procedure errs on this machine, measured once a release
``costs``    the alpha-beta model: cost formulas of collectives, fits of alpha and beta
``model``    a step predicted from calls, compute and fits; the scorecard
``curve``    modelled efficiency at worlds that no machine here has
``probes``   what a rank measures for them
``score``    a step measured beside its prediction
``card``     the scorecard that follows from it, of scaling cells and of pairs
``fit``      whether the prediction holds on this machine, measured once a release
"""

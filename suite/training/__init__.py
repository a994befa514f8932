"""Training of a user's own model: the builder ``Training``, and its parts for an own loop.

builder.py      Training: what is trained, how, where, and for how many steps
on_rank.py      what one rank does: set-up, steps, checkpoints, results
places.py       where ranks run: threads, processes, or those that another launcher started
on_ray.py       the same, as actors of a Ray cluster
inputs.py       checks of numbers that a user gives
world.py        join: the ranks of this job, as a World
loops.py        wrap: a model under a strategy, for a loop of the user's own
source.py       a DataLoader, a data set, a list or a function, as shares of global batches
model.py        a module and a loss as the contract's Build
optimizers.py   an optimizer of torch as the contract's OptimizerSpec
"""

"""Whether methods with other numbers still train as well as dense training.

Every method of a scenario trains to a target loss with the same seeds as dense synchronous
training, and is judged by the steps that it needs (``judge.py``).  Equality sees nothing of this: a
residual that is dropped, or a gradient that is ever so stale, is repeated faithfully by an oracle
that is told of it, and yet the target is missed.
"""

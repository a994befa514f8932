"""The records of ranks, put together, and the account that a verdict is made of."""

"""How pickles are read that others wrote, for wings, which may not import implementations."""

from shardproof.impls.pytorch.checkpoint.plain_pickle import read_pickle

__all__ = ["read_pickle"]

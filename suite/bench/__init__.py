"""``shardproof bench``: compare two implementations on this machine, or one rank against many."""

"""``shardproof bench``: compare two implementations on this machine, or one rank with many."""

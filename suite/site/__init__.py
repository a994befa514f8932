"""``shardproof site``: runs as static pages that open offline; ``history``: a series of runs."""

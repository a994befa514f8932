"""``shardproof bench scaling/strong``: what do more ranks gain, and does 80 % of it arrive?"""

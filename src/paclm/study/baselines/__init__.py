"""Private prediction by other methods: PMixED, InvisibleInk and neighbours, on disjoint shards of the records.

These methods release from full distributions of *shard models*, each trained on its own part of the records, and their
guarantees are of another kind than ours (differential privacy, or relaxations of it). Nothing here knows the worlds,
the secret or the belief, and nothing here may run on overlapping worlds: there one record moves half of the models
and the accounting is void. `shards.load_shards` refuses them.
"""

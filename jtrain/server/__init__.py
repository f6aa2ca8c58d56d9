"""Parameter servers: shards of the state, workers, and the coordinator that the run's process is.

`loop` takes the steps of a run, `coordinator` decides who computes what, `worker` computes, `shard`
holds a part of the state, and `wire`, `client` and `listener` connect them.
"""

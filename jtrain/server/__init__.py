"""Parameter servers: shards of the state, workers, and the coordinator that the run's process is.

`server_loop` takes the steps of a run. The `coordinator` says who computes what, with a file for
each order of steps: `rounds`, `paced` and `streaming`. `process` is the program of
a worker or a server, and `engines` start it; a `shard` is a part of the state; `plan` is what all
derive from the config; `client` and `listener` connect them.
"""

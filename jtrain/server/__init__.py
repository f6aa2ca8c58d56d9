"""Parameter servers: shards of the state, workers, and the coordinator that the run's process is.

`server_loop` takes the steps of a run. `coordination` says who computes what, `processes` are the
programs of workers and servers, `engines` start them, `shards` are parts of the state, `plan` is
what all derive from the config, and `transport` connects them.
"""

"""Workers and servers for loops of one's own: `ClusterCoordinator` and `ParameterServers`."""

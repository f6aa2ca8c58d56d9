"""Ray as an engine of `jtrain launch`: the processes of a run on the nodes of a Ray cluster."""

from jtrain.distributed.launcher.ray.launch import launch_on_ray as launch_on_ray

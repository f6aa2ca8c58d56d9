"""Several processes of one command on this machine, as many machines would run it."""

from jtrain.distributed.launcher.supervise import launch as launch

"""Several processes of one command on this machine, as many machines would run it."""

from jtrain.distributed.launcher.launch import launch as launch

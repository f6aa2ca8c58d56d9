"""Several processes of one command on this machine, as many machines would run it."""

from jtrain.launch.launch import launch as launch

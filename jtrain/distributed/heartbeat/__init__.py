"""Heartbeat of a process: its phase and step, readable by others, and the limits of each phase."""

from jtrain.distributed.heartbeat.heartbeat import HEARTBEAT as HEARTBEAT
from jtrain.distributed.heartbeat.heartbeat import Beat as Beat
from jtrain.distributed.heartbeat.heartbeat import Heartbeat as Heartbeat
from jtrain.distributed.heartbeat.heartbeat import connect_heartbeat as connect_heartbeat
from jtrain.distributed.heartbeat.heartbeat import read_beat as read_beat
from jtrain.distributed.heartbeat.patience import Patience as Patience
from jtrain.distributed.heartbeat.patience import WatchedProcess as WatchedProcess

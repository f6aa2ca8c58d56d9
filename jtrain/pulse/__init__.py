"""What a process of a run is doing, told where others can read it, and for how long it may."""

from jtrain.pulse.patience import Patience as Patience
from jtrain.pulse.patience import Watched as Watched
from jtrain.pulse.pulse import PULSE as PULSE
from jtrain.pulse.pulse import Beat as Beat
from jtrain.pulse.pulse import Pulse as Pulse
from jtrain.pulse.pulse import read as read

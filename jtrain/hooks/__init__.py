"""Hooks: they observe a run and change nothing.

A hook of your own is a function, or a class that overrides one method of `jtrain.loop.Hook`:

```python
class Worst(Hook):
    def __init__(self):
        self.loss = 0.0

    def on_numbers(self, step, numbers):
        self.loss = max(self.loss, numbers["loss"])
```

Their order in a list is that of their calls: `Signals`, `Speed`, what reads it (`Log`, `Progress`),
`Metrics`, `Finite`, `Evaluate`, `Samples`, and `Save` last.
"""

from jtrain.hooks.curve import curve as curve
from jtrain.hooks.curve import only_ascii as only_ascii
from jtrain.hooks.curve import smooth as smooth
from jtrain.hooks.early_stop import EarlyStop as EarlyStop
from jtrain.hooks.evaluating import Evaluate as Evaluate
from jtrain.hooks.evaluating import Judge as Judge
from jtrain.hooks.evaluating import Result as Result
from jtrain.hooks.finite import Finite as Finite
from jtrain.hooks.history import History as History
from jtrain.hooks.log import Lines as Lines
from jtrain.hooks.log import Log as Log
from jtrain.hooks.metrics import Metrics as Metrics
from jtrain.hooks.plain import on_numbers as on_numbers
from jtrain.hooks.plain import on_results as on_results
from jtrain.hooks.plain import on_state as on_state
from jtrain.hooks.progress import Progress as Progress
from jtrain.hooks.samples import Samples as Samples
from jtrain.hooks.saving import Save as Save
from jtrain.hooks.signals import Signals as Signals
from jtrain.hooks.speed import Pace as Pace
from jtrain.hooks.speed import Speed as Speed

"""Hooks: what a run calls between its steps; a hook may ask it to stop or to roll back.

Your own hook is a function, or a class that overrides a method of `jt.Hook`:

```python
class Worst(jt.Hook):
    def __init__(self):
        self.loss = 0.0

    def on_numbers(self, step, numbers):
        self.loss = max(self.loss, numbers["loss"])
```

The hooks of a run, and the order in which they are called, stand in `jtrain.train.trainer`.
"""

from jtrain.io.lazy_names import lazy_names
from jtrain.train.hooks.evaluation import EarlyStop as EarlyStop
from jtrain.train.hooks.evaluation import EvaluateEvery as EvaluateEvery
from jtrain.train.hooks.evaluation import EvaluationResult as EvaluationResult
from jtrain.train.hooks.function_hooks import on_numbers as on_numbers
from jtrain.train.hooks.function_hooks import on_state as on_state
from jtrain.train.hooks.function_hooks import to_hook as to_hook
from jtrain.train.hooks.log import LogHook as LogHook
from jtrain.train.hooks.progress import ProgressBar as ProgressBar
from jtrain.train.hooks.signals import Signals as Signals
from jtrain.train.hooks.speed import Speed as Speed

_, __dir__ = lazy_names(__name__)

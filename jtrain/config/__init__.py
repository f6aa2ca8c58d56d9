"""Configs: YAML values, a schema of frozen dataclasses, and one error that lists every mistake."""

from typing import TYPE_CHECKING

from jtrain.io.lazy_names import lazy_names

if TYPE_CHECKING:
    from jtrain.config.sections import GuardPolicy as GuardPolicy
    from jtrain.config.sections import InitFrom as InitFrom
    from jtrain.config.sections import RollbackPolicy as RollbackPolicy
    from jtrain.config.sections import SkipPolicy as SkipPolicy
    from jtrain.config.sections import StopPolicy as StopPolicy
else:
    __getattr__, __dir__ = lazy_names(__name__)

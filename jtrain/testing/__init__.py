"""Checks for users' own losses: `jt.testing.assert_invariant`, `jt.testing.assert_on_policy`."""

from jtrain.io.lazy_names import lazy_names
from jtrain.testing.case import build_case as build_case
from jtrain.testing.case import place_loss as place_loss
from jtrain.testing.invariant import assert_invariant as assert_invariant
from jtrain.testing.invariant import check as check
from jtrain.testing.on_policy import OnPolicyReport as OnPolicyReport
from jtrain.testing.on_policy import assert_on_policy as assert_on_policy
from jtrain.testing.report import CheckReport as CheckReport

_, __dir__ = lazy_names(__name__)

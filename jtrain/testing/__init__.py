"""Checks for users' own losses: `jt.testing.assert_invariant`."""

from jtrain.testing.case import placed as placed
from jtrain.testing.case import subject as subject
from jtrain.testing.invariant import assert_invariant as assert_invariant
from jtrain.testing.invariant import check as check
from jtrain.testing.report import CheckReport as CheckReport

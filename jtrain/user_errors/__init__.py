"""Errors in a user's own code, told by the user's own frames and what to type."""

from jtrain.user_errors.advice import CARRY_EXTRA as CARRY_EXTRA
from jtrain.user_errors.boundary import api_boundary as api_boundary
from jtrain.user_errors.boundary import refused_platform as refused_platform
from jtrain.user_errors.calls import check_takes as check_takes
from jtrain.user_errors.calls import user_code as user_code

"""Errors in a user's own code: messages with the user's own frames and what to type."""

from jtrain.errors.user_code.advice import CARRY_EXTRA as CARRY_EXTRA
from jtrain.errors.user_code.api_boundary import api_boundary as api_boundary
from jtrain.errors.user_code.api_boundary import refused_platform as refused_platform
from jtrain.errors.user_code.user_calls import check_takes as check_takes
from jtrain.errors.user_code.user_calls import user_code as user_code

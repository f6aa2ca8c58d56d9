"""Runs that are hurt on purpose, and compared with those that nobody hurt."""

from chaos.trial import Trial as Trial

"""Fault injection: runs with injected faults, compared with undisturbed runs."""

from chaos.trial import Trial as Trial

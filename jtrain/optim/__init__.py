"""Optimizers and schedules: values with build(steps)."""

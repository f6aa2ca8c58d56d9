"""Losses: functions of model outputs that return Means."""

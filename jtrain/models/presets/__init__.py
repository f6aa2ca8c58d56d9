"""Presets of published models, and conversion of published weights."""

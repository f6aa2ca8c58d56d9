"""Configs: YAML values, a schema of frozen dataclasses, and every mistake told at once."""

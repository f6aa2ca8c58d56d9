"""Configs: YAML values, a schema of frozen dataclasses, and one error that lists every mistake."""

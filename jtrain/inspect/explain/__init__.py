"""Explanations of a config's step: its operations by module, what it saves, what is compiled."""

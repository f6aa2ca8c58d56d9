"""Variables of the environment, read for one kind of cluster and remembered."""

from collections.abc import Mapping

from jtrain.errors import ConfigError


class ClusterVariables:
    """What an environment says; each look is noted in `seen`, for whoever asks why."""

    def __init__(self, environ: Mapping[str, str], kind: str):
        self._environ, self._kind = environ, kind
        self.seen: dict[str, str] = {}

    def get(self, name: str, default: str = "") -> str:
        """The text of a variable; `default` if it is not set or empty."""
        value = self._environ.get(name, "").strip()
        if value:
            self.seen[name] = value
        return value or default

    def text(self, name: str) -> str:
        """The text of a variable that has to be set.

        Raises:
            ConfigError: if it is not, with those that are.
        """
        if value := self.get(name):
            return value
        there = ", ".join(f"{key}={value}" for key, value in self.seen.items())
        raise ConfigError(
            f"{self._kind} is half set: there is {there or 'a part of it'}, and {name} is missing. "
            f"Set {name} too, or unset the others to run in one process."
        )

    def number(self, name: str, default: int | None = None) -> int:
        """The number that a variable holds.

        Raises:
            ConfigError: if it is none, or not set where there is no default.
        """
        text = self.text(name) if default is None else self.get(name, str(default))
        if text.isascii() and text.isdigit():
            return int(text)
        raise ConfigError(
            f"{self._kind}: {name} was to be a number from 0 on and is {text!r}. Set {name}=0, say."
        )

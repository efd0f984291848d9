"""Checked reading of the small JSON files of a model folder; every complaint names the file and the key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.base.errors import ModelFileError


class Fields:
    """A table of settings from one file.

    ``null`` counts as absent, as it does for the programs that write these files.
    """

    def __init__(self, values: Mapping[str, Any], origin: str) -> None:
        self._values = values
        self.origin = origin

    def get(self, key: str) -> Any:
        """The value as it is, ``None`` when absent."""
        return self._values.get(key)

    def whole(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        """A whole number."""
        value = self._values.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelFileError(f"{self.origin}: '{key}' is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ModelFileError(f"{self.origin}: '{key}' is {value!r}, not a whole number of at least {minimum}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number."""
        value = self._values.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelFileError(f"{self.origin}: '{key}' is missing")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ModelFileError(f"{self.origin}: '{key}' is {value!r}, not a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """A truth value."""
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelFileError(f"{self.origin}: '{key}' is {value!r}, not true or false")
        return value

    def floats(self, key: str) -> tuple[float, ...]:
        """A list of numbers, empty when absent."""
        value = self._values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(x, (int, float)) for x in value):
            raise ModelFileError(f"{self.origin}: '{key}' is not a list of numbers")
        return tuple(float(x) for x in value)

    def ids(self, key: str) -> tuple[int, ...]:
        """One token id or a list of them, empty when absent."""
        value = self._values.get(key)
        values = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(x, int) and not isinstance(x, bool) and x >= 0 for x in values):
            raise ModelFileError(f"{self.origin}: '{key}' is {value!r}, not a token id or a list of them")
        return tuple(values)

    def table(self, key: str) -> Fields | None:
        """A nested table, ``None`` when absent."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise ModelFileError(f"{self.origin}: '{key}' is not a table")
        return Fields(value, f"{self.origin}: {key}")

    def __contains__(self, key: str) -> bool:
        """Whether the key is there, be it with ``null``."""
        return key in self._values


def read_json(path: Path) -> dict[str, Any]:
    """The table in a JSON file.

    Raises:
        ModelFileError: missing, unreadable or not a table.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelFileError(f"{path}: no such file") from None
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ModelFileError(f"{path}: is not JSON ({error}); fetch it again") from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}: is not a table of settings")
    return value


def read_fields(path: Path) -> Fields:
    """The settings in a JSON file; raises `ModelFileError`."""
    return Fields(read_json(path), str(path))

"""Reading a JSON object key by key, so that no key goes unread."""

import json
import sys
from collections.abc import Mapping

Json = Mapping[str, object]
MISSING = object()
"""The default of a key that must be there."""


class ConfigError(ValueError):
    """A configuration that we do not run; the message names the key, its value and what we do."""


class Keys:
    """The keys of one JSON object, each to be claimed; ``finish`` names what nobody claimed."""

    def __init__(self, json_object: object, where: str) -> None:
        if not isinstance(json_object, Mapping):
            raise ConfigError(f"{where} must be a JSON object, got {json_object!r}")
        self._json: Json = json_object
        self._claimed: set[str] = set()
        self._ignored: set[str] = set()
        self.where = where

    def get(self, key: str, default: object = MISSING) -> object:
        """The value; an absent or null one is the default, or an error where there is none."""
        self._claimed.add(key)
        value = self._json.get(key)
        if value is not None:
            return value
        if default is MISSING:
            raise ConfigError(f"{self.where}: {key} is missing")
        return default

    def has(self, key: str) -> bool:
        return self.get(key, None) is not None

    def integer(self, key: str, default: object = MISSING, *, minimum: int = 1) -> int:
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(key, value, f"an integer >= {minimum}")
        if not minimum <= value < 2**31:  # sizes and ids are int32 on the device
            raise self.error(key, value, f"an integer >= {minimum} and below 2**31")
        return value

    def number(self, key: str, default: object = MISSING) -> float:
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.error(key, value, "a number > 0")
        if not 0 < value <= sys.float_info.max:  # NaN, infinity and integers too large for a float
            raise self.error(key, value, "a finite number > 0")
        return float(value)

    def boolean(self, key: str, default: object = MISSING) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, value, "true or false")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """None, one id or a list of ids."""
        value = self.get(key, [])
        ids = value if isinstance(value, list) else [value]
        whole = tuple(i for i in ids if type(i) is int and i >= 0)
        if len(whole) < len(ids):
            raise self.error(key, value, "a token id or a list of token ids")
        return whole

    def only(self, key: str, accepted: object) -> None:
        """Claim a key that we run with one value alone; absent or null means that value."""
        value = self.get(key, accepted)
        if value != accepted or isinstance(value, bool) != isinstance(accepted, bool):
            raise self.error(key, value, json.dumps(accepted))

    def ignore(self, *keys: str) -> None:
        """Claim keys whose value cannot change what we compute."""
        self._ignored.update(keys)

    def finish(self) -> None:
        unknown = sorted(self._json.keys() - self._claimed - self._ignored)
        if unknown:
            named = ", ".join(f"{key}={self._json[key]!r}" for key in unknown)
            accepted = ", ".join(sorted(self._claimed))
            raise ConfigError(f"{self.where}: not run here: {named}; keys that are: {accepted}")

    def error(self, key: str, value: object, accepted: str) -> ConfigError:
        return ConfigError(f"{self.where}: {key}={value!r} is not run; accepted: {accepted}")

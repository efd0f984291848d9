"""Modules that are imported when somebody first looks into them, and not before.

For modules of other packages that are imported on their package's way and seldom used. `postpone` changes nothing but
the moment: an import of the module gives an object that becomes the real module with the first look for anything in it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from threading import RLock
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from importlib.abc import Loader


def postpone(names: Iterable[str]) -> None:
    """Postpone the imports of these modules of this process, by full names; those that are there already stay."""
    sys.meta_path.insert(0, _Finder(names))


def load_postponed() -> None:
    """Import now what was postponed: before code whose own imports would go in circles around it."""
    for finder in sys.meta_path:
        for module in map(sys.modules.get, finder.names if isinstance(finder, _Finder) else ()):
            if isinstance(module, _Postponed):
                _load(module)


class _Finder:
    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.names:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = cast("Loader", _Loader(spec.loader))
        return spec


class _Loader:
    def __init__(self, real: Loader) -> None:
        self._real = real
        self._lock = RLock()
        self._began = False

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Postponed(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass

    def load(self, module: ModuleType) -> None:
        """Run the module, once; a look from within its own imports finds what is there so far."""
        with self._lock:
            if not self._began:
                self._began = True
                self._real.exec_module(module)
                module.__class__ = ModuleType


class _Postponed(ModuleType):
    def __getattr__(self, name: str) -> Any:
        # What the import system asks about is set, or is not there for real modules either.
        if name.startswith("__"):
            raise AttributeError(f"module '{self.__name__}' has no attribute '{name}'")
        _load(self)
        try:
            return self.__dict__[name]
        except KeyError:
            raise AttributeError(f"module '{self.__name__}' has no attribute '{name}'") from None


def _load(module: _Postponed) -> None:
    loader: object = module.__spec__.loader if module.__spec__ is not None else None
    assert isinstance(loader, _Loader)
    loader.load(module)

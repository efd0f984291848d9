"""Postponed modules: imported for free, whole with the first look, the same for everybody."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from headrace.base.postponed_imports import load_postponed, postpone

LOADED: list[str] = []


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package whose ``heavy`` module notes when it runs; ``heavy`` is postponed."""
    LOADED.clear()
    name = "postponed_package"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text(f"from {name} import heavy as heavy\nfrom {name} import light\n")
    (folder / "light.py").write_text(f"import {name}.heavy\nvalue = 1\n")
    (folder / "heavy.py").write_text(
        f"from {__name__} import LOADED\nimport {name}\nfirst = 1\nassert {name}.heavy.first == 1\n"
        "LOADED.append(__name__)\nanswer = 42\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    postpone([f"{name}.heavy"])
    yield name
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        del sys.modules[module]


def test_an_import_alone_runs_nothing(package: str) -> None:
    module = __import__(package)
    assert module.light.value == 1 and not LOADED
    assert module.heavy is sys.modules[f"{package}.heavy"]
    assert not hasattr(module.heavy, "__wrapped__") and not LOADED


def test_a_look_runs_it_once(package: str) -> None:
    heavy = __import__(package).heavy
    assert heavy.answer == 42
    assert [f"{package}.heavy"] == LOADED
    assert type(heavy) is ModuleType and heavy.answer == 42
    assert not hasattr(heavy, "other") and len(LOADED) == 1


def test_names_can_be_imported_from_it(package: str) -> None:
    __import__(package)
    heavy = __import__(f"{package}.heavy", fromlist=["answer"])
    assert heavy.answer == 42 and len(LOADED) == 1
    with pytest.raises(ImportError):
        exec(f"from {package}.heavy import nothing")


def test_several_threads_get_the_whole_module(package: str) -> None:
    heavy, seen = __import__(package).heavy, []
    threads = [threading.Thread(target=lambda: seen.append(heavy.answer)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert seen == [42] * 4 and len(LOADED) == 1


def test_other_modules_and_missing_ones_are_as_ever(package: str) -> None:
    assert __import__(package).light.__class__ is ModuleType
    postpone(["postponed_package.absent"])
    with pytest.raises(ModuleNotFoundError):
        __import__("postponed_package.absent")


def test_it_runs_when_asked_to(package: str) -> None:
    load_postponed()
    assert not LOADED, "what nobody imported"
    heavy = __import__(package).heavy
    load_postponed()
    assert [f"{package}.heavy"] == LOADED
    assert heavy.answer == 42 and len(LOADED) == 1

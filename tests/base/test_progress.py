"""The progress word is one counter for all who attach, and leaves nothing behind."""

from __future__ import annotations

import ctypes
from pathlib import Path

from headrace.base.progress import ProgressWord


def test_a_private_word_counts() -> None:
    word = ProgressWord()
    word.advance()
    assert word.read() == 1
    assert word.name is None
    word.close()


def test_who_attaches_sees_and_moves_the_same_word(tmp_path: Path) -> None:
    word = ProgressWord(shared=True, folder=str(tmp_path))
    other = ProgressWord(name=word.name)
    word.advance()
    other.advance()
    assert word.read() == other.read() == 2
    assert ctypes.c_uint64.from_address(other.address).value == 2
    other.close()
    word.advance()
    word.close()
    word.close()
    assert word.read() == 3
    assert list(tmp_path.iterdir()) == []


def test_the_file_may_go_once_all_have_attached(tmp_path: Path) -> None:
    word = ProgressWord(shared=True, folder=str(tmp_path))
    other = ProgressWord(name=word.name)
    assert word.name is not None
    Path(word.name).unlink()
    other.advance()
    assert word.read() == 1
    word.close()
    other.close()

"""What the server remembers of its answers: the ids that were generated for a text, to be found again.

A client sends an answer back as text, and a tokenizer may cut that text otherwise than the model wrote it.
Each answer is remembered under the tokens before it, so that a chat's next turn finds exactly its own.
"""

import logging
import sqlite3
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from blake3 import blake3

log = logging.getLogger("kvass.serve")

_KEPT = 200_000
"""Answers kept; the oldest go first."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (place BLOB, covered INTEGER, ids BLOB, at REAL, text BLOB,
    PRIMARY KEY (place, text)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS answers_at ON answers (at);
"""


class Place:
    """Where an answer stands: a namespace's root and the tokens before the answer."""

    def __init__(self, root: bytes):
        self._hasher = blake3(root, derive_key_context="kvass answer v1")

    def add(self, tokens: Sequence[int]) -> None:
        """Go on behind these tokens."""
        self._hasher.update(np.asarray(tokens, "<i4").tobytes())

    def digest(self) -> bytes:
        """Its name, 32 bytes."""
        return self._hasher.digest()


class Answers:
    """Ids of answers, by place and text. In a file where that works, else in memory; both bounded.

    Only digests of texts are kept; the ids are the answer. A failure is a miss.
    """

    def __init__(self, folder: Path | None):
        """`folder` None: in memory."""
        self._guard = threading.Lock()
        self._writes = 0
        self._db = self._open(folder)

    @staticmethod
    def _open(folder: Path | None) -> sqlite3.Connection:
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                path = folder / "answers.sqlite"
                path.touch(mode=0o600)
                return _connect(str(path))
        except (OSError, sqlite3.Error) as error:
            log.warning("kvass: answers are remembered in memory only: state_path %s: %s", folder, error)
        return _connect(":memory:")

    def remember(self, where: bytes, text: str, ids: list[int], covered: int) -> None:
        """Keep that `ids` were generated for the first `covered` characters of `text` at a place."""
        row = (where, covered, np.array(ids, "<i4").tobytes(), time.time(), _digest(where, text))
        try:
            with self._guard, self._db:
                self._db.execute(
                    "INSERT OR REPLACE INTO answers (place, covered, ids, at, text) VALUES (?, ?, ?, ?, ?)",
                    row,
                )
                self._writes += 1
                if self._writes % 100 == 0:
                    self._db.execute(
                        "DELETE FROM answers WHERE at < (SELECT at FROM answers ORDER BY at DESC "
                        "LIMIT 1 OFFSET ?)",
                        (_KEPT,),
                    )
        except sqlite3.Error as error:
            log.warning("kvass: an answer is not remembered: %s", error)

    def recall(self, where: bytes, text: str) -> tuple[list[int], int] | None:
        """The ids generated for a text at a place, and how many of its characters they stand for."""
        try:
            with self._guard:
                row = self._db.execute(
                    "SELECT ids, covered FROM answers WHERE place = ? AND text = ?",
                    (where, _digest(where, text)),
                ).fetchone()
            return (np.frombuffer(row[0], "<i4").tolist(), int(row[1])) if row else None
        except (sqlite3.Error, ValueError, TypeError, OverflowError) as error:
            log.warning("kvass: an answer is not recalled: %s", error)
            return None

    def close(self) -> None:
        """Close the file."""
        with self._guard:
            self._db.close()


def _connect(path: str) -> sqlite3.Connection:
    made = sqlite3.connect(path, timeout=1.0, check_same_thread=False)
    try:
        made.execute("PRAGMA journal_mode = WAL")
        made.execute("PRAGMA synchronous = NORMAL")
        made.executescript(_SCHEMA)
    except sqlite3.Error:
        made.close()
        raise
    return made


def _digest(where: bytes, text: str) -> bytes:
    return blake3(where + text.encode("utf-8", "surrogatepass"), derive_key_context="kvass text v1").digest()

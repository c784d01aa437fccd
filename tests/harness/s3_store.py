"""S3 stores as the tests open them, and what is asked of them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvass.config import Settings
from kvass.testing.stores import LIMIT, put
from kvass.tiers.s3 import S3Store
from kvass.tiers.store import Store

from .s3_server import BUCKET, KEY, SECRET


def only_these_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment with the server's keys and no other setting of S3."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)


def credentials(folder: Path, key: str, secret: str, *lines: str) -> Path:
    """A file of keys, and further lines of TOML."""
    path = folder / "s3.toml"
    path.write_text("\n".join([f'access_key_id = "{key}"', f'secret_access_key = "{secret}"', *lines]))
    return path


def opened(endpoint: str, url: str = f"s3://{BUCKET}/pre/fix", **others: Any) -> S3Store:
    """The store that these settings name."""
    return S3Store.open(Settings.load(s3_url=url, s3_endpoint=endpoint, **others))


def calls(store: Store) -> list[Callable[[], object]]:
    """One of each that asks the server."""
    return [
        lambda: store.get("one", LIMIT),
        lambda: store.head("one", 10),
        lambda: store.exists(["one"]),
        lambda: store.exists(["one", "two", "three"]),
        lambda: put(store, "new", b"new"),
        lambda: list(store.list("")),
    ]

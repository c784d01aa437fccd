"""kvass opens no socket: nothing that is stored, and nobody, is told of anything."""

import os
import subprocess
import sys
from pathlib import Path

_SCRIPT = """
import sys
from pathlib import Path

events = []
sys.addaudithook(lambda event, arguments: events.append(event) if event.startswith("socket.") else None)
from fixtures.world import *
from kvass.config import Settings

where = Path(sys.argv[1])
settings = Settings.load(host_path=where / "host", disk_path=where / "disk", models_path=where / "models",
                         host_bytes=16 << 20, disk_bytes=16 << 20, chunk_tokens=16)
with KVCache.open(settings) as cache:
    assert [tier.name for tier in cache.tiers] == ["host", "disk"]
    store(cache, prompt(1, 100))
    assert hit(cache, prompt(1, 100)) == 100
    cache.verify()
    cache.stats()
    cache.forget(prompt(1, 100), namespace())
assert events == [], events

import socket
socket.socket().close()
assert events, "the hook sees nothing"
"""


def test_kvass_opens_no_socket(shm: Path) -> None:
    tests = str(Path(__file__).resolve().parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])}
    subprocess.run([sys.executable, "-c", _SCRIPT, str(shm)], env=environment, check=True)

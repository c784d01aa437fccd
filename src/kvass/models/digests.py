"""Digests of model files, remembered by what the file system says of a file so that they are taken once."""

import json
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Final

from blake3 import blake3

from kvass.errors import ModelFilesError

_MEMO_NAME: Final = "digests.json"
_MEMO_ENTRIES: Final = 1024
_READ_BYTES: Final = 16 << 20
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")

# A write right after a digest was taken may leave the same time stamps (they tick a few milliseconds apart);
# what changed less than this ago is not remembered.
_SETTLED_NS: Final = 2_000_000_000


def file_digest(path: Path, cache_dir: Path) -> str:
    """Return the BLAKE3 digest (hex) of a file's content.

    It is remembered in `cache_dir` under the file's device, inode, size, mtime and ctime; a memo that is
    missing, broken or not writable costs only the time to read the file again. Raises ModelFilesError
    where the file cannot be read.
    """
    try:
        with path.open("rb", buffering=0) as file:
            before = os.fstat(file.fileno())
            remembered = _read_memo(cache_dir).get(_identity(before))
            if remembered is not None:
                return remembered
            hasher = blake3(max_threads=blake3.AUTO)
            buffer = memoryview(bytearray(min(_READ_BYTES, before.st_size + 1)))
            # Not a memory map: a file cut short meanwhile would kill the process.
            while count := file.readinto(buffer):
                hasher.update(buffer[:count])
            after = os.fstat(file.fileno())
    except OSError as error:
        raise ModelFilesError(f"cannot read the model file {path}: {error}") from error
    digest = hasher.hexdigest()
    settled = time.time_ns() - max(after.st_mtime_ns, after.st_ctime_ns) > _SETTLED_NS
    if settled and _identity(before) == _identity(after):
        _remember(cache_dir, _identity(after), digest)
    return digest


def weights_digest(model_dir: Path, cache_dir: Path) -> str:
    """Return the digest (hex) of all weights of a model directory: its `*.safetensors`, names and contents.

    Raises ModelFilesError where there are none, or one cannot be read.
    """
    files = sorted((path for path in model_dir.glob("*.safetensors") if path.name[0] != "."), key=_name_bytes)
    if not files:
        raise ModelFilesError(f"{model_dir} has no *.safetensors files, so no weights that kvass can name")
    hasher = blake3(b"kvass.weights.v1")
    for path in files:
        for field in (_name_bytes(path), bytes.fromhex(file_digest(path, cache_dir))):
            hasher.update(len(field).to_bytes(8, "little") + field)
    return hasher.hexdigest()


def _name_bytes(path: Path) -> bytes:
    return os.fsencode(path.name)


def _identity(stat: os.stat_result) -> str:
    return f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"


def _read_memo(cache_dir: Path) -> dict[str, str]:
    try:
        memo = json.loads((cache_dir / _MEMO_NAME).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(memo, dict):
        return {}
    return {key: value for key, value in memo.items() if isinstance(value, str) and _DIGEST.fullmatch(value)}


def _remember(cache_dir: Path, identity: str, digest: str) -> None:
    # Of two processes at once, one may lose its entry, never damage the file.
    memo = _read_memo(cache_dir)
    memo[identity] = digest
    kept = dict(list(memo.items())[-_MEMO_ENTRIES:])
    draft: Path | None = None
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=cache_dir, prefix=f".{_MEMO_NAME}.", delete=False, encoding="utf-8"
        ) as file:
            draft = Path(file.name)
            json.dump(kept, file)
        draft.replace(cache_dir / _MEMO_NAME)
    except OSError:
        if draft is not None:
            draft.unlink(missing_ok=True)

"""What the processes of one side of a comparison hold in memory and have read from disks."""

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+ *(.*)$")


def below(*roots: int) -> list[int]:
    """These processes and all that descend from them."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended meanwhile
            fields = path.read_text().rsplit(")", 1)[1].split()
            children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found = list(roots)
    for one in found:
        found += children.get(one, [])
    return found


def read_bytes(processes: Iterable[int]) -> int:
    """Bytes that they had fetched from disks since they began: what a page cache held does not count."""
    total = 0
    for one in processes:
        with suppress(OSError):
            total += _number(Path(f"/proc/{one}/io"), "read_bytes:")
    return total


def memory_bytes(processes: Iterable[int], shared: Iterable[Path]) -> int:
    """Their proportional share of memory, and the files on tmpfs of which these are or lie in `shared`,
    whole and once, whoever has mapped what of them."""
    held = {str(file): file.stat().st_blocks * 512 for file in _files(shared)}
    total = sum(held.values())
    for one in processes:
        with suppress(OSError):
            total += _number(Path(f"/proc/{one}/smaps_rollup"), "Pss:") * 1024 - _mapped(one, held.keys())
    return total


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        yield from (one for one in [path, *path.rglob("*")] if one.is_file())


def _mapped(process: int, names: Iterable[str]) -> int:
    """A process' proportional share of these files."""
    wanted, total, inside = frozenset(names), 0, False
    for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
        if (mapping := _MAPPING.match(line)) is not None:
            inside = mapping[1].removesuffix(" (deleted)") in wanted
        elif inside and line.startswith("Pss:"):
            total += int(line.split()[1]) * 1024
    return total


def _number(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    return 0

"""Single pieces of the connector over tensors like vLLM's: what moves, what is refused, what is reported."""

from pathlib import Path
from typing import Any

import pytest

from harness.vllm_server import Engines

Answer = dict[str, Any]


@pytest.mark.parametrize(
    ("block", "chunk", "start", "canonical"),
    [(64, 64, 0, False), (32, 32, 64, False), (16, 32, 0, False), (16, 32, 48, False), (32, 32, 0, True),
     (16, 32, 48, True)],
)  # fmt: skip
def test_blocks_arrive_where_they_belong_and_nothing_else_is_touched(
    engines: Engines, place: Answer, tmp_path: Path, block: int, chunk: int, start: int, canonical: bool
) -> None:
    engines.ask(
        "pieces:moved", tmp_path, kvass=place, block=block, chunk=chunk, start=start, canonical=canonical
    )


@pytest.mark.parametrize("what", ["ranks", "lost", "packing", "refused"])
def test_pieces(engines: Engines, place: Answer, tmp_path: Path, what: str) -> None:
    engines.ask(f"pieces:{what}", tmp_path, kvass=place)

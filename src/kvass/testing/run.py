"""`kvass conformance package.module:Class`: runs the right suite against somebody's tier or codec."""

import importlib
import inspect
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvass.clock import Clock
from kvass.codecs.base import Codec
from kvass.errors import InputError
from kvass.tiers.base import Tier

_MODULE = '''"""The {kind} conformance suite for {target}."""

from kvass.testing.{module} import {suite}
from kvass.testing.run import {builder}


class Test{suite}({suite}):
    {body}
'''

_TIER_BODY = """controls_clock = {controls_clock}

    def make_tier(self, path, budget, clock):
        return build_tier({target!r}, path, budget, clock)
"""

_CODEC_BODY = """def make_codec(self):
        return build_codec({target!r})
"""


def run_conformance(target: str) -> int:
    """Run the suite for `package.module:Name` in a process of its own; its exit code, 0 when all passed.

    `Name`: a subclass of Tier or a function of `path`, `budget` and perhaps `name` and `clock` that makes
    a tier; or a class or function without arguments that makes a codec. Raises InputError for anything else.
    """
    found = _find(target)
    if _makes_codec(target, found):
        source = _MODULE.format(
            kind="codec", target=target, module="codecs", suite="CodecConformance", builder="build_codec",
            body=_CODEC_BODY.format(target=target),
        )  # fmt: skip
    else:
        accepted = _tier_arguments(target, found, Path(), 0, lambda: 0.0)
        remote = bool(getattr(found, "remote", False))
        module, suite = ("tiers", "TierConformance") if remote else ("local_tiers", "LocalTierConformance")
        source = _MODULE.format(
            kind="tier", target=target, module=module, suite=suite, builder="build_tier",
            body=_TIER_BODY.format(target=target, controls_clock="clock" in accepted),
        )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="kvass-conformance-") as folder:
        test = Path(folder) / "test_conformance.py"
        test.write_text(source)
        command = [
            sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", folder, "-p",
            "no:cacheprovider", str(test),
        ]  # fmt: skip
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        return subprocess.run(command, cwd=folder, env=environment, check=False).returncode  # noqa: S603 - our own


def build_tier(target: str, path: Path, budget: int, clock: Clock) -> Tier:
    """What the generated module calls. Raises InputError where no tier comes out."""
    found = _find(target)
    made = found(**_tier_arguments(target, found, path, budget, clock))
    if not isinstance(made, Tier):
        raise InputError(f"{target} made a {type(made).__name__}, not a kvass.tiers.base.Tier")
    return made


def build_codec(target: str) -> Codec:
    """What the generated module calls."""
    made: Codec = _find(target)()
    return made


def _find(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    if not (module and name):
        raise InputError(f"{target!r} must be of the form package.module:Name")
    try:
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise InputError(f"cannot find {target}: {error}") from error
    if not callable(found):
        raise InputError(f"{target} is no class or function that makes a tier or a codec")
    return found


def _parameters(target: str, found: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(found).parameters)
    except (TypeError, ValueError) as error:
        raise InputError(f"cannot tell how to call {target}: {error}") from error


def _is_needed(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind not in (
        parameter.VAR_POSITIONAL,
        parameter.VAR_KEYWORD,
    )


def _makes_codec(target: str, found: Callable[..., Any]) -> bool:
    if isinstance(found, type):
        if issubclass(found, Tier):
            return False
        if not all(callable(getattr(found, verb, None)) for verb in ("step", "encode", "decode")):
            raise InputError(
                f"{target} is neither a kvass.tiers.base.Tier nor a codec (step, encode, decode)"
            )
    needed = [name for name, parameter in _parameters(target, found).items() if _is_needed(parameter)]
    if isinstance(found, type) and needed:
        raise InputError(f"{target} needs arguments ({', '.join(needed)}); give a function without any")
    return not needed


def _tier_arguments(
    target: str, found: Callable[..., Any], path: Path, budget: int, clock: Clock
) -> dict[str, Any]:
    offered = {"path": path, "budget": budget, "clock": clock, "name": "conformance"}
    parameters = _parameters(target, found)
    every = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name, parameter in parameters.items():
        if _is_needed(parameter) and name not in offered:
            raise InputError(
                f"{target} needs {name!r}; give a function of path, budget and, if need be, clock and name"
            )
    return {name: value for name, value in offered.items() if every or name in parameters}

"""The command line: `kvass --help`."""

import sys
from typing import NoReturn

import typer
from rich.markup import escape

from kvass.cli import (
    benching,
    calibrating,
    doctor,
    explaining,
    looking,
    quality,
    recoding,
    serving,
    sizing,
    top,
    trying,
    warming,
    working,
)
from kvass.cli.output import err
from kvass.errors import KvassError

app = typer.Typer(
    no_args_is_help=True,
    help="Keep, look at and measure the KV caches of language models.",
    pretty_exceptions_enable=False,
)
app.command("ls")(looking.list_objects)
for _command in (
    looking.show,
    looking.verify,
    looking.rm,
    looking.stats,
    recoding.recode,
    top.top,
    explaining.explain,
    sizing.size,
    calibrating.calibrate,
    quality.quality,
    doctor.doctor,
    warming.warm,
    serving.serve,
    serving.key,
    working.worker,
    trying.demo,
    trying.conformance,
):
    app.command()(_command)
app.add_typer(benching.app, name="bench")


def main() -> NoReturn:
    """Run the command line; errors that a user can mend are one line, without a traceback."""
    try:
        app()
    except KvassError as error:
        err.print(f"[red]kvass: {escape(str(error))}[/red]", soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        err.print("kvass: interrupted")
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(141)
    sys.exit(0)

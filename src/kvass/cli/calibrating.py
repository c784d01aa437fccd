"""kvass calibrate: learn a model's codec tables, and measure what each codec costs it."""

import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.markup import escape

from kvass.cli.output import AsJson, err, needs_transformers, out, print_json, progress_to
from kvass.config import Settings
from kvass.quality import BlendCertificate, Certificate, calibrated_folder


def calibrate(
    model: Annotated[str, typer.Argument(help="A bundled model, a .gguf file, or a model directory.")],
    texts: Annotated[
        Path | None, typer.Option(help="A folder with texts of your own, of the kind that you serve.")
    ] = None,
    blends: Annotated[
        bool,
        typer.Option("--blends", help="Measure repair of moved passages instead: 45 minutes."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make the tables and the certificate without which no lossy codec is used for a model.

    Takes about twelve minutes on two cores for a model of 135M parameters. What was there
    before is replaced. With --blends: the certificate without which nothing is reused but
    beginnings of prompts.
    Example: kvass calibrate smollm2-135m
    """
    needs_transformers()
    from kvass.calibrate.run import calibrate as run
    from kvass.calibrate.run import calibrate_repair
    from kvass.engines.transformers.load import certified_namespace, load_model

    settings = Settings.load()
    began = time.perf_counter()
    loaded = load_model(model, dtype="float32", models_path=settings.models_path)
    namespace = certified_namespace(model, settings.models_path)
    certificate: Certificate | BlendCertificate
    with progress_to("measuring") as show:
        if blends:
            folder, certificate = calibrate_repair(
                loaded, namespace, settings.models_path, texts=texts, progress=show
            )
        else:
            folder, certificate = run(
                loaded, namespace, settings.models_path, texts=texts,
                say=lambda line: err.print(escape(line), soft_wrap=True), progress=show,
            )  # fmt: skip
    seconds = time.perf_counter() - began
    assert folder == calibrated_folder(settings.models_path, namespace)
    if as_json:
        print_json(
            {
                "model": certificate.model,
                "folder": str(folder),
                "seconds": round(seconds, 1),
                **({"tables": certificate.tables} if isinstance(certificate, Certificate) else {}),
                "certificate": certificate.digest,
                "measured": [msgspec.to_builtins(one) for one in certificate.measured],
            }
        )
        return
    out.print(f"calibrated in {seconds / 60:.1f} minutes: {escape(str(folder))}", soft_wrap=True)
    out.print(f"see: kvass quality {escape(model)}{' --blends' if blends else ''}", soft_wrap=True)

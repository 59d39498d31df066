"""The ``affdiv-zoo`` command."""

from pathlib import Path
from typing import Annotated

import typer

import affdiv_zoo

app = typer.Typer(help="Affine-like layers and PatchNorm models for timm.", no_args_is_help=True, add_completion=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(affdiv_zoo.__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Affine-like layers and PatchNorm models for timm."""


@app.command("list")
def list_(
    pattern: str = typer.Argument("*", help="A wildcard, e.g. '*patchnorm'."),
    pretrained: bool = typer.Option(False, help="Only names with weights, with their tags."),
) -> None:
    """Print the names of the models that this package adds to timm."""
    names = affdiv_zoo.list_models(pattern, pretrained=pretrained)
    if not names:
        which = "with weights" if pretrained else "at all"
        typer.echo(f"error: no name {which} matches {pattern!r}", err=True)
        raise typer.Exit(1)
    for name in names:
        typer.echo(name)


@app.command()
def info(name: str = typer.Argument(..., help="A model, e.g. resnet18_patchnorm; timm's own work too.")) -> None:
    """Print a model's parameters, multiply-accumulates, weights, and the correction of each layer."""
    from affdiv_zoo.models import _info

    try:
        text = _info.info(name)
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    typer.echo(text)


@app.command()
def convert(
    name: Annotated[str, typer.Argument(help="A timm model, e.g. resnet50.")],
    out: Annotated[Path, typer.Option(help="The folder to write; timm.create_model('local-dir:OUT') loads it.")],
    correction: Annotated[str, typer.Option(help="affine, norm or gradient.")] = "affine",
    center: Annotated[str, typer.Option(help="auto (as the norm that is replaced), true or false.")] = "auto",
    scale: Annotated[str, typer.Option(help="rms or l2.")] = "rms",
    attention: Annotated[str, typer.Option(help="none, projection, separable, logit or exact.")] = "none",
    pretrained: Annotated[bool, typer.Option(help="Start from timm's weights, which it may download.")] = False,
    checkpoint: Annotated[Path | None, typer.Option(help="Start from these weights, e.g. .safetensors.")] = None,
    images: Annotated[Path | None, typer.Option(help="Calibrate on this folder's images; without, on noise.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="How many of the images.")] = 16,
    model_kwargs: Annotated[
        list[str] | None, typer.Option(help="key=value for timm.create_model; may be repeated.")
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace the files in a folder that is not empty.")] = False,
) -> None:
    """Swap a timm model's norm + affine pairs for corrected layers, and save it."""
    from affdiv_zoo.convert.saved import convert_to_directory

    try:
        report = convert_to_directory(
            name,
            out,
            correction=correction,
            center=center,
            scale=scale,
            attention=attention,
            pretrained=pretrained,
            checkpoint=checkpoint,
            images=images,
            samples=samples,
            model_kwargs=model_kwargs or [],
            overwrite=overwrite,
        )
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(report)
    if not pretrained and checkpoint is None:
        typer.echo("The weights are random: --pretrained or --checkpoint FILE converts trained ones.")
    typer.echo(f"saved to {out}")


@app.command()
def diagnose(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="timm models, to be compared side by side.")],
    out: Annotated[Path, typer.Option(help="The folder to write: report.html, report.png and report.json.")],
    dataset: Annotated[str, typer.Option(help="digits: scikit-learn's, scaled up.")] = "digits",
    images: Annotated[Path | None, typer.Option(help="A folder of class folders, instead of the digits.")] = None,
    batch_size: Annotated[int, typer.Option(min=2, help="Images of the step that is diagnosed.")] = 32,
    image_size: Annotated[
        int | None,
        typer.Option(min=1, help="Side of the images; without, the model's, or 64 for digits if it takes any."),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=0, help="Updates before the diagnosis; without, 10 for random weights: some branches are zero."
        ),
    ] = None,
    pretrained: Annotated[bool, typer.Option("--pretrained", help="Start from timm's weights.")] = False,
    eval_mode: Annotated[bool, typer.Option("--eval", help="In evaluation mode instead of training mode.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Check against real steps; several times slower.")] = False,
    whole_step: Annotated[
        bool, typer.Option("--whole-step", help="Measure a step of all layers at once, too.")
    ] = False,
    model_kwargs: Annotated[
        list[str] | None, typer.Option(help="key=value for timm.create_model; may be repeated.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the weights and the choice of images.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the files of a folder that is not empty.")
    ] = False,
) -> None:
    """Measure how a training step moves every layer's outputs, against how it should, and draw it."""
    from affdiv_zoo.diagnostics.command import diagnose_to_directory

    try:
        reports = diagnose_to_directory(
            names,
            out,
            dataset=dataset,
            images=images,
            batch_size=batch_size,
            image_size=image_size,
            steps=steps,
            pretrained=pretrained,
            eval_mode=eval_mode,
            verify=verify,
            whole_step=whole_step,
            model_kwargs=model_kwargs or [],
            seed=seed,
            device=device,
            overwrite=overwrite,
            say=lambda text: typer.echo(text, err=True),
        )
    except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    for report in reports:
        typer.echo(f"{report}\n")
    typer.echo(f"written to {out}: report.html, report.png, report.json")


@app.command()
def push(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that a run, convert or a library saved.")],
    repo: Annotated[str, typer.Option(help="user/name on the Hub; made if it does not exist.")],
    private: Annotated[bool, typer.Option("--private", help="Make it private, and refuse a public one.")] = False,
    revision: Annotated[str | None, typer.Option(help="The branch, made if it does not exist; main without.")] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request.")] = False,
    message: Annotated[str, typer.Option(help="The commit's title.")] = "Add model",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would go, and send nothing.")] = False,
) -> None:
    """Publish a model on the Hub in one commit: weights, configuration, preprocessing and card."""
    from affdiv_zoo import hub

    try:
        report = hub.push(
            directory,
            repo,
            commit_message=message,
            revision=revision,
            private=private,
            create_pr=create_pr,
            dry_run=dry_run,
        )
    except (hub.FolderError, hub.HubError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(report)


@app.command()
def pull(
    repo: Annotated[str, typer.Argument(help="user/name on the Hub.")],
    directory: Annotated[Path | None, typer.Argument(metavar="[DIR]", help="Copy it here, too.")] = None,
    revision: Annotated[str | None, typer.Option(help="A branch, tag or commit; main without.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace files of a folder that is not empty.")
    ] = False,
) -> None:
    """Download a model into the Hub's cache, check its hashes and shapes, and print where it is."""
    from affdiv_zoo import hub

    try:
        path = hub.pull(repo, directory, revision=revision, overwrite=overwrite)
    except (FileExistsError, hub.FolderError, hub.HubError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(path)


@app.command()
def card(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A run's folder.")],
    write: Annotated[bool, typer.Option("--write", help="Into DIR/README.md instead of printing it.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="With --write: replace the card there.")] = False,
) -> None:
    """Generate a model's card from the records in its folder."""
    from affdiv_zoo.hub.cards import record_of, render_card

    try:
        text = render_card(record_of(directory))
        path = directory / "README.md"
        if write and path.exists() and not overwrite:
            raise FileExistsError(f"{path} exists: add --overwrite, or edit it by hand")
    except (KeyError, OSError, ValueError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    if not write:
        typer.echo(text)
        return
    from affdiv_zoo._files import write_text

    write_text(path, text)
    typer.echo(f"written to {path}")


@app.command()
def publish(
    namespace: Annotated[str, typer.Option(help="A user or an organisation on the Hub.")],
    pattern: Annotated[str, typer.Argument(help="A wildcard for names of weights.")] = "*",
    private: Annotated[bool, typer.Option("--private", help="As in push.")] = False,
    record: Annotated[
        Path | None, typer.Option(help="The file that notes what is where; the package's without.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would go, and send nothing.")] = False,
) -> None:
    """Publish all released weights, each in its own repository; called again, do only what is left."""
    from affdiv_zoo import hub

    options = {} if record is None else {"record": record}
    try:
        for name, report in hub.publish(namespace, pattern, private=private, dry_run=dry_run, **options):
            typer.echo(f"{name}\n{report}")
    except (hub.FolderError, hub.HubError, ValueError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(affdiv_zoo.__version__)

"""The ``affdiv-zoo`` command."""

import typer

import affdiv_zoo

app = typer.Typer(help="Affine-like layers and PatchNorm models for timm.", no_args_is_help=True, add_completion=False)


@app.callback()
def main() -> None:
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
def version() -> None:
    """Print the version."""
    typer.echo(affdiv_zoo.__version__)

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
    for name in affdiv_zoo.list_models(pattern, pretrained=pretrained):
        typer.echo(name)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(affdiv_zoo.__version__)

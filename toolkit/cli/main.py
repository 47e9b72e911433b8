"""`dmt`: the command line's entry. One line per verb. A verb's module is imported only
when the verb runs, so `dmt --help` and `dmt check` start at once.
"""

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from toolkit import __version__
from toolkit.errors import (
    EXIT_DONE,
    EXIT_USER_ERROR,
    BackendUnavailable,
    DmtError,
    RecipeError,
)
from toolkit.removed import removed_command
from toolkit.text.terminal import tell


class Verb(NamedTuple):
    """The text of a verb in `dmt --help`, and its implementation."""

    help: str
    panel: str = ""
    """Heading in `dmt --help`. Empty: the verb is hidden."""
    target: str = ""
    """`module:name` of a function with typer's annotations, or of a typer.Typer. Empty: the
    function of the verb's name in its module."""


VERBS: dict[str, Verb] = {
    "init": Verb("Write a recipe for a model and a cluster.", "Plan"),
    "recipes": Verb("List the shipped recipes.", "Plan"),
    "check": Verb("Check recipes and report every mistake.", "Plan"),
    "plan": Verb("Choose a layout for a recipe and explain it.", "Plan"),
    "rehearse": Verb("Train a small copy in every layout and compare.", "Plan"),
    "launch": Verb("Train a recipe: here, on several machines, or as a job.", "Train"),
    "tune": Verb(
        "Choose settings by trials on this machine.",
        "Train",
        "toolkit.extras.tune.command:tune",
    ),
    "doctor": Verb("Check this machine, or measure its speed.", "Train"),
    "report": Verb("Show what a run did, or what differs between runs.", "Look"),
    "runs": Verb("List runs: state, step, loss, age.", "Look"),
    "data": Verb("Prepare training data, and show it.", "Files", "toolkit.cli.data:app"),
    "checkpoint": Verb(
        "List, verify, export and import checkpoints.", "Files", "toolkit.cli.checkpoint:app"
    ),
    "render": Verb("Print a backend's configuration.", "Files"),
    "schema": Verb("Print the recipe's JSON Schema, for editors."),
}
"""Every verb of `dmt`, in the order of `--help`."""


_USAGE_ERROR: type[Exception] = typer.BadParameter.mro()[1]
"""Base of typer's errors about a command line, which typer exports only by its subclasses."""


class _LazyVerb(TyperCommand):
    """Placeholder of a verb in help texts. Becomes the real command when it is run."""

    def __init__(self, name: str, verb: Verb) -> None:
        super().__init__(
            name, help=verb.help, hidden=not verb.panel, rich_help_panel=verb.panel
        )
        self._verb = verb

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        return self._load().make_context(*args, **kwargs)

    def _load(self) -> Any:
        from toolkit.registry import load

        loaded = load(self._verb.target or f"toolkit.cli.{self.name}:{self.name}")
        if isinstance(loaded, typer.Typer):
            return get_command(loaded)
        app = typer.Typer(add_completion=False, rich_markup_mode="markdown")
        app.command(self.name)(loaded)
        return get_command(app)


class _Verbs(TyperGroup):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands.update({name: _LazyVerb(name, verb) for name, verb in VERBS.items()})

    def invoke(self, ctx: Any) -> Any:
        """Run the verb of a command line, which is `ctx.obj`. Raises DmtError for a removed
        command or option."""
        try:
            return super().invoke(ctx)
        except _USAGE_ERROR:
            if removed := removed_command(ctx.obj):
                raise DmtError(f"`dmt {removed[0]}` was removed", fix=removed[1]) from None
            raise


app = typer.Typer(
    cls=_Verbs,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dmt {__version__}")
        raise typer.Exit


@app.callback()
def _dmt(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version."
        ),
    ] = False,
) -> None:
    """One recipe, any layout, the same loss: DeepSpeed and Megatron from one YAML.

    Example: `dmt check recipes/tiny/*.yaml`
    """


def _require_utf8() -> None:
    """Raise BackendUnavailable where Python cannot name every file, nor print every text."""
    if (found := sys.getfilesystemencoding()) != "utf-8":
        raise BackendUnavailable(
            f"Python's encoding of file names is {found} here, by PYTHONUTF8=0 or the locale",
            fix="export PYTHONUTF8=1",
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `dmt` and return its exit code: 0, 2, 3, 4 or 75 (see `toolkit.errors`).

    `arguments`: the command line without the program's name. Default `sys.argv[1:]`.
    A DmtError becomes a message on standard error. Ctrl-C becomes 130.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        _require_utf8()
        app(args=arguments, prog_name="dmt", obj=arguments)
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else EXIT_DONE
    except RecipeError as error:
        from toolkit.cli.output import Console, problem_list  # rich, which good news need not

        Console(stderr=True).print(problem_list("dmt", error.problems), soft_wrap=True)
        return error.exit_code
    except DmtError as error:
        tell(f"dmt: {error}")
        return error.exit_code
    except OSError as error:
        # The user's paths: too long, a loop of links, not permitted. Others are ours.
        if error.filename is None or error.strerror is None:
            raise
        tell(f"dmt: {os.fsdecode(error.filename)}: {error.strerror}")
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return 130
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())

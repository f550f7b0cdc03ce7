"""The options of each backend in the help of a command that takes `-o NAME=VALUE`."""

from typing import Any

from typer.core import TyperCommand


class BackendOptionsCommand(TyperCommand):
    """List the options of each backend in the help of a command; they are imported only for that."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        if any(param.name == "backend_option" for param in self.params):
            from phalanx.jobs.backends.options import OPTION_CLASSES, list_option_help

            for backend in OPTION_CLASSES:
                with formatter.section(f"Backend options with --on {backend}"):
                    formatter.write_dl(
                        (f"-o {each.name}={each.value_type}", f"{each.help}{f'  [{each.note}]' if each.note else ''}")
                        for each in list_option_help(backend)
                    )
        super().format_epilog(ctx, formatter)

"""What the site does beyond Markdown: pictures that follow the colors of the page, and the commands' own help."""

from __future__ import annotations

import itertools
import re
import textwrap
from pathlib import Path
from typing import Any

_IMAGE = re.compile(
    r'<p>\s*<img alt="(?P<alt>[^"]*)" src="(?P<source>[^"]*diagrams/(?P<name>[\w-]+)\.svg)"[^>]*>\s*</p>'
)
_ROLE = re.compile(r":(?:attr|class|func|meth|mod):<code>~?")
_COLONS = re.compile(r"::</p>")
_COMMANDS = "<!-- commands -->"
_RESERVED = "<!-- reserved names -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the help of every command, and the list of reserved names, where a page asks for it."""
    if _RESERVED in markdown:
        markdown = markdown.replace(_RESERVED, _reserved())
    return markdown.replace(_COMMANDS, _commands()) if _COMMANDS in markdown else markdown


def on_page_content(html: str, config: Any, **_: Any) -> str:
    """Put the diagrams into the page itself: as files they would not see whether it is light or dark.

    Of docstrings, marks of reStructuredText go, which Markdown does not know.
    """
    folder = Path(config["docs_dir"]) / "assets" / "diagrams"
    html = _COLONS.sub(":</p>", _ROLE.sub(r"<code>", html))
    return _IMAGE.sub(lambda found: _inlined(folder / f"{found['name']}.svg", found["alt"]), html)


def _inlined(path: Path, alt: str) -> str:
    """The picture without its own colors; the page's are in assets/site.css."""
    drawing = re.sub(r"<style>.*?</style>", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    drawing = re.sub(r"\n\s*", "\n", drawing).strip()
    return f'<figure class="diagram" role="img" aria-label="{alt}">{drawing}</figure>'


def _reserved() -> str:
    from phalanx.declare.classes import RESERVED

    return ", ".join(f"`{name}`" for name in sorted(RESERVED))


def _commands() -> str:
    """A section for each command of `phalanx`, from what typer knows of it."""
    import click
    import typer

    from phalanx.cli.main import app

    parent = click.Context(click.Command("phalanx"), info_name="phalanx")
    commands: dict[str, Any] = typer.main.get_command(app).commands  # pyright: ignore[reportAttributeAccessIssue]
    return "\n\n".join(_section(command, name, parent) for name, command in commands.items())


def _section(command: Any, name: str, parent: Any) -> str:
    import click

    context = click.Context(command, info_name=name, parent=parent)
    rows = [
        record for parameter in command.get_params(context) if (record := parameter.get_help_record(context))
    ]
    table = [
        "| Option | |",
        "|---|---|",
        *(f"| `{_cell(option)}` | {_cell(text)} |" for option, text in rows),
    ]
    usage = " ".join(command.collect_usage_pieces(context))
    return "\n\n".join(
        [
            f"## phalanx {name}",
            _text(command.help or ""),
            f"```text\nphalanx {name} {usage}\n```",
            "\n".join(table),
        ]
    )


def _text(help_: str) -> str:
    """The paragraphs of a help text; those that stand in from the edge become one block of commands."""
    paragraphs = [
        part for part in re.split(r"\n\s*\n", help_.replace("\b", "").replace("\f", "")) if part.strip()
    ]
    parts: list[str] = []
    for indented, run in itertools.groupby(paragraphs, key=lambda part: part.startswith("  ")):
        texts = [textwrap.dedent(part).strip("\n") for part in run]
        parts += ["\n".join(["```sh", *texts, "```"])] if indented else texts
    return "\n\n".join(parts)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")

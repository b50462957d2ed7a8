"""`workhorse recipe`: the keys of a recipe, all of them or one."""

import re
import textwrap
from typing import TYPE_CHECKING

import click

from workhorse.cli.loading import json_option
from workhorse.cli.output import print_result

if TYPE_CHECKING:
    from workhorse.train.recipe.reference import Key, Section

REFERENCE = re.compile(r"@([\w.]*)")
"""How a type refers to another section."""
WIDTH = 96
INTRODUCTION = """\
# Every key of a recipe

Written by `make reference` from the configs themselves; the tests build every example.
`workhorse recipe KEY` shows a part of it in the terminal: `workhorse recipe train.schedule`.

A recipe is a YAML file, and a section below tells what stands at one place of it. NAME stands for a
name of your choice. Any key can be set on the command line as well: `train.steps=500
model.blocks.main.attention.window=128`. Where a description says None, write `null`. A default of
`{}` stands for the defaults of the section that is linked. Where a place has several kinds, `kind`
chooses among them. A setting such as `model.blocks.main.kind=parallel` keeps what the file sets and
both kinds have, and tells what it leaves out; Muon's learning rate and weight decay stay Muon's. A
whole mapping begins afresh: `'train.optimizer={kind: adamw, learning_rate: 6e-4}'`. A kind whose
other keys keep their defaults can be written as a word: `position: rope` is `position: {kind:
rope}`. `model.blocks.NAME=null` removes a block. The last column says what a resumed run does with
another value; in a table without that column, every change needs a new run.
"""


@click.command("recipe")
@click.argument("key", required=False)
@click.option("--markdown", is_flag=True, help="As a page with links: docs/recipe.md.")
@json_option
def command(key: str | None, markdown: bool, as_json: bool) -> None:
    """Describe the keys of a recipe: KEY, such as train.schedule or model.blocks.main, or all.

    Each key is listed with its type, its default and its meaning.
    """
    from workhorse.train.recipe.reference import sections, sections_at

    found = list(sections()) if key is None else sections_at(key)
    if markdown:
        text = INTRODUCTION + "".join(_page(section) for section in found)
    else:
        text = "\n\n".join(_plain(section) for section in found)
    result = {"sections": [section.to_dict() for section in found]}
    print_result(result, as_json, text=text.rstrip())


def _plain(section: "Section") -> str:
    """A section for the terminal."""
    lines = [section.title or "a recipe", *_plain_keys(section.shared)]
    for kind in section.kinds:
        if kind.name:
            lines += ["", f"  kind: {kind.name}"]
        lines += _wrapped(kind.summary, 4) if not section.title or kind.name else []
        lines += _plain_keys(kind.keys)
        for example in kind.examples:
            lines += ["    For example:", textwrap.indent(example.rstrip(), " " * 8)]
    return "\n".join(lines)


def _plain_keys(keys: "tuple[Key, ...]") -> list[str]:
    lines = []
    for key in keys:
        default = "must be given" if key.default is None else f"default {key.default}"
        kind = REFERENCE.sub(r"see \1", key.type).replace("`", "")
        lines += [f"    {key.name}: {kind}; {default}", *_wrapped(key.meaning, 8)]
        if not key.needs_new_run:
            lines.append(f"        On --resume it {key.on_resume}.")
    return lines


def _wrapped(text: str, indent: int) -> list[str]:
    space = " " * indent
    return textwrap.wrap(
        " ".join(text.split()), WIDTH, initial_indent=space, subsequent_indent=space
    )


def _page(section: "Section") -> str:
    """A section in Markdown."""
    heading = f"`{section.title}`" if section.title else "The recipe itself"
    parts = [f"\n## {heading}\n"]
    if section.other_places:
        parts.append(f"\nAlso at {_other_places(section)}.\n")
    alone = len(section.kinds) == 1 and not section.kinds[0].name
    parts.append(_table(section.shared))
    for kind in section.kinds:
        parts.append(
            f"\n{kind.summary}\n" if alone else f"\n**`kind: {kind.name}`** {kind.summary}\n"
        )
        parts.append(_table(kind.keys))
        parts += [f"\n```yaml\n{_place(section)}{example}```\n" for example in kind.examples]
    return "".join(parts)


def _place(section: "Section") -> str:
    return f"# {section.title}\n" if section.title else ""


def _other_places(section: "Section") -> str:
    everything = [kind.name for kind in section.kinds]
    listed = []
    for place, kinds in section.other_places.items():
        only = "" if kinds == everything else f" ({', '.join(f'`{kind}`' for kind in kinds)})"
        listed.append(f"`{place}`{only}")
    return ", ".join(listed)


def _table(keys: "tuple[Key, ...]") -> str:
    if not keys:
        return ""
    telling = not all(key.needs_new_run for key in keys)
    heading = ["key", "holds", "default", "meaning", *(["on `--resume`"] if telling else [])]
    rows = [heading, ["---"] * len(heading)]
    for key in keys:
        holds = REFERENCE.sub(_link, key.type)
        default = "required" if key.default is None else f"`{key.default}`"
        cells = [f"`{key.name}`", holds, default, _cell(key.meaning)]
        rows.append([*cells, *([key.on_resume] if telling else [])])
    return "\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _link(found: re.Match[str]) -> str:
    title = found[1]
    return f"[{title}](#{title.replace('.', '').lower()})"

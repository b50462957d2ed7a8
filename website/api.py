"""Pages about the public names of the library, made from signatures and docstrings with griffe.

Public are the names in `__all__` of the packages of `workhorse`, and the modules that the pages of
`docs/` name. The source is read and not imported, so PyTorch is not needed.
"""

import re
from collections.abc import Iterator
from textwrap import dedent

import griffe

from website.walk import SOURCE, functions

GUIDES = "".join(
    path.read_text("utf-8") for path in sorted((SOURCE.parent.parent / "docs").glob("*.md"))
)
HIDDEN = {"__init__", "model_post_init", "reset_parameters", "extra_repr"}
"""Methods that are not listed: the signature of a class contains its constructor."""
Public = griffe.Class | griffe.Function


def pages() -> dict[str, str]:
    """The pages, by path: one for each package, with its modules that are public."""
    root = griffe.load(
        "workhorse",
        search_paths=[SOURCE.parent],
        docstring_parser="google",
        docstring_options={"returns_multiple_items": False, "returns_named_value": False},
        allow_inspection=False,
    )
    packages = [root, *root.modules.values()]
    modules = {package.path: [package] for package in packages if package.exports}
    for path in sorted(set(re.findall(r"\bworkhorse\.([\w.]+)(?: import|\.\w)", GUIDES))):
        of_package = modules.setdefault(f"workhorse.{path.partition('.')[0]}", [])
        of_package += [root[path]] if root[path] not in of_package else []
    shown = {package: list(public(found)) for package, found in modules.items()}
    places = {
        one.path: f"{package}.md#{one.name.lower()}"
        for package, ones in shown.items()
        for one in ones
    }
    return {
        f"api/{package}.md": page(package, root, ones, places) for package, ones in shown.items()
    }


def page(package: str, root: griffe.Module, ones: list[Public], places: dict[str, str]) -> str:
    """The page of a package; what other packages also export is on their pages."""
    module = root if package == root.path else root[package.removeprefix(f"{root.path}.")]
    lines = [f"# {package}", *sections(module.docstring)]
    for one in ones:
        if places[one.path].startswith(f"{package}.md"):
            lines += described(one, places)
    return "\n\n".join(lines) + "\n"


def public(modules: list[griffe.Module]) -> Iterator[Public]:
    """The public classes and functions of modules, each once."""
    found: dict[str, Public] = {}
    for module in modules:
        own = [name for name, member in module.members.items() if not member.is_alias]
        for name in map(str, module.exports or own):
            one = module.members[name]
            one = one.final_target if isinstance(one, griffe.Alias) else one
            if isinstance(one, griffe.Module):  # hides its function of the same name
                one = one.members.get(name)
            if isinstance(one, Public) and one.is_public:
                found[one.path] = one
    return iter(found.values())


def described(one: Public, places: dict[str, str]) -> Iterator[str]:
    """A class or function: its signature, its docstring, its fields and methods."""
    yield f"## `{one.name}`"
    code = signature(one)
    yield f"```python\n{code}\n```"
    yield from sections(one.docstring)
    if fields := list(fields_of(one)):
        yield "**Fields**"
        yield "\n".join(
            f"- `{declaration}`" + (f": {text}" if text else "") for declaration, text in fields
        )
    names = {path.rpartition(".")[2]: place for path, place in places.items()}
    names = {name: place for name, place in names.items() if name[0].isupper()}
    types = " ".join([code, *(declaration for declaration, _ in fields)])
    used = names.keys() & set(re.findall(r"\w+", types)) - {one.name}
    if used:
        yield "See " + ", ".join(f"[`{name}`]({names[name]})" for name in sorted(used)) + "."
    path = one.filepath.relative_to(SOURCE)
    yield f"Source: [{path}](../../src/workhorse/{path}#L{one.lineno})"
    for member in one.members.values():
        if isinstance(member, griffe.Function) and member.is_public and member.name not in HIDDEN:
            yield f"### `{one.name}.{member.name}`"
            yield f"```python\n{signature(member)}\n```"
            yield from sections(member.docstring)


def signature(one: Public) -> str:
    """The lines of a function up to its docstring, or of a class with its constructor.

    Dataclasses and NamedTuples have no constructor in the source; theirs is made from their fields.
    """
    path = one.path.removeprefix(f"{one.module.path}.")
    file = one.filepath.relative_to(SOURCE).as_posix()
    if isinstance(one, griffe.Function):
        return dedent(functions(file)[path].signature).removesuffix(":")
    bases = ", ".join(str(base) for base in one.bases)
    code = f"class {one.name}({bases})" if bases else f"class {one.name}"
    if own := functions(file).get(f"{path}.__init__"):
        return f"{code}:\n{own.signature.removesuffix(':')}"
    if "dataclass" in one.labels:
        parameters = list(one.all_members["__init__"].parameters)[1:]
    elif bases == "NamedTuple":
        fields = (each for each in one.attributes.values() if "property" not in each.labels)
        parameters = list(fields)
    else:
        return code
    lines = [f"        {field(parameter)},\n" for parameter in parameters]
    keyword = [
        getattr(one, "kind", None) is griffe.ParameterKind.keyword_only for one in parameters
    ]
    if any(keyword):
        lines.insert(keyword.index(True), "        *,\n")
    return f"{code}:\n    def __init__(\n        self,\n{''.join(lines)}    )"


def fields_of(one: Public) -> Iterator[tuple[str, str]]:
    """The declaration and the description of each public field of a class.

    Attributes that only methods assign are fields if they have a description.
    """
    if not isinstance(one, griffe.Class):
        return
    described = {
        item.name: flat(item.description)
        for owner in [*reversed(one.mro()), one]
        for section in (owner.docstring.parsed if owner.docstring else ())
        if section.kind is griffe.DocstringSectionKind.attributes
        for item in section.value
    }
    for member in one.all_members.values():
        if isinstance(member, griffe.Attribute) and member.is_public:
            text = flat(member.docstring.value) if member.docstring else ""
            text = text or described.get(member.name, "")
            in_method = member.lines[0].lstrip().startswith("self.")
            if text or (member.annotation and not in_method):
                yield member.name if in_method else field(member), text


def field(one: griffe.Attribute | griffe.Parameter) -> str:
    """The declaration of a field or parameter, with the default that `field` or `Field` gives."""
    value = one.value if isinstance(one, griffe.Attribute) else one.default
    if isinstance(value, griffe.ExprCall) and str(value.function) in ("field", "Field"):
        given = {
            one.name: one.value for one in value.arguments if isinstance(one, griffe.ExprKeyword)
        }
        factory = given.get("default_factory")
        value = f"{factory}()" if factory else given.get("default")
    declaration = f"{one.name}: {one.annotation}" if one.annotation else one.name
    return declaration if value in (None, "...") else f"{declaration} = {value}"


def sections(docstring: griffe.Docstring | None) -> Iterator[str]:
    """A docstring as Markdown: its text, and lists of arguments, results and errors."""
    for section in docstring.parsed if docstring else ():
        if section.kind is griffe.DocstringSectionKind.attributes:
            continue  # the fields have their text
        if section.kind.value == "text":
            yield section.value
            continue
        yield f"**{section.kind.value.title()}**"
        if section.kind.value in ("returns", "yields"):
            yield from (item.description for item in section.value)
        else:
            yield "\n".join(
                f"- `{getattr(item, 'name', '') or item.annotation}`: {flat(item.description)}"
                for item in section.value
            )


def flat(text: str) -> str:
    """The text in one line."""
    return " ".join(text.split())

"""Malicious tokenizers and chat templates."""

from tests.campaigns.hostile.directories import (
    Case,
    content,
    directory,
    link,
    marker,
    pipe,
    remove,
    settings,
    several,
    sparse,
    template,
    tokenizer,
)

SETTINGS, TOKENIZER = "tokenizer_config.json", "tokenizer.json"


def _splitting(pattern):
    """A tokenizer that splits text by a regular expression."""
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    steps = [split | {"invert": False}, byte_level | {"trim_offsets": True}]
    sequence = {"type": "Sequence", "pretokenizers": steps}
    return tokenizer(lambda it: it.update(pre_tokenizer=sequence))


TOKENIZERS = {
    "tokenizer is a pipe": Case(pipe(TOKENIZER), None),
    "tokenizer is a folder": Case(directory(TOKENIZER), None),
    "tokenizer is outside": Case(link(TOKENIZER, "../outside/tokenizer.json"), "link out of"),
    "tokenizer is a device": Case(link(TOKENIZER, "/dev/zero"), None),
    "tokenizer of a gigabyte": Case(sparse(TOKENIZER, 2**30), TOKENIZER),
    "tokenizer is a pickle": Case(content(TOKENIZER, b"cos\nsystem\n(S'true'\ntR."), TOKENIZER),
    "tokenizer with 100,000 nested lists": Case(
        content(TOKENIZER, '{"a": ' + "[" * 100_000), TOKENIZER
    ),
    "tokenizer of many lists": Case(
        content(TOKENIZER, '{"a": [' + "[]," * 6_000_000 + "[]]}"), TOKENIZER
    ),
    "a token with id 2^31": Case(
        tokenizer(lambda it: it["model"]["vocab"].update(evil=2**31)), None
    ),
    "an added token with id 2^32 - 1": Case(
        tokenizer(lambda it: it["added_tokens"][0].update(id=2**32 - 1)), None
    ),
    "a tokenizer of another model": Case(
        tokenizer(lambda it: it["model"]["vocab"].update({f"x{i}": 300 + i for i in range(999)})),
        None,
    ),
    "token ids beyond the vocabulary": Case(
        tokenizer(
            lambda it: it["model"].update(
                vocab={k: v + 999 for k, v in it["model"]["vocab"].items()}
            )
        ),
        "",
    ),
    "a pattern of exponential time": Case(_splitting("(" * 20 + "[a-z]" + ")*" * 20 + "!"), None),
    "a pattern with nested repetition in a lookahead": Case(_splitting("(?=(?:(?:.*)*)*!)"), None),
    "an unknown kind of tokenizer": Case(
        tokenizer(lambda it: it["model"].update(type="Evil")), TOKENIZER
    ),
    "merges of missing tokens": Case(
        tokenizer(lambda it: it["model"].update(merges=["evil evil"])), TOKENIZER
    ),
    "a pattern of many brackets": Case(_splitting("(" * 5000 + "a" + ")*" * 5000), None),
    "settings with 100,000 nested lists": Case(content(SETTINGS, "[" * 100_000), SETTINGS),
    "settings of a gigabyte": Case(sparse(SETTINGS, 2**30), SETTINGS),
    "settings are outside": Case(link(SETTINGS, "../outside/tokenizer_config.json"), "link out of"),
    "settings are a pipe": Case(pipe(SETTINGS), None),
    "a SentencePiece file of arbitrary bytes": Case(
        several(remove(TOKENIZER), content("tokenizer.model", bytes(range(256)) * 999)),
        "tokenizer.model",
    ),
    "sentencepiece is outside": Case(
        several(remove(TOKENIZER), link("tokenizer.model", "../outside/blob")), "link out of"
    ),
}


def _shell(folder):
    """Write a template that creates the marker if Python attributes can be reached."""
    path = str(marker(folder))
    escape = f"{{{{ cycler.__init__.__globals__.os.system('touch {path}') }}}}"
    template(escape)(folder)


TEMPLATES = {
    "template runs a command": Case(_shell, "template"),
    "template finds classes": Case(
        template("{{ ().__class__.__mro__[1].__subclasses__() }}"), "template"
    ),
    "template finds globals": Case(template("{{ lipsum.__globals__ }}"), "template"),
    "template formats attributes": Case(
        template("{{ '{0.__class__.__init__}'.format(messages) }}"), None
    ),
    "template reads attributes by name": Case(
        template("{{ messages | attr('__class__') | attr('__mro__') }}"), None
    ),
    "template includes a file": Case(
        template("{% include '../outside/config.json' %}"), "template"
    ),
    "template imports a file": Case(template("{% import '/etc/passwd' as x %}{{ x }}"), "template"),
    "template never ends": Case(
        template("{% for i in range(1000000000) %}{% endfor %}"), "template"
    ),
    "template loops in loops": Case(
        template("{% for i in range(9999) %}" * 4 + "x" + "{% endfor %}" * 4), "template"
    ),
    "template of a gigabyte": Case(template("{{ 'a' * 1000000000 }}"), "template"),
    "template doubles a string": Case(
        template(
            "{% set ns = namespace(x='a') %}{% for i in range(99) %}"
            "{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"
        ),
        "template",
    ),
    "template doubles a list": Case(
        template(
            "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}"
            "{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x | length }}"
        ),
        "template",
    ),
    "template pads": Case(template("{{ '%1000000000d' % 1 }}"), "template"),
    "template centres": Case(template("{{ 'a' | center(1000000000) }}"), "template"),
    "template raises to a power": Case(template("{{ (10 ** (10 ** 10)) | string }}"), "template"),
    "template calls itself": Case(
        template("{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}"), "template"
    ),
    "template nests": Case(template("{{ " + "(" * 20_000 + ")" * 20_000 + " }}"), "template"),
    "template of a megabyte": Case(template("{{ messages }}" * 80_000), "template"),
    "template changes the messages": Case(
        template("{% for m in messages %}{{ messages.append(m) }}{% endfor %}"), "template"
    ),
    "template is a number": Case(settings(chat_template=5), None),
    "templates are many": Case(
        settings(chat_template=[{"name": f"t{i}", "template": "x"} for i in range(20_000)]), None
    ),
    "template file is outside": Case(
        link("chat_template.jinja", "../outside/config.json"), "link out of"
    ),
    "template file is a pipe": Case(pipe("chat_template.jinja"), None),
}
CASES: dict[str, Case] = TOKENIZERS | TEMPLATES

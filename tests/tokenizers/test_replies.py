"""The format of replies is learned from templates, and replies are read back from any pieces."""

import json
import random
import re
from os.path import commonprefix
from pathlib import Path
from typing import Any

import pytest

from workhorse.tokenizers import ChatTemplate
from workhorse.tokenizers.chat.reply_format import HARMONY, CallFormat, ReplyFormat, Tagged
from workhorse.tokenizers.chat.reply_learned import after_prompt, reply_format
from workhorse.tokenizers.chat.reply_reader import ReplyReader

TEMPLATES = Path(__file__).parent / "templates"
WITH_CALLS = ("llama_3", "mistral", "qwen_3", "tagged", "quoted", "sections")
ASK = {"role": "user", "content": "q"}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "a city"},
        "days": {"type": "integer", "description": "a number"},
        "flags": {"type": "object", "description": "flags"},
        "list": {"type": "array", "items": {"type": "string"}, "description": "names"},
    },
    "required": [],
}
NAMES = ("get_weather", "do-it.now")
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": SCHEMA}}
    for name in NAMES
]
ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"city": "Paris"},
    {"city": '  indented {"a": [\n  "code()", é\n', "days": -3},
    {"days": 7, "flags": {"a": [1, True, {"b": None}], "c": "x"}, "list": ["x, y", "}"]},
]


def template(name: str) -> ChatTemplate:
    source = (TEMPLATES / f"{name}.jinja").read_text()
    return ChatTemplate(source, names={"bos_token": "<s>", "eos_token": "</s>"})


def learned(source: ChatTemplate) -> ReplyFormat:
    return after_prompt(reply_format(source), source)


def written(
    source: ChatTemplate, format: ReplyFormat, content: str, calls: list[tuple[str, Any]]
) -> str:
    """Return a reply as its template writes it, without the end of the turn."""
    assert format.calls is not None

    def message(reply: dict[str, Any]) -> str:
        return source.render([ASK, {"role": "assistant", **reply}], False, tools=TOOLS)

    reads_mappings = format.calls.arguments == "mapping"
    given = [
        {
            "id": f"{number:09}",
            "type": "function",
            "function": {
                "name": one,
                "arguments": values if reads_mappings else json.dumps(values, ensure_ascii=False),
            },
        }
        for number, (one, values) in enumerate(calls)
    ]
    before, _, after = message({"content": "CONTENT"}).partition("CONTENT")
    text = message({"content": content, "tool_calls": given} if given else {"content": content})
    same = commonprefix([before, text])  # noqa: RUF071 - strings, not paths
    start = len(re.sub(r"<[^<>]*\Z", "", same))  # a tag is not cut
    return text[start:].removesuffix(after)


def in_pieces(text: str, choose: random.Random) -> list[str]:
    cuts = sorted(choose.sample(range(len(text) + 1), min(len(text), choose.randrange(1, 40))))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def read(
    format: ReplyFormat, parts: list[str], *, only_calls: bool = False
) -> tuple[str, str, list[tuple[str, Any]]]:
    """Return the text, the reasoning and the calls of a reply that arrives in these parts."""
    reader = ReplyReader(format, dict.fromkeys(NAMES, SCHEMA), only_calls=only_calls)
    pieces = [
        piece
        for number, part in enumerate(parts)
        for piece in reader.read(part, ended=number == len(parts) - 1)
    ]
    texts = {
        kind: "".join(piece.text for piece in pieces if piece.kind == kind)
        for kind in ("text", "reasoning")
    }
    calls = [(one.call.name, json.loads(one.call.arguments)) for one in pieces if one.call]
    return texts["text"], texts["reasoning"], calls


@pytest.mark.parametrize("name", WITH_CALLS)
def test_calls_are_read_as_the_template_writes_them(name: str) -> None:
    choose = random.Random(0)
    format = learned(template(name))
    assert format.calls is not None
    for _ in range(30):
        count = choose.randint(0, 3) if format.calls.between else choose.randint(0, 1)
        calls = [(choose.choice(NAMES), choose.choice(ARGUMENTS)) for _ in range(count)]
        content = choose.choice(["", "Let me see: 1 < 2."])
        if name in ("llama_3", "mistral") and calls:  # these omit the content of calls
            content = ""
        reply = written(template(name), format, content, calls)
        thought = ""
        if format.reasoning is not None and choose.random() < 0.5:
            thought = "I <think> so."
            begin = "" if format.begins_in_reasoning else format.reasoning[0]
            reply = f"{begin}\n{thought}\n{format.reasoning[1]}\n\n{reply}"
        elif format.begins_in_reasoning and format.reasoning is not None:
            reply = f"{format.reasoning[1]}\n\n{reply}"
        assert read(format, in_pieces(reply, choose)) == (content, thought, calls)


@pytest.mark.parametrize("name", WITH_CALLS)
def test_a_required_call_that_is_cut_leaves_no_text(name: str) -> None:
    format = learned(template(name))
    begun = format.reasoning[1] if format.reasoning and format.begins_in_reasoning else ""
    reply = begun + written(template(name), format, "", [(NAMES[0], ARGUMENTS[0])])
    for end in range(len(begun), len(reply)):
        assert not read(format, [reply[:end]], only_calls=True)[0]


@pytest.mark.parametrize("name", ["chatml", "gemma", "llama_2", "phi", "zephyr", "functions"])
def test_templates_without_calls_have_no_format(name: str) -> None:
    assert learned(template(name)).calls is None


@pytest.mark.parametrize(
    "reply",
    [
        '<tool_call>\n{"name": "f", "arguments": {"a": 1',
        '<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call>',
        "<tool_call>{}</tool_call> and more",
        "text <tool_cal",
        "1 < 2 <tool_call",
        " two  spaces \n",
    ],
)
def test_what_is_not_a_call_is_text(reply: str) -> None:
    format = ReplyFormat(learned(template("qwen_3")).calls)
    for seed in range(5):
        assert read(format, in_pieces(reply, random.Random(seed))) == (reply, "", [])


TAGGED = "</think>\n\n<tool_call>\n<function=get_weather>\n<parameter=flags>\n"
END = "\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    "value", ["...", "{1}", "b'x'", "1j", "{(1, 2): 3}", "0x" + 5000 * "f", "NaN", '"\\ud800"']
)
def test_values_that_json_does_not_have_are_strings(value: str) -> None:
    format = learned(template("tagged"))
    reply = TAGGED + value + END
    assert read(format, [reply]) == ("", "", [("get_weather", {"flags": value})])


def test_arguments_that_are_cut_are_no_call() -> None:
    quoted = '<|tool_call>call:rm{path:<|"|>/tmp/x'
    assert read(learned(template("quoted")), [quoted]) == (quoted, "", [])
    text, _, calls = read(learned(template("tagged")), [TAGGED + "{1"])
    assert (text, calls) == (TAGGED.removeprefix("</think>\n\n") + "{1", [])
    for number in ("NaN", "1e999"):
        reply = f'<tool_call>\n{{"name": "f", "arguments": {{"a": {number}}}}}\n</tool_call>'
        assert read(learned(template("qwen_3")), [reply]) == (reply, "", [])


def test_a_format_without_tags_has_calls_only_at_the_beginning() -> None:
    format = learned(template("llama_3"))
    call = '{"name": "f", "parameters": {"a": 1}}'
    for seed in range(20):
        parts = in_pieces(f"Sure: {call}", random.Random(seed))
        assert read(format, parts) == (f"Sure: {call}", "", [])
    assert read(format, [call]) == ("", "", [("f", {"a": 1})])


def test_long_arguments_are_read_in_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = 0
    original = Tagged.end_of_nested

    def counted(self: Tagged, text: str, start: int) -> int:
        nonlocal searched
        end = original(self, text, start)
        searched += end - start
        return end

    monkeypatch.setattr(Tagged, "end_of_nested", counted)
    value = '["' + 2000 * r"\n" + '", ' + ", ".join(map(str, range(2000))) + "]"
    reply = TAGGED + value + END
    ((_, arguments),) = read(learned(template("tagged")), [*reply])[2]
    assert arguments["flags"][-1] == 1999
    assert searched <= 3 * len(reply)


@pytest.mark.parametrize(
    "written",
    [
        "{{ '{\"a\":' * 100000 }}{{ call.function.arguments | tojson }}",
        "{{ '<x y>' * 100000 }}{{ call.function.arguments | tojson }}",
        "{{ ('0' ~ call.id) * 12 }}{{ call.function.arguments | tojson }}",
        "{% for k, v in call.function.arguments | items %}<{{ k }}>...</{{ k }}>{% endfor %}",
    ],
)
def test_templates_of_an_enemy_have_no_format(written: str) -> None:
    source = (
        "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
        "{% for call in m.tool_calls or [] %}<c>{{ call.function.name }}>" + written + "</c>"
        "{% endfor %}{% endfor %}"
    )
    assert learned(ChatTemplate(source)).calls is None


def test_the_end_of_calls_may_be_missing() -> None:
    format = learned(template("qwen_3"))
    call = '<tool_call>\n{"name": "f", "arguments": {"a": {}}'
    for end in ("", "}", "}\n</tool_"):
        assert read(format, [call + end]) == ("", "", [("f", {"a": {}})])
    whole = call + "}\n</tool_call>"
    assert read(format, [f"a\n{whole}\n b"]) == ("ab", "", [("f", {"a": {}})])


def test_the_format_of_gpt_oss() -> None:
    start, final = "<|start|>assistant", "<|channel|>final<|message|>"
    thought = "<|channel|>analysis<|message|>Hm.<|end|>"
    call = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
    for seed in range(20):
        choose = random.Random(seed)
        cut = lambda text, choose=choose: read(HARMONY, in_pieces(text, choose))  # noqa: E731
        assert cut(final + "Hello") == ("Hello", "", [])
        assert cut(f"{thought}{start}{final}Hello") == ("Hello", "Hm.", [])
        assert cut(thought + start + call) == ("", "Hm.", [("f", {"a": 1})])
        assert cut(call) == ("", "", [("f", {"a": 1})])


def test_a_template_with_many_numbers_is_read_without_backtracking() -> None:
    """A pattern that tries each way to divide the digits would take years."""
    numbers = " 1 0" * 20
    format = CallFormat(begin=f"<call>{numbers} of ", after_name=" ", between="", end="")
    assert not format.patterns.begin.match("<call>" + "1" * 200)
    found = format.patterns.begin.match(f"<call>{numbers.replace('1', '23')}  of f ")
    assert found is not None
    assert found["name"] == "f"

"""The learned tokens of conversations, token by token, for the chat templates of many models."""

import re
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, trainers

from workhorse.errors import WorkhorseError
from workhorse.tokenizers import ChatTemplate, Tokenizer
from workhorse.tokenizers.chat.learned import encode_conversation

Message = dict[str, Any]

_TRL = find_spec("trl")
FOLDER = Path((_TRL and _TRL.origin) or "trl").parent / "chat_templates"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja") if "_training" not in path.stem)
needs_trl = pytest.mark.skipif(not NAMES, reason="trl is not installed")
SPECIAL = re.compile(
    r"<\|[^|<>{}\s]+\|>|<\uff5c[^<>{}\s]+\uff5c>|</?s>|<(?:start|end)_of_turn>|<\|?turn\|?>"
    r"|<\|?channel\|?>|\[/?INST\]|\[gMASK\]|<sop>|</?think>|</?tool_call>"
    r"|<\|?tool_(?:call|response)\|?>|<end_of_utterance>"
)
CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
ADD = {"name": "add", "arguments": {"a": 2, "b": 2}}
CALL = {"type": "function", "id": "call00001", "function": ADD}
CALLED: list[Message] = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "tool_call_id": "call00001", "content": "4"},
    {"role": "assistant", "content": "It is 4."},
]


def chat(*contents: str) -> list[Message]:
    """Return a conversation in which user and assistant take turns."""
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": content} for n, content in enumerate(contents)]


CHATS: dict[str, list[Message]] = {
    "one turn": chat("Hi", "Hello."),
    "three turns": chat("Q1", "A1", "Q2", "A2", "Q3", "A3"),
    "white space": chat("  Hi \n", "\n  Hello.\n\n", "\tx", " y "),
    "unicode": chat("Grüße 👩‍👩‍👧", "日本語 🙂", "é", "日"),
    "control words": chat("assistant", "user", "<|im_end|></s>[/INST]<|end|>", "assistant\nuser"),
    "equal": chat("same", "same", "same", "same"),
    "empty user": chat("Hi", "Hello.", "", "Again."),
    "reasoning": [
        *chat("Q1", "A1", "Q2"),
        {"role": "assistant", "reasoning_content": "R2", "content": "A2"},
    ],
}


def library(source: str) -> Library:
    """Return a tokenizer of bytes and of the control tokens in a template."""
    tokenizer = Library(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        special_tokens=sorted({*SPECIAL.findall(source), "<s>", "</s>"}),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([], trainer)
    return tokenizer


def marked(decode: Any, ids: list[int], weights: list[float]) -> str:
    """Decode tokens, with brackets around those that are learned."""
    text, run, inside = "", [], False
    for number, weight in [*zip(ids, weights, strict=True), (None, 0.0)]:
        if number is None or bool(weight) != inside:
            text += decode(run)
            run = []
        if bool(weight) != inside:
            inside = bool(weight)
            text += "⟦" if inside else "⟧"
        if number is not None:
            run.append(number)
    return text


def learned(source: str, messages: list[Message], **options: Any) -> str:
    tokenizer = Tokenizer(library(source).to_str(), {"bos": "<s>", "eos": "</s>"}, source)
    found = encode_conversation(ChatTemplate.of(tokenizer), tokenizer, messages, **options)
    return marked(tokenizer.decode, found.ids, found.weights)


def spans(text: str) -> list[str]:
    return re.findall("⟦(.*?)⟧", text, re.DOTALL)


def source_of(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def test_the_learned_tokens_are_the_answers_and_the_ends_of_their_turns() -> None:
    text = learned(CHATML, chat("Hi", " A1\n", "<|im_end|>", "A2"))
    assert text == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦ A1\n<|im_end|>⟧\n"
        "<|im_start|>user\n<|im_end|><|im_end|>\n<|im_start|>assistant\n⟦A2<|im_end|>⟧\n"
    )


def test_last_and_weights_choose_the_messages() -> None:
    messages = chat("Q1", "A1", "Q2", "A2")
    assert spans(learned(CHATML, messages, learn="last")) == ["A2<|im_end|>"]
    changed = [{**messages[0], "weight": 0.5}, {**messages[1], "train": False}, *messages[2:]]
    assert spans(learned(CHATML, changed)) == ["Q1<|im_end|>", "A2<|im_end|>"]


# Written by hand after reading each template: what is learned of `chat("Q1", "A1", "Q2", "A2")`.
BY_HAND = {
    "cohere": ("A1<|END_OF_TURN_TOKEN|>", "A2<|END_OF_TURN_TOKEN|>"),
    "deepseekv3": ("A1<｜end▁of▁sentence｜>", "A2<｜end▁of▁sentence｜>"),  # noqa: RUF001
    "gemma3": ("A1<end_of_turn>", "A2<end_of_turn>"),
    "gemma4": ("A1<turn|>", "A2<turn|>"),
    "glm4moe": ("\n<think></think>\nA1<|user|>", "\n<think></think>\nA2<|user|>"),
    "gptoss": ("<|channel|>final<|message|>A1<|end|>", "<|channel|>final<|message|>A2<|return|>"),
    "idefics3": (" A1<end_of_utterance>", " A2<end_of_utterance>"),
    "llama3_1": ("A1<|eot_id|>", "A2<|eot_id|>"),
    "llava_next": (" A1</s>", " A2</s>"),
    "muse_glimmer": (" to=user<|message|>A1<|eot|>", " to=user<|message|>A2<|eot|>"),
    "nemotron_3_nano": ("</think>A1<|im_end|>", "</think>A2<|im_end|>"),
    "phi3": ("A1<|end|>", "A2<|end|>\n</s>"),
    "qwen3": ("A1<|im_end|>", "<think>\n\n</think>\n\nA2<|im_end|>"),
    "qwen3_5_think": ("A1<|im_end|>", "\n</think>\n\nA2<|im_end|>"),
}
CALLS_BY_HAND = {
    "deepseekv3": (  # it reads arguments only as JSON
        "<|tool▁calls▁begin|><|tool▁call▁begin|>function<|tool▁sep|>add\n```json\n"
        '{"a": 2, "b": 2}\n```<|tool▁call▁end|><|tool▁calls▁end|><|end▁of▁sentence|>',
        "It is 4.<|end▁of▁sentence|>",
    ),
    "gemma4": ("<|tool_call>call:add{a:2,b:2}<tool_call|><|tool_response>", "It is 4.<turn|>"),
    "glm4moe": (
        "\n<think></think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n"
        "<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n</tool_call><|observation|>",
        "\n<think></think>\nIt is 4.<|user|>",
    ),
    "gptoss": (
        ' to=functions.add<|channel|>commentary json<|message|>{"a": 2, "b": 2}<|call|>',
        "<|channel|>final<|message|>It is 4.<|return|>",
    ),
    "llama3_1": ('{"name": "add", "parameters": {"a": 2, "b": 2}}<|eot_id|>', "It is 4.<|eot_id|>"),
}


@needs_trl
@pytest.mark.parametrize("name", BY_HAND)
def test_turns_of_published_templates(name: str) -> None:
    text = learned(source_of(name), chat("Q1", "A1", "Q2", "A2"))
    assert spans(text) == [*BY_HAND[name]]


@needs_trl
@pytest.mark.parametrize("name", CALLS_BY_HAND)
def test_tool_calls_of_published_templates(name: str) -> None:
    bar = "\uff5c" if name == "deepseekv3" else "|"
    written = [one.replace("|", bar) for one in CALLS_BY_HAND[name]]
    assert spans(learned(source_of(name), CALLED)) == written


MARKED = """{% for m in messages %}{{ '<|user|>' if m.role == 'user' else '<|assistant|>' }}
{{- m.content ~ '\n' }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
PLAIN = MARKED.replace("<|", "").replace("|>", ": ")
"""Templates that write no token at the end of a turn."""


@pytest.mark.parametrize(
    ("source", "earlier", "end"), [(MARKED, "A1\n<|user|>", "\n<|user|>"), (PLAIN, "A1", "</s>")]
)
def test_a_turn_without_an_end_is_ended_by_the_next_one_or_by_eos(
    source: str, earlier: str, end: str
) -> None:
    messages = chat("Q1", "A1", "Q2", "A2")
    assert spans(learned(source, messages)) == [earlier, f"A2{end}"]
    assert spans(learned(source, messages, learn="last")) == [f"A2{end}"]
    (whole,) = spans(learned(source, messages, learn="all"))
    assert whole.endswith(f"A2{end}")
    half = learned(source, [*messages[:3], {**messages[3], "weight": 0}])
    assert (spans(half), half.endswith(f"A2{end}")) == ([earlier], True)
    without = learned(source, messages, eos=False)
    assert ("</s>" in without, "A2\n<|user|>⟧" in without) == (False, source == MARKED)


@needs_trl
def test_a_call_of_glm_ends_with_the_first_token_of_its_result() -> None:
    (reply,) = spans(learned(source_of("glm4moe"), CALLED[:2]))
    assert reply.endswith("</tool_call><|observation|>")


@pytest.mark.parametrize("source", [CHATML, MARKED])
@pytest.mark.parametrize("content", ["Let me add.", ""])
@pytest.mark.parametrize("weight", [0, 1])
def test_calls_and_tools_that_the_template_omits_are_errors(
    source: str, content: str, weight: int
) -> None:
    messages = [CALLED[0], {**CALLED[1], "content": content, "weight": weight}, *chat("Q", "A")]
    with pytest.raises(WorkhorseError, match="omits tool call 0 of message 1"):
        learned(source, messages)
    with pytest.raises(WorkhorseError, match="omits the tools; remove the field tools"):
        learned(source, chat("Q", "A"), tools=[ADD])
    tokenizer = Tokenizer(library(source).to_str(), chat_template=source)
    with pytest.raises(WorkhorseError, match="omits tool call 0 of message 1"):
        ChatTemplate.of(tokenizer).encode(tokenizer, messages[:3])


def test_only_the_first_of_two_calls_is_written() -> None:
    source = CHATML.replace(
        "m.content", "m.tool_calls[0].function.name if m.tool_calls else m.content"
    )
    called = {**CALLED[1], "tool_calls": [CALL, {"function": {**ADD, "name": "sub"}}]}
    with pytest.raises(WorkhorseError, match="omits tool call 1 of message 1"):
        learned(source, [CALLED[0], called])


@needs_trl
def test_a_tool_result_inside_the_turn_of_the_assistant_is_an_error() -> None:
    messages = [CALLED[0], {**CALLED[1], "content": "Let me add."}, *CALLED[2:]]
    with pytest.raises(WorkhorseError, match=r"mixes message 1 \(assistant\) with others"):
        learned(source_of("gemma4"), messages)


BREAKING = {
    "truncated": ("{{ m.content[:5] }}<|end|>", "a long answer"),
    "repeated": ("{{ m.content }} {{ m.content }}<|end|>", "an answer"),
    "a full stop is added": ("{{ m.content }}{{ '' if m.content[-1] == '.' else '.' }}", "Yes."),
    "long contents raise": (
        "{{ raise_exception('long') if m.content | length > 9 }}{{ m.content }}<|end|>",
        "answer",
    ),
    "reversed": ("{{ m.content | reverse }}<|end|>", "answer"),
}


@pytest.mark.parametrize("case", BREAKING)
def test_a_template_that_changes_contents_is_an_error(case: str) -> None:
    body, content = BREAKING[case]
    source = "{% for m in messages %}" + body + "{% endfor %}<|end|>"
    with pytest.raises(WorkhorseError, match="chat template"):
        learned(source, chat("short.", content))


@pytest.mark.parametrize("change", ["upper", "lower", "title", "tojson", "trim"])
def test_filters_do_not_hide_the_turns(change: str) -> None:
    source = CHATML.replace("m.content", f"m.content | {change}")
    shown = {"upper": "YES", "lower": "yes", "title": "Yes", "tojson": '"yes"', "trim": "yes"}
    text = learned(source, chat("Hi", "yes", "more", "yes"))
    assert spans(text) == [f"{shown[change]}<|im_end|>"] * 2


def test_a_system_message_at_the_end_is_an_error() -> None:
    source = (
        "{% for m in messages if m.role != 'system' %}{{ m.content }}<|end|>{% endfor %}"
        "{% for m in messages if m.role == 'system' %}{{ m.content }}<|end|>{% endfor %}"
    )
    with pytest.raises(WorkhorseError, match="mixes message 2"):
        learned(source, [{"role": "system", "content": "S"}, *chat("Hi", "Hello.")])


def test_a_result_repeated_inside_the_turn_of_the_assistant_is_an_error() -> None:
    source = (
        "{% for m in messages %}{% set next = loop.nextitem %}"
        "{% if m.role == 'assistant' %}<|a|>{% if next and next.role == 'tool' %}"
        "{{ next.content }}{{ next.content }}{% endif %}{{ m.content }}<|end|>"
        "{% elif m.role == 'user' %}<|u|>{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|a|>{% endif %}"
    )
    messages = [*chat("Q", "A"), {"role": "tool", "content": "4"}, *chat("Q", "B")]
    with pytest.raises(WorkhorseError, match="mixes message 1"):
        learned(source, messages)


def test_the_first_message_may_be_the_assistants() -> None:
    text = learned(CHATML, [{"role": "assistant", "content": "Hi"}])
    assert text == "<|im_start|>assistant\n⟦Hi<|im_end|>⟧\n"


GIVEN, WRITTEN = "αβ", "ЖЗ"
"""Letters of the user and the system, and letters of the assistant."""
PIECES = [
    "\n",
    " ",
    "x",
    "é",
    "🙂",
    "{{",
    "assistant",
    "user",
    "<|im_end|>",
    "</s>",
    "[/INST]",
    "<|end|>",
]


def contents(letters: str) -> st.SearchStrategy[str]:
    """Contents with any pieces between two letters."""
    letter = st.sampled_from(letters)
    inside = st.lists(st.sampled_from([*PIECES, *letters]), max_size=5).map("".join)
    return st.tuples(letter, inside, letter).map("".join)


# `grids.yaml` sets the number of templates in the default suite.
@needs_trl
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=6)
@given(
    system=st.none() | contents(GIVEN),
    turns=st.lists(st.tuples(contents(GIVEN), contents(WRITTEN)), min_size=1, max_size=3),
)
def test_what_the_assistant_writes_is_learned_and_nothing_else(
    name: str, system: str | None, turns: list[tuple[str, str]]
) -> None:
    source, messages = source_of(name), chat(*chain(*turns))
    if system is not None and name not in WITHOUT_SYSTEM:
        messages = [{"role": "system", "content": system}, *messages]
    text = learned(source, messages)
    tokenizer = Tokenizer(library(source).to_str(), {"bos": "<s>", "eos": "</s>"}, source)
    template = ChatTemplate.of(tokenizer)
    whole = template.render(messages, add_generation_prompt=False)
    assert re.sub("[⟦⟧]", "", text) == whole + ADDED_END.get(name, "")
    found = spans(text)
    assert len(found) == len(turns)
    assert not any(letter in span for span in found for letter in GIVEN)
    assert not any(letter in re.sub("⟦.*?⟧", "", text, flags=re.DOTALL) for letter in WRITTEN)
    assert re.search(rf"(?:{SPECIAL.pattern})\s*\Z", found[-1])
    # What is given before the last answer is the generation prompt, as far as they are equal.
    asked = re.split(f"[{GIVEN}]", template.render(messages[:-1], add_generation_prompt=True))[-1]
    prompt = re.split(f"[{GIVEN}]", text[: text.rindex("⟦")])[-1]
    assert asked.startswith(prompt)
    assert asked[len(prompt) :][:1] != found[-1][0]


WITHOUT_SYSTEM = {"gemma"}
"""Templates that refuse a system message."""
ADDED_END = {"glm4moe": "<|user|>"}
"""The first token of the next turn, for templates that write no token at the end of the last."""
THINK, EMPTY = "<think>\n", "<think>\n\n</think>\n\n"

# What TRL's masks have in addition to ours: before and after an earlier answer, before and after
# the last one. TRL marks a block of the template, and its training templates differ in it.
DIFFERENCES: dict[str, tuple[str, str, str, str]] = {
    **dict.fromkeys(("cohere", "cohere2", "glm4moe", "llama3", "llava_next"), ("", "", "", "")),
    # The line break that the template writes after the end of a turn: generation has ended there.
    **dict.fromkeys(
        ("diffusion_gemma", "gemma", "gemma3", "idefics3", "lfm2", "lfm2_v2", "qwen2_5_vl"),
        ("", "\n", "", "\n"),
    ),
    **dict.fromkeys(("qwen3_instruct_2507", "qwen3_vl", "smolvlm"), ("", "\n", "", "\n")),
    # The same. The last turn ends with </s>, so both learn the line break before it.
    **dict.fromkeys(("phi3", "phi3_5"), ("", "\n", "", "")),
    # The end of the generation prompt, which the model is given.
    **dict.fromkeys(
        ("deepseek_r1_distill", "deepseekv3"),
        ("<\uff5cAssistant\uff5c>", "", "<\uff5cAssistant\uff5c>", ""),
    ),
    **dict.fromkeys(
        ("gptoss", "muse_glimmer"), ("<|start|>assistant", "", "<|start|>assistant", "")
    ),
    "qwen2_5": ("\n", "\n", "\n", "\n"),
    **dict.fromkeys(
        ("nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra"),
        ("<think>", "\n", "<think>", "\n"),
    ),
    "qwen3_8": (THINK, "\n", THINK, "\n"),
    "qwen3_5_nothink": (EMPTY, "\n", EMPTY, "\n"),
    # The same before the last answer. The original template omits reasoning of earlier answers;
    # TRL's writes empty reasoning, so that a longer conversation begins as a shorter one.
    "qwen3": (EMPTY, "\n", "", "\n"),
    **dict.fromkeys(("qwen3_5_think", "qwen3_6"), (EMPTY, "\n", THINK, "\n")),
}
OPENED = {
    **dict.fromkeys((one for one in DIFFERENCES if one.startswith("nemotron")), THINK),
    "qwen3_5_nothink": THINK,
}
"""As before the last answer in `DIFFERENCES`, if it has reasoning: the generation prompt then
equals more, or less, of the answer."""


@pytest.mark.slow
@needs_trl
@pytest.mark.parametrize("case", CHATS)
@pytest.mark.parametrize("name", [n for n in NAMES if (FOLDER / f"{n}_training.jinja").exists()])
def test_turns_differ_from_those_of_trls_training_templates_as_listed(name: str, case: str) -> None:
    transformers = pytest.importorskip("transformers")
    messages = CHATS[case]
    if name == "diffusion_gemma" and case == "unicode":
        pytest.skip("TRL's mask has holes inside the characters of several tokens")
    *earlier, last = spans(learned(source_of(name), messages))
    parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    theirs_in = parts if name in ("idefics3", "smolvlm", "llava_next") else messages
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=library(source_of(name)), bos_token="<s>", eos_token="</s>"
    )
    found = wrapped.apply_chat_template(
        theirs_in,
        chat_template=source_of(f"{name}_training"),
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    theirs = spans(marked(wrapped.decode, found["input_ids"], found["assistant_masks"]))
    before, after, before_last, after_last = DIFFERENCES[name]
    if name == "qwen3" and case == "white space":  # TRL's removes line breaks before contents
        earlier = [one.lstrip("\n") for one in earlier]
    if case == "reasoning":
        before_last = OPENED.get(name, before_last)
    expected = [before + one + after for one in earlier]
    assert theirs == [*expected, before_last + last + after_last]

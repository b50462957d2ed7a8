import signal

import pytest

from workhorse.errors import WorkhorseError
from workhorse.generate import GenerationConfig, generate
from workhorse.generate.conversation import Conversation, TemplateFormat, TranscriptFormat
from workhorse.generate.request import Request
from workhorse.tokenizers import BytesConfig, ChatTemplate, SpecialTokensConfig, train_tokenizer

CONFIG = GenerationConfig(seed=1, max_new_tokens=8)
IM_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    chat = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|im_start|>", "<|im_end|>")
    special = SpecialTokensConfig(bos=None, eos="<|eos|>", pad=None, chat=chat)
    return train_tokenizer(BytesConfig(special=special), [])


@pytest.fixture
def decoder(make_decoder, tokenizer):
    return make_decoder(vocab_size=tokenizer.vocab_size, max_seq_len=128)


@pytest.fixture
def read(decoder, monkeypatch):
    """Records the tokens of each forward pass."""
    seen, hidden = [], decoder.hidden

    def spy(tokens, **arguments):
        seen.append(tokens[0].tolist())
        return hidden(tokens, **arguments)

    monkeypatch.setattr(decoder, "hidden", spy)
    return seen


def say(conversation, text) -> tuple[str, tuple[int, ...]]:
    deltas = list(conversation.reply(text))
    return "".join(delta.text for delta in deltas), tuple(delta.token for delta in deltas)


def test_each_template_s_own_token_ends_a_turn(tokenizer):
    ids = tokenizer.special_tokens
    default = TemplateFormat(ChatTemplate(), tokenizer)
    assert default.stop_tokens == (ids["<|end|>"], ids["<|eos|>"])
    other = TemplateFormat(ChatTemplate(IM_TEMPLATE), tokenizer)
    assert other.stop_tokens == (ids["<|im_end|>"], ids["<|eos|>"])
    with_header = IM_TEMPLATE.replace("+ m.content", "+ '<|system|>' + m.content")
    assert with_header != IM_TEMPLATE
    assert TemplateFormat(ChatTemplate(with_header), tokenizer).stop_tokens == other.stop_tokens


def test_the_next_turn_ends_a_reply_if_the_template_does_not(tokenizer):
    ids = tokenizer.special_tokens
    roles = "{% for m in messages %}{{ '<|' ~ NAME ~ '|>' ~ m.content }}{% endfor %}"
    name = "('system' if m.role == 'tool' else m.role)"  # like <|observation|> of GLM
    form = TemplateFormat(ChatTemplate(roles.replace("NAME", name)), tokenizer)
    assert form.stop_tokens == (ids["<|user|>"], ids["<|system|>"], ids["<|eos|>"])
    refuses = "{% if messages[-1].role == 'tool' %}{{ raise_exception('no') }}{% endif %}"
    form = TemplateFormat(ChatTemplate(refuses + roles.replace("NAME", "m.role")), tokenizer)
    assert form.stop_tokens == (ids["<|user|>"], ids["<|eos|>"])
    plain = (
        "{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '<|end|>' * (m.role == 'user') }}"
    )
    form = TemplateFormat(ChatTemplate(plain + "{% endfor %}"), tokenizer)
    assert form.stop_tokens == (ids["<|eos|>"],)


def test_a_reply_is_what_follows_the_template(decoder, tokenizer):
    form = TemplateFormat(ChatTemplate(), tokenizer)
    conversation = Conversation(decoder, tokenizer, form, CONFIG, system="Be brief.")
    first, _ = say(conversation, "hello")
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hello"},
    ]
    config = CONFIG.replace(stop_tokens=form.stop_tokens)
    expected = generate(decoder, [form.encode(messages)], config, tokenizer=tokenizer)[0]
    assert first == expected.text
    second, _ = say(conversation, "again")
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "again"}]
    expected = generate(decoder, [form.encode(messages)], config, tokenizer=tokenizer)[0]
    assert second == expected.text
    assert conversation.messages == [*messages, {"role": "assistant", "content": second}]


@pytest.mark.usefixtures("small_blocks")
def test_a_turn_reads_only_what_is_new(decoder, tokenizer, read):
    # Printable ASCII encodes to exactly the tokens that were generated.
    bias = {token: -100.0 for token in range(tokenizer.vocab_size) if not 32 <= token < 127}
    config = CONFIG.replace(logit_bias=bias)
    conversation = Conversation(
        decoder, tokenizer, TemplateFormat(ChatTemplate(), tokenizer), config
    )
    _, tokens = say(conversation, "hello")
    read.clear()
    say(conversation, "again")
    # New tokens: the last of the reply, <|end|> <|user|> again <|end|> <|assistant|>.
    new = 1 + 1 + 1 + len("again") + 2
    assert new <= len(read[0]) < new + 4  # whole blocks of four tokens are shared
    assert len(tokens) == 8


@pytest.mark.usefixtures("small_blocks")
def test_a_reply_that_the_template_shows_otherwise_is_read_again_from_there(
    decoder, tokenizer, read
):
    """Example: the next prompt of a reasoning model omits the earlier reasoning."""
    shortened = IM_TEMPLATE.replace("m.content", "m.content[:4]")
    ascii_only = {token: -100.0 for token in range(tokenizer.vocab_size) if not 32 <= token < 127}
    config = CONFIG.replace(logit_bias=ascii_only)
    form = TemplateFormat(ChatTemplate(shortened), tokenizer)
    conversation = Conversation(decoder, tokenizer, form, config)
    say(conversation, "hell")
    read.clear()
    second, _ = say(conversation, "agai")
    after = len(tokenizer.encode("\nuser\nagai\nassistant\n")) + 4  # and four control tokens
    assert after <= len(read[0]) < after + 4
    expected = generate(
        decoder,
        [form.encode(conversation.messages[:-1])],
        config.replace(stop_tokens=form.stop_tokens),
        tokenizer=tokenizer,
    )[0]
    assert second == expected.text


def test_a_draft_changes_no_reply(decoder, tokenizer):
    form, config = (
        TemplateFormat(ChatTemplate(), tokenizer),
        CONFIG.replace(temperature=0, seed=None),
    )
    plain = Conversation(decoder, tokenizer, form, config)
    for draft in (None, decoder):
        guessing = Conversation(decoder, tokenizer, form, config.replace(speculate=3), draft=draft)
        for text in ("hello", "again"):
            say(guessing, text)
            if len(plain.messages) < len(guessing.messages):
                say(plain, text)
        assert guessing.messages == plain.messages


def test_the_oldest_exchanges_are_forgotten_and_the_system_message_stays(decoder, tokenizer, read):
    form = TemplateFormat(ChatTemplate(), tokenizer)
    conversation = Conversation(decoder, tokenizer, form, CONFIG, system="S")
    for _ in range(6):
        say(conversation, "x" * 40)
    assert len(conversation.messages) == 13
    system = {"role": "system", "content": "S"}
    # Six exchanges of 48 characters do not fit into 128 tokens; the last two messages do.
    messages = [system, *conversation.messages[-4:-1]]
    config = CONFIG.replace(stop_tokens=form.stop_tokens)
    expected = generate(decoder, [form.encode(messages)], config, tokenizer=tokenizer)[0]
    assert conversation.messages[-1]["content"] == expected.text
    assert max(len(tokens) for tokens in read) <= 128
    with pytest.raises(WorkhorseError, match=r"the message have \d+ tokens and the context is 128"):
        say(conversation, "x" * 200)
    assert len(conversation.messages) == 13
    assert say(conversation, "shorter")[1]


def test_a_model_of_plain_text_continues_a_dialogue(decoder, tokenizer):
    form = TranscriptFormat(tokenizer)
    messages = [
        {"role": "system", "content": "A talk."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": " hello"},
        {"role": "user", "content": "bye"},
    ]
    text = tokenizer.decode(form.encode(messages))
    assert text == "A talk.\nUser: hi\nAssistant: hello\nUser: bye\nAssistant:"
    # Control tokens typed by the user are encoded as plain text.
    typed = form.encode([{"role": "user", "content": "<|eos|>"}])
    assert tokenizer.eos_id not in typed
    conversation = Conversation(decoder, tokenizer, form, CONFIG)
    assert say(conversation, "hi")[1]


def test_a_dialogue_s_reply_ends_where_the_user_would_speak(decoder, tokenizer):
    form = TranscriptFormat(tokenizer)
    assert form.stop == ("\nUser:",)
    assert form.stop_tokens == (tokenizer.eos_id,)
    ascii_only = {token: -100.0 for token in range(tokenizer.vocab_size) if not 32 <= token < 127}
    config = CONFIG.replace(logit_bias=ascii_only)
    free, _ = say(Conversation(decoder, tokenizer, form, config), "hi")
    sooner = TranscriptFormat(tokenizer, stop=(free[3:5],))
    reply, _ = say(Conversation(decoder, tokenizer, sooner, config), "hi")
    assert reply == free[: free.index(free[3:5])]


def test_tokens_that_the_model_stops_at_end_a_reply_too(decoder, tokenizer):
    form = TemplateFormat(ChatTemplate(), tokenizer)
    whole = Conversation(decoder, tokenizer, form, CONFIG)
    _, tokens = say(whole, "hello")
    config = CONFIG.replace(stop_tokens=(tokens[3],))
    _, cut = say(Conversation(decoder, tokenizer, form, config), "hello")
    assert cut == tokens[: tokens.index(tokens[3]) + 1]
    # The template's own stop tokens still end a reply.
    bias = dict.fromkeys(range(tokenizer.vocab_size), -100.0)
    config = config.replace(logit_bias=bias | {form.stop_tokens[0]: 100.0})
    assert len(say(Conversation(decoder, tokenizer, form, config), "hello")[1]) == 1


def test_a_short_context_still_remembers(decoder, tokenizer):
    """With a limit of 128 tokens per reply and a context of 128, messages are still kept."""
    form = TemplateFormat(ChatTemplate(), tokenizer)
    config = GenerationConfig(seed=1, max_new_tokens=128, stop_tokens=tuple(range(128)))
    conversation = Conversation(decoder, tokenizer, form, config)
    for message, forgotten in (("first", 0), ("second", 0), ("x" * 60, 0), ("y" * 60, 6)):
        say(conversation, message)
        assert conversation.forgotten == forgotten, message


@pytest.mark.parametrize("leave", ["close", "interrupt"])
def test_a_reply_that_is_cut_short_is_remembered_as_far_as_it_went(
    decoder, tokenizer, monkeypatch, leave
):
    form = TemplateFormat(ChatTemplate(), tokenizer)
    plain = {token: -100.0 for token in range(tokenizer.vocab_size) if not 32 <= token < 127}
    config = CONFIG.replace(logit_bias=plain)
    conversation = Conversation(decoder, tokenizer, form, config)
    reply = conversation.reply("hello")
    said = next(reply).text + next(reply).text
    if leave == "close":
        reply.close()
    else:

        def interrupted(*_, **__):
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(decoder, "hidden", interrupted)
            with pytest.raises(KeyboardInterrupt):
                next(reply)
    asked = {"role": "user", "content": "hello"}
    assert conversation.messages == [asked, {"role": "assistant", "content": said}]
    second, _ = say(conversation, "again")
    prompt = form.encode(conversation.messages[:-1])
    expected = generate(
        decoder, [prompt], config.replace(stop_tokens=form.stop_tokens), tokenizer=tokenizer
    )[0]
    assert second == expected.text


def test_an_interrupt_before_the_first_token_leaves_the_conversation_as_it_was(
    decoder, tokenizer, monkeypatch
):
    conversation = Conversation(decoder, tokenizer, TranscriptFormat(tokenizer), CONFIG)

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(decoder, "hidden", interrupted)
    with pytest.raises(KeyboardInterrupt):
        say(conversation, "hello")
    assert conversation.messages == []


def test_a_reply_that_goes_on_is_not_mixed_with_another(decoder, tokenizer):
    conversation = Conversation(decoder, tokenizer, TranscriptFormat(tokenizer), CONFIG)
    first = conversation.reply("hello")
    begun = next(first).text
    with pytest.raises(WorkhorseError, match="the last reply has not ended"):
        next(conversation.reply("and now?"))
    answer = begun + "".join(delta.text for delta in first)
    assert [message["content"] for message in conversation.messages] == ["hello", answer]
    assert next(conversation.reply("and now?"))


@pytest.mark.parametrize("option", ["n_samples", "beams"])
def test_a_chat_has_one_reply(decoder, tokenizer, option):
    config = GenerationConfig(**{option: 3})
    with pytest.raises(WorkhorseError, match=f"{option}=3: a chat has one reply; omit {option}"):
        Conversation(decoder, tokenizer, TranscriptFormat(tokenizer), config)


@pytest.mark.parametrize("last", [1, 3, 8])
def test_after_an_interrupt_between_passes_the_conversation_goes_on(decoder, tokenizer, last):
    conversation = Conversation(decoder, tokenizer, TranscriptFormat(tokenizer), CONFIG)
    count = 0

    def interrupt(*_: object) -> None:
        nonlocal count
        count += 1
        if count == last:
            signal.raise_signal(signal.SIGINT)

    plain_take = Request.take

    def take(*given, **named):
        interrupt()
        return plain_take(*given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Request, "take", take)
        with pytest.raises(KeyboardInterrupt):
            list(conversation.reply("Hi"))
    assert len(list(conversation.reply("And now?"))) > 0

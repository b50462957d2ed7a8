"""The routes that encode and decode, as lm-eval's remote tokenizer uses them."""

from httpx2 import Client

from tests.serve.conftest import END, MODEL


def test_tokenizing(http: Client) -> None:
    assert http.get("/tokenizer_info").json()["eos_token"] == "<|eos|>"

    def tokens(**fields: object) -> list[int]:
        answer = http.post("/tokenize", json=fields).json()
        assert answer["count"] == len(answer["tokens"])
        return answer["tokens"]

    plain = tokens(content="a<|end|>")
    assert len(plain) == 8  # text never becomes a special token, unless it is asked for
    assert tokens(prompt="a<|end|>", add_special_tokens=False) == [plain[0], END]
    chat = tokens(messages=[{"role": "user", "content": "a<|end|>"}], model=MODEL)
    assert [*plain, END] == chat[-len(plain) - 2 : -1]
    text = http.post("/detokenize", json={"tokens": plain}).json()
    assert text["prompt"] == text["content"] == "a<|end|>"

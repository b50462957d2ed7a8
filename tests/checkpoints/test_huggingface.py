"""Hugging Face directories: prefixes, larger models, and checks that each tensor is used."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.parity import reference
from tests.parity.all_cases import ALL, GROUPED
from tests.parity.reference import TOKENS, VOCAB, quiet, randomised
from workhorse.checkpoints.huggingface.export import write_huggingface
from workhorse.checkpoints.huggingface.load import HuggingFaceDirectory
from workhorse.checkpoints.huggingface.tensor_folder import TensorFolder
from workhorse.checkpoints.stored import open_stored
from workhorse.errors import WorkhorseError
from workhorse.generate import GenerationConfig
from workhorse.model.load import load
from workhorse.models.huggingface.rotation import conflicting_settings

TIED = GROUPED | {"tie_word_embeddings": True}
TEXT = torch.arange(3, 15)[None]


def saved(folder: Path, options: dict = GROUPED, dtype: torch.dtype = torch.float32) -> Path:
    """A random LLaMA as transformers saves it."""
    with quiet():
        model = randomised(
            hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=VOCAB, **TOKENS, **options))
        )
        model.to(dtype).save_pretrained(folder)
    return folder


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    save_file(change(tensors), path, metadata={"format": "pt"})


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def logits(folder: Path) -> Tensor:
    with torch.no_grad():
        return HuggingFaceDirectory(folder).load_decoder(dtype=torch.float32)(TEXT)


def without(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def under(*prefixes: tuple[str, str]) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """A function that replaces the first matching prefix of each name."""

    def renamed(name: str) -> str:
        fits = (new + name.removeprefix(old) for old, new in prefixes if name.startswith(old))
        return next(fits, name)

    return lambda tensors: {renamed(name): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("model.norm.weight"), "'model.norm.weight' is missing"),
        (lambda t: {**t, "model.extra": torch.ones(1)}, "'model.extra' is not part of this"),
        (
            lambda t: {**t, "model.norm.weight": torch.ones(33)},
            r"'model.norm.weight' has shape \(33,\), but the config needs \(32,\)",
        ),
        (
            lambda t: {**t, "model.layers.0.self_attn.q_proj.bias": torch.ones(32)},
            "'model.layers.0.self_attn.q_proj.bias' is not part of this",
        ),
    ],
)
def test_every_tensor_is_accounted_for(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]], message: str, tmp_path: Path
) -> None:
    change_tensors(saved(tmp_path / "m"), change)
    with pytest.raises(WorkhorseError, match=message):
        HuggingFaceDirectory(tmp_path / "m").load_decoder()


def test_a_config_of_more_layers_than_tensors_is_refused_at_once(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m")
    change_config(folder, num_hidden_layers=5000)
    with pytest.raises(WorkhorseError, match="5000 layers for 21 tensors"):
        HuggingFaceDirectory(folder).load_decoder()
    change_config(folder, num_hidden_layers=10**9)
    with pytest.raises(WorkhorseError, match="1000000000 is above 10000"):
        HuggingFaceDirectory(folder)


def test_a_tied_head_may_be_stored_too(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m", TIED)
    expected = logits(folder)
    change_tensors(
        folder, lambda t: {**t, "lm_head.weight": t["model.embed_tokens.weight"].clone()}
    )
    torch.testing.assert_close(logits(folder), expected)


def test_a_tied_head_that_is_another_matrix_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m", TIED)
    change_tensors(folder, lambda t: {**t, "lm_head.weight": t["model.embed_tokens.weight"] + 1})
    with pytest.raises(WorkhorseError, match="tie_word_embeddings is true but"):
        logits(folder)


@pytest.mark.parametrize(
    "prefixes",
    [
        [("model.", "")],
        [("model.", "model.language_model.")],
        [("model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")],
    ],
    ids=["bare", "inside", "wrapped"],
)
def test_the_prefix_is_recognised(prefixes: list[tuple[str, str]], tmp_path: Path) -> None:
    folder = saved(tmp_path / "m")
    expected = logits(folder)
    change_tensors(folder, under(*prefixes))
    torch.testing.assert_close(logits(folder), expected)


@pytest.mark.parametrize(
    "prefixes",
    [
        [("", "_orig_mod.")],
        [("", "module._orig_mod.")],
        [("model.layers.0.", "model.layers.0._orig_mod."), ("lm_head.", "_orig_mod.lm_head.")],
    ],
    ids=["compiled", "distributed", "one layer"],
)
def test_prefixes_of_wrapped_models_are_dropped(
    prefixes: list[tuple[str, str]], tmp_path: Path
) -> None:
    folder = saved(tmp_path / "m")
    expected = logits(folder)
    change_tensors(folder, under(*prefixes))
    directory = HuggingFaceDirectory(folder)
    with torch.no_grad():
        torch.testing.assert_close(directory.load_decoder()(TEXT), expected)
    (remark,) = directory.remarks
    assert "prefix of a compiled or distributed model" in remark


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pointer_of_git_lfs_is_named(name: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "m")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n"
    (folder / name).write_text(pointer)
    with pytest.raises(WorkhorseError, match=f"{name} is a Git LFS pointer, not the file itself"):
        logits(folder)


def test_an_adapter_is_no_model_and_is_not_applied(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m")
    for place in (folder, tmp_path):
        (place / "adapter_config.json").write_text("{}")
    (remark,) = HuggingFaceDirectory(folder).remarks
    assert "adapter (LoRA), which is not applied" in remark
    with pytest.raises(WorkhorseError, match=r"is an adapter \(LoRA\), not a model; give its base"):
        open_stored(tmp_path)


def test_the_text_part_of_a_larger_model(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m")
    expected = logits(folder)
    text = json.loads((folder / "config.json").read_text())
    tower = {"vision_tower.layers.0.weight": torch.ones(3), "projector.weight": torch.ones(2)}
    wrap = under(("model.", "language_model.model."), ("lm_head.", "language_model.lm_head."))
    change_tensors(folder, lambda t: wrap(t) | tower)
    whole = {"model_type": "some_vision_model", "text_config": text, "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(whole))
    directory = HuggingFaceDirectory(folder)
    with torch.no_grad():
        torch.testing.assert_close(directory.load_decoder()(TEXT), expected)
    assert directory.remarks == ["2 tensors belong to other parts of the model: not loaded"]


def test_what_is_not_used_is_told(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m")
    change_config(folder, auto_map={"AutoModel": "own_code.Model"}, new_attention_trick=3)
    rotation = {"rope_type": "default", "rope_theta": 10_000.0, "new_turn": 1}
    change_config(folder, rope_parameters=rotation)
    assert HuggingFaceDirectory(folder).remarks == [
        "config.json refers to custom code (auto_map), which is never run",
        "unknown keys of config.json are ignored: new_attention_trick, rope_parameters.new_turn",
    ]


@pytest.mark.parametrize(
    ("changes", "remarks", "stops"),
    [
        ({"pad_token_id": -1, "eos_token_id": [2, 3]}, [], (2, 3)),
        (
            {"eos_token_id": [2, VOCAB], "bos_token_id": -1},
            [
                f"bos_token_id=-1 is outside the vocabulary of {VOCAB} tokens and is ignored",
                f"eos_token_id={VOCAB} is outside the vocabulary of {VOCAB} tokens and is ignored",
            ],
            (2,),
        ),
        (
            {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            ["rope_theta=500000.0 is ignored; rope_parameters has 10000.0"],
            (2,),
        ),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_type": "default"}}, [], (2,)),
    ],
)
def test_what_contradicts_the_rest_is_told(
    changes: dict[str, object], remarks: list[str], stops: tuple[int, ...], tmp_path: Path
) -> None:
    folder = saved(tmp_path / "m")
    (folder / "generation_config.json").unlink()
    change_config(folder, **{"eos_token_id": 2, **changes})
    directory = HuggingFaceDirectory(folder)
    assert (directory.remarks, directory.stop_tokens) == (remarks, stops)


def test_damaged_rotations_that_do_not_count_are_no_contradiction() -> None:
    rope = {"rope_scaling": {"type": "yarn"}, "rope_parameters": {"full_attention": 2.0}}
    assert conflicting_settings(rope) == []


def test_sampling_options_count_where_the_file_samples(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m")
    path = folder / "generation_config.json"
    options = {"temperature": 0.6, "top_k": 5, "top_p": 0.9, "min_p": 0.05}
    options["repetition_penalty"] = 1.1
    path.write_text(json.dumps(options))
    told: list[str] = []
    assert load(folder, notify=told.append).sampling == {"repetition_penalty": 1.1}
    line = "generation_config.json: ignored without do_sample: temperature, top_k, top_p, min_p"
    assert told[0] == f"{folder}: {line}"
    path.write_text(json.dumps({**options, "do_sample": True}))
    model = load(folder, notify=told.append)
    assert model.sampling == options
    assert sum("generation_config" in one for one in told) == 1
    assert model.with_sampling(GenerationConfig(), ["top_k"]).replace(top_k=5) == GenerationConfig(
        **options
    )
    greedy = GenerationConfig(temperature=0)
    penalised = greedy.replace(repetition_penalty=1.1)
    assert model.with_sampling(greedy, ["temperature"]) == penalised
    beams = GenerationConfig(beams=2)
    assert model.with_sampling(beams, ["beams"]) == beams
    assert model.generate([1, 2], max_new_tokens=2, seed=1) == model.generate(
        [1, 2], GenerationConfig(**options, max_new_tokens=2, seed=1)
    )
    path.write_text(json.dumps({"temperature": -1.0, "top_k": 0, "do_sample": True}))
    assert load(folder, notify=told.append).sampling == {}
    assert "is not used for sampling: temperature=-1 is negative" in " ".join(told)


def test_options_of_generation_that_are_not_used_are_named(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m")
    off = {"num_beams": 1, "early_stopping": False, "max_time": None, "suppress_tokens": []}
    on = {"max_length": 9, "min_new_tokens": 1, "stop_strings": ["x"], "unknown": True}
    path = folder / "generation_config.json"
    path.write_text(
        json.dumps({"do_sample": True, "eos_token_id": 2, "temperature": 1, **off, **on})
    )
    (line,) = HuggingFaceDirectory(folder).remarks
    assert line == f"generation_config.json: ignored (not supported): {', '.join(on)}"
    folder.joinpath("generation_config.json").write_text(json.dumps({"temperature": 1.0, **off}))
    assert HuggingFaceDirectory(folder).remarks == []


def test_what_ends_a_text_may_stand_in_a_file_of_its_own(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m")
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert HuggingFaceDirectory(folder).stop_tokens == (5, 7)
    path.write_text(json.dumps({"eos_token_id": "5"}))
    with pytest.raises(WorkhorseError, match=r"generation_config.json: eos_token_id='5' is not"):
        HuggingFaceDirectory(folder)
    path.write_text(json.dumps({"min_p": 10**400, "do_sample": True}))
    with pytest.raises(
        WorkhorseError, match=r"generation_config.json: min_p=10+… is too large; cor"
    ):
        HuggingFaceDirectory(folder)
    path.write_text(json.dumps({"eos_token_id": 10**400}))
    (line,) = HuggingFaceDirectory(folder).remarks
    assert len(line) < 200


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "bert"}, "model type 'bert' is not supported, because it is an encoder"),
        ({"model_type": "mamba"}, "'mamba' is not supported, because it is a state-space model"),
        ({"model_type": "qwen3_5_text"}, "because it is a hybrid of attention and state-space"),
        ({"model_type": "glm4v"}, "because it is an image, audio or video model"),
        ({"model_type": "x" * 10**6}, "model type 'x{60}' is not supported; known: afmoe"),
        ({"model_type": None}, "has no 'model_type'"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers='two' is not a whole number"),
        ({"hidden_size": "wide"}, "hidden_size='wide' is not a whole number"),
        ({"hidden_size": 2.5}, "hidden_size=2.5 is not a whole number"),
        ({"hidden_size": None}, "has no 'hidden_size'"),
        ({"hidden_act": "spline"}, "hidden_act 'spline' is unknown"),
        ({"num_key_value_heads": 3}, "n_heads=4 is not divisible by n_kv_heads=3"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope_type 'spiral' is unknown"),
        ({"eos_token_id": "2"}, "eos_token_id='2' is not a whole number"),
        ({"eos_token_id": [[1, 2]]}, r"eos_token_id=\[1, 2\] is not a whole number"),
        ({"bos_token_id": True}, "bos_token_id=True is not a whole number"),
        ({"pad_token_id": "none"}, "pad_token_id='none' is not a whole number"),
        (
            {"rms_norm_eps": 1e308},
            "config.json sets eps: 1e\\+308 is too large; give a number above 0 and at most 1",
        ),
        ({"rms_norm_eps": -1e-5}, "config.json sets eps: -1e-05 is too small"),
    ],
)
def test_a_config_that_cannot_be_is_one_line(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    change_config(saved(tmp_path / "m"), **changes)
    with pytest.raises(WorkhorseError, match=message) as refusal:
        HuggingFaceDirectory(tmp_path / "m")
    assert str(refusal.value).startswith(str(tmp_path / "m"))
    assert "\n" not in str(refusal.value)


def test_weights_of_an_unknown_form_are_refused_by_their_folder(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m")
    change_config(folder, quantization_config={"quant_method": "gptq"})
    with pytest.raises(
        WorkhorseError, match="quantization method 'gptq' is not supported"
    ) as refusal:
        HuggingFaceDirectory(folder).load_decoder()
    assert str(refusal.value).startswith(f"{folder}: ")


def test_large_tensors_are_read_before_small_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If read last, a large tensor's pages would be in memory together with all other copies."""
    sizes: list[int] = []
    read = TensorFolder.read

    def noted(folder: TensorFolder, name: str) -> Tensor:
        tensor = read(folder, name)
        sizes.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(TensorFolder, "read", noted)
    HuggingFaceDirectory(saved(tmp_path / "m")).load_decoder()
    assert len(set(sizes)) > 2
    assert sizes == sorted(sizes, reverse=True)


def test_keys_of_older_versions_mean_the_same(tmp_path: Path) -> None:
    new = saved(
        tmp_path / "new",
        GROUPED | {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}},
    )
    values = json.loads((new / "config.json").read_text())
    del values["rope_parameters"]
    values |= {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    old = tmp_path / "old"
    old.mkdir()
    (old / "config.json").write_text(json.dumps(values))
    assert HuggingFaceDirectory(old).config == HuggingFaceDirectory(new).config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_keep_their_type_and_bytes(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = saved(tmp_path / "m", dtype=dtype)
    decoder = HuggingFaceDirectory(folder).load_decoder()
    assert {parameter.dtype for parameter in decoder.parameters()} == {dtype}
    write_huggingface(tmp_path / "back", decoder)
    before, after = (load_file(at / "model.safetensors") for at in (folder, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert {tensor.dtype for tensor in after.values()} == {dtype}


def test_a_routers_bias_for_the_choice_is_float32_in_any_model(tmp_path: Path) -> None:
    options = ALL["glm4_moe"][0]
    with quiet():
        config = hf.Glm4MoeConfig(vocab_size=VOCAB, **TOKENS, **options)
        randomised(hf.Glm4MoeForCausalLM(config)).save_pretrained(tmp_path / "m")
    decoder = HuggingFaceDirectory(tmp_path / "m").load_decoder(dtype=torch.bfloat16)
    write_huggingface(tmp_path / "back", decoder)
    before, after = (load_file(tmp_path / at / "model.safetensors") for at in ("m", "back"))
    biases = [name for name in after if name.endswith("e_score_correction_bias")]
    assert biases
    assert all(torch.equal(before[name], after[name]) for name in biases)
    rest = {after[name].dtype for name in after if name not in biases}
    assert rest == {torch.bfloat16}


def test_shards_are_one_model(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m")
    with quiet():
        model = hf.AutoModelForCausalLM.from_pretrained(folder)
        model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    torch.testing.assert_close(logits(tmp_path / "shards"), logits(folder))


def test_a_model_that_no_class_can_hold_is_not_written(tmp_path: Path) -> None:
    decoder = HuggingFaceDirectory(saved(tmp_path / "m")).load_decoder()
    block = decoder.config.blocks["main"]
    odd = decoder.config.replace(
        blocks={"main": block.replace(attention=block.attention.replace(softcap=3.0))}
    ).build()
    with pytest.raises(WorkhorseError, match=r"no transformers class .*softcap is 3\.0, not null"):
        write_huggingface(tmp_path / "odd", odd)
    assert not (tmp_path / "odd").exists()


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m")
    decoder = HuggingFaceDirectory(folder).load_decoder()
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(WorkhorseError, match="exists and is not empty"):
        write_huggingface(folder, decoder)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_several_tokens_may_end_a_text(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m")
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    assert HuggingFaceDirectory(folder).stop_tokens == (2, 9)


def test_whole_numbers_are_no_weights(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    saved(tmp_path)
    change_tensors(tmp_path, lambda tensors: tensors | {name: tensors[name].to(torch.int32)})
    with pytest.raises(
        WorkhorseError, match=rf"'{name}' holds int32, but weights need a float dtype"
    ):
        HuggingFaceDirectory(tmp_path).load_decoder()


def test_published_files_of_axk1_lack_a_bias_and_have_an_idle_norm(tmp_path: Path) -> None:
    reference.make("axk1", ALL["axk1"][0], tmp_path)
    bias = {f"model.layers.{n}.mlp.gate.e_score_correction_bias": torch.zeros(8) for n in (1, 2)}
    change_tensors(tmp_path, lambda tensors: tensors | bias)
    expected = logits(tmp_path)
    for name in bias:
        change_tensors(tmp_path, without(name))
    idle = {"model.layers.0.post_mlp_layernorm.weight": torch.full((32,), 9.0)}
    change_tensors(tmp_path, lambda tensors: tensors | idle)
    torch.testing.assert_close(logits(tmp_path), expected)

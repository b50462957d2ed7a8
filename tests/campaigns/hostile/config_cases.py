"""Malicious config.json files, and code that they refer to."""

from tests.campaigns.hostile.directories import (
    WEIGHTS,
    Case,
    code,
    config,
    content,
    directory,
    link,
    pickled,
    pipe,
    remove,
    sparse,
)

CONFIG = "config.json"
HUGE = 10**9

CONFIGS = {
    "no config": Case(remove(CONFIG), "has weights but no config.json"),
    "config is a pickle": Case(content(CONFIG, b"cos\nsystem\n(S'true'\ntR."), "not valid JSON"),
    "config is empty": Case(content(CONFIG, ""), "not valid JSON"),
    "config is a list": Case(content(CONFIG, "[1, 2]"), "not a JSON object"),
    "config is not UTF-8": Case(content(CONFIG, b'{"a": "\xff"}'), "is not UTF-8"),
    "config with a duplicate key": Case(
        content(CONFIG, '{"model_type": "llama", "model_type": "gpt2"}'),
        "'model_type' occurs twice",
    ),
    "config with 100,000 nested lists": Case(
        content(CONFIG, '{"a": ' + "[" * 100_000), "nested deeper"
    ),
    "config with 500 nested lists": Case(
        content(CONFIG, '{"a": ' + "[" * 500 + "]" * 500 + "}"), "nested deeper"
    ),
    "config with nested text configs": Case(
        content(CONFIG, '{"text_config": ' * 900 + "{}" + "}" * 900), "nested deeper"
    ),
    "config of empty lists": Case(
        content(CONFIG, '{"a": [' + "[]," * 1_200_000 + "[]]}"), "more than 850000 values"
    ),
    "config of 10 GB": Case(sparse(CONFIG, 10 * 2**30), "is larger than"),
    "an integer of 10,000 digits": Case(
        content(CONFIG, '{"a": ' + "9" * 10_000 + "}"), "not valid JSON"
    ),
    "not a number": Case(content(CONFIG, '{"rms_norm_eps": NaN}'), "NaN is not a JSON number"),
    "infinite": Case(content(CONFIG, '{"rope_theta": 1e999}'), "too large for a float"),
    "config is a pipe": Case(pipe(CONFIG), "is a special file"),
    "config is a folder": Case(directory(CONFIG), "is a folder"),
    "config is a link to a device": Case(link(CONFIG, "/dev/zero"), "link out of its folder"),
    "config is outside": Case(link(CONFIG, "../outside/config.json"), "link out of its folder"),
    "config is a link to itself": Case(link(CONFIG, CONFIG), "has weights but no config.json"),
}
SIZES = {
    "a billion layers": Case(config(num_hidden_layers=HUGE), "num_hidden_layers"),
    "ten thousand layers": Case(config(num_hidden_layers=9_999), "layers"),
    "half a layer": Case(config(num_hidden_layers=0.5), "num_hidden_layers"),
    "a negative number of layers": Case(config(num_hidden_layers=-1), "n_layers"),
    "a vocabulary of 2^62": Case(config(vocab_size=2**62), "does not describe a possible model"),
    "a vocabulary of 2^31": Case(config(vocab_size=2**31), "embed_tokens"),
    "a negative vocabulary size": Case(config(vocab_size=-5), "vocab_size"),
    "a width of 10^12": Case(config(hidden_size=10**12), "does not describe a possible model"),
    "a width of 2^40": Case(config(hidden_size=2**40, head_dim=8), "embed_tokens"),
    "a feed-forward of 2^61": Case(
        config(intermediate_size=2**61), "does not describe a possible model"
    ),
    "no heads": Case(config(num_attention_heads=0), "n_heads"),
    "a billion heads": Case(config(num_attention_heads=HUGE), "n_heads"),
    "heads of width 2^40": Case(config(head_dim=2**40), "q_proj"),
    "key heads that do not divide the heads": Case(config(num_key_value_heads=3), "n_kv_heads"),
    "a context of 10^18": Case(config(max_position_embeddings=10**18), None),
    "a width that is a string": Case(config(hidden_size="16"), "hidden_size"),
    "a width that is true": Case(config(hidden_size=True), "hidden_size"),
    "a width that is a list": Case(config(hidden_size=[16] * 1000), "hidden_size"),
    "a width that is a mapping": Case(config(hidden_size={"a": 1}), "hidden_size"),
    "no width": Case(config(hidden_size=...), "hidden_size"),
    "an epsilon that is Python code": Case(config(rms_norm_eps="__import__('os')"), "rms_norm_eps"),
    "a negative epsilon": Case(config(rms_norm_eps=-1.0), "eps"),
    "theta of zero": Case(config(rope_theta=0), "theta"),
    "unknown RoPE type": Case(config(rope_scaling={"rope_type": "evil", "factor": 2.0}), "evil"),
    "many layer types": Case(config(layer_types=["full_attention"] * 200_000), None),
    "an unknown activation": Case(config(hidden_act="__class__"), "hidden_act"),
    "text config is a list": Case(config(text_config=[1, 2, 3]), None),
    "text config inside a text config": Case(
        config(model_type="llava", text_config={"text_config": {}}), "model_type"
    ),
    "text config with a billion layers": Case(
        config(text_config={"model_type": "llama", "num_hidden_layers": HUGE}), "num_hidden_layers"
    ),
    "no model type": Case(config(model_type=...), "model_type"),
    "model type is a list": Case(config(model_type=["llama"]), "model_type"),
    "unknown model type": Case(config(model_type="evil"), "evil"),
    "model type is a path": Case(config(model_type="../../outside/evil"), "outside/evil"),
    "model type is a module": Case(config(model_type="os"), "'os'"),
    "model type of a megabyte": Case(config(model_type="x" * 1_000_000), "x"),
    "_name_or_path points outside": Case(config(_name_or_path="../outside"), None),
}
CODE = {
    "code for a known type": Case(
        code("modeling_evil.py", auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"}), None
    ),
    "code for an unknown type": Case(
        code(
            "modeling_evil.py",
            model_type="evil",
            auto_map={"AutoConfig": "modeling_evil.Evil", "AutoModel": "modeling_evil.Evil"},
        ),
        "evil",
    ),
    "a module named like a library": Case(
        code("torch.py", auto_map={"AutoModel": "torch.x"}), None
    ),
    "code in another repository": Case(
        config(auto_map={"AutoModelForCausalLM": "outside/repo--modeling.Evil"}), None
    ),
    "weights are a pickle": Case(pickled("pytorch_model.bin", by_torch=True), "can run code"),
    "weights are a bare pickle": Case(pickled("model.ckpt"), "can run code"),
    "a pickle named safetensors": Case(pickled(WEIGHTS), WEIGHTS),
    "a zip named safetensors": Case(pickled(WEIGHTS, by_torch=True), WEIGHTS),
    "an unsupported quantization method": Case(
        config(quantization_config={"quant_method": "gptq"}), "method 'gptq' is not supported"
    ),
    "quantization config is a list": Case(
        config(quantization_config=[]), "quantization_config is []"
    ),
    "quantization config that names code": Case(
        config(quantization_config={"quant_method": "bitsandbytes", "modules": "os.system"}),
        "method 'bitsandbytes' is not supported",
    ),
}
CASES: dict[str, Case] = CONFIGS | SIZES | CODE

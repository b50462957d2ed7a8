"""Unsupported model types of transformers, grouped by kind of model."""

from fnmatch import fnmatchcase

OTHER_KINDS = {
    "a state-space model": "mamba mamba2 falcon_mamba",
    "a recurrent or linear-attention model": "rwkv* recurrent_gemma xlstm minimax",
    "a hybrid of attention and state-space, linear-attention or convolution layers": (
        "bailing_hybrid bamba falcon_h1 granitemoehybrid inkling* jamba kimi_linear lfm2* lfm3* "
        "nemotron_h* olmo_hybrid qwen3_next qwen3_5* qwen4_exp* zamba zamba2 zaya"
    ),
    "a model with sparse attention that selects its keys": (
        "axk2 deepseek_v32 deepseek_v4 doge dots3_note* glm_moe_dsa hy_v4 minimax_m3*"
    ),
    "a model with shared, nested or repeated layers": ("gemma3n* gemma4* hrm_text longcat_flash"),
    "a diffusion language model": "diffusion_gemma dream llada* sdar*",
    "a model with bytes, hashes or segments instead of tokens": "blt cpmant reformer",
    "an image, audio or video model": (
        "*_vl *_vl_* *asr *audio* *flamingo* *llava* *ocr* *omni* *speech* *vision* *vlm* blip* "
        "chameleon cosmos3* emu3 evolla florence2 fuyu git glm46v* glm4v* idefics* "
        "instructblip* internvl janus kimi_k25 kosmos* mllama molmo* moshi moss_* musicgen* "
        "ovis2 paligemma perception_lm phi4_multimodal pi0 pix2struct smolvlm trocr udop "
        "voxtral* whisper"
    ),
    "an encoder": (
        "*bert *bert-* *bert_* *roberta* albert deberta* big_bird data2vec-text electra ernie "
        "esm esmc fnet funnel layoutlm* longformer luke mpnet mra nystromformer perceiver "
        "roformer squeezebert tapas xlm* xlnet xmod yoso"
    ),
    "an encoder-decoder": (
        "*bart bigbird_pegasus blenderbot* fsmt led longt5 m2m_100 marian mt5 mvp nllb-moe "
        "pegasus* prophetnet seamless* switch_transformers t5* umt5"
    ),
}
"""Name patterns by kind. Supported model types are not looked up here."""


def other_kind(model_type: str) -> str | None:
    """Kind of a model type, if it is known and not supported; else None."""
    for kind, names in OTHER_KINDS.items():
        if any(fnmatchcase(model_type, name) for name in names.split()):
            return kind
    return None

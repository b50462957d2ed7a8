"""Parts shared by several of llama.cpp's architectures; their sizes are placeholders."""

from workhorse.checkpoints.gguf.field_paths import Data
from workhorse.nn import AttentionConfig
from workhorse.nn.attention.qk_norm import QKNormConfig
from workhorse.nn.blocks import BlockConfig, PreNormConfig
from workhorse.nn.feedforward import GatedMlpConfig, MlpConfig
from workhorse.nn.head import HeadConfig
from workhorse.nn.norms import LayerNormConfig, RMSNormConfig
from workhorse.nn.positions.absolute import NoPositionConfig
from workhorse.nn.positions.rope import RopeConfig

RMS = RMSNormConfig()
LAYER = LayerNormConfig()
BIASLESS = LayerNormConfig(bias=False)

ROTARY = AttentionConfig(n_heads=1, position=RopeConfig())
LOCAL = ROTARY.replace(window=1)
NO_POSITION = ROTARY.replace(position=NoPositionConfig())
BIASED = ROTARY.replace(qkv_bias=True, out_bias=True)
HEAD_NORM = QKNormConfig(norm=RMS)
FULL_NORM = QKNormConfig(norm=RMS, over="full")

SWIGLU = GatedMlpConfig(d_ff=1)
GEGLU = GatedMlpConfig(d_ff=1, activation="gelu_tanh")
GELU = MlpConfig(d_ff=1, activation="gelu_tanh")
BIASED_GELU = GELU.replace(bias=True)

TIED = HeadConfig(tied=True)
LLAMA = PreNormConfig(norm=RMS, attention=ROTARY, feed_forward=SWIGLU)

QKV = ("attn_q", "attn_k", "attn_v")
GATE_UP = ("ffn_gate", "ffn_up")
REORDERED = {"attention_norm": "post_attention_norm", "feed_forward_norm": "post_ffw_norm"}

TIE, ATTENTION_BIASES = "head.tied", ("attention.qkv_bias", "attention.out_bias")


def turns(block: BlockConfig) -> bool:
    """Whether a layer has rotary positions."""
    return block.rope is not None


def divided_logits(keys: Data) -> Data:
    """Granite: the file holds the divisor of the logits, our config the multiplier."""
    return {"head.multiplier": 1 / keys["logit_scale"]}


def local_layers_unscaled(data: Data) -> str | None:
    """Layers with a window have the unscaled rotation, whatever the others have."""
    for layer in data["layers"]:
        attention = layer["attention"]
        if attention["window"] is not None and attention["position"].get("scaling") is not None:
            return "the rotation of a layer with a window is scaled"
    return None


def some_window(data: Data) -> str | None:
    """llama.cpp assumes that at least one layer has a window."""
    windows = (layer["attention"]["window"] for layer in data["layers"])
    return None if any(windows) else "no layer has a sliding window"


def no_position_every_fourth(data: Data) -> str | None:
    """Layers 4, 8, 12 … have no positions, and no other."""
    for number, layer in enumerate(data["layers"], start=1):
        if (layer["attention"]["position"]["kind"] == "none") != (number % 4 == 0):
            return f"layer {number} is not among every fourth without positions, or should be"
    return None


def windows_at_64_layers(data: Data) -> str | None:
    """EXAONE 4: 64 layers have windows and no positions elsewhere; other depths have neither."""
    attentions = [layer["attention"] for layer in data["layers"]]
    deep = len(attentions) == 64  # noqa: PLR2004 the published depth, which llama.cpp goes by
    for attention in attentions:
        wide, turning = attention["window"] is None, attention["position"]["kind"] == "rope"
        if (wide and deep) == turning or (not wide and not deep):
            return f"windows and positions are not as in EXAONE 4 of {len(attentions)} layers"
    return None


def equal_heads(data: Data) -> str | None:
    """The same number of heads for keys and values as for queries."""
    attention = data["layers"][0]["attention"]
    return None if attention["n_heads"] == attention["n_kv_heads"] else "its heads are grouped"


def fewer_than_64_layers(data: Data) -> str | None:
    """Cohere: llama.cpp requires norms on queries and keys from 64 layers on."""
    return None if data["n_layers"] < 64 else "64 layers or more need norms on queries and keys"  # noqa: PLR2004

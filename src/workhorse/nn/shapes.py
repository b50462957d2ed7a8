"""Named tensor shapes for the signatures of `nn`, which the tests check with beartype."""

from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

Tokens = Int[Tensor, "batch seq"]
"""Token ids, targets or document ids."""
Positions = Int[Tensor, "#batch seq"]
"""Positions counted from 0; -1 marks padding. A single row applies to all rows of the batch."""
KeyPositions = Int[Tensor, "#batch kv_seq"]
Lengths = Int[Tensor, "#batch #seq"]
"""Length, in tokens, of the sequence or document that each token belongs to."""
Hidden = Float[Tensor, "batch seq d_model"]
Slots = Shaped[Tensor, "batch seq back"]
"""One value for each of the last few tokens before a token."""
Logits = Float[Tensor, "batch seq vocab"]
NextLogits = Float[Tensor, "batch vocab"]
Queries = Float[Tensor, "batch heads seq head_dim"]
NewKeys = Float[Tensor, "batch kv_heads seq head_dim"]
"""Keys of the new tokens; `Keys` also include the keys of earlier tokens."""
NewValues = Float[Tensor, "batch kv_heads seq value_dim"]
Keys = Float[Tensor, "batch kv_heads kv_seq head_dim"]
Values = Float[Tensor, "batch kv_heads kv_seq value_dim"]
RotaryQueries = Float[Tensor, "batch heads seq rope_dim"]
"""The features of queries that RoPE rotates, if they are a separate tensor."""
Latents = Float[Tensor, "batch 1 kv_seq kv_rank"]
"""Latents from which keys and values are projected up: one vector for all heads."""
RotaryKeys = Float[Tensor, "batch 1 kv_seq rope_dim"]
HeadOutputs = Float[Tensor, "batch seq width"]
"""The concatenated outputs of all heads."""
SideBySide = Float[Tensor, "batch seq _"]
"""The concatenated queries, keys or values of all heads."""
AttentionOutput = Float[Tensor, "batch heads seq value_dim"]
Mask = Bool[Tensor, "#batch 1 seq kv_seq"]
"""True = attend."""
ScoreBias = Float[Tensor, "#batch heads #seq kv_seq"]
"""Bias added to the attention scores."""
Angles = Float[Tensor, "#batch 1 seq rotary_half"]
"""Cosines or sines of a rotation, the same for all heads."""

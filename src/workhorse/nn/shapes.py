"""Named shapes for the signatures of `nn`.

They are documentation that is checked: the tests run all of `nn` under jaxtyping and beartype.
"""

from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

Tokens = Int[Tensor, "batch seq"]
"""Token ids, or targets, or document numbers."""
Positions = Int[Tensor, "#batch seq"]
"""Positions counted from 0; -1 marks padding. A single row applies to all rows of the batch."""
KeyPositions = Int[Tensor, "#batch kv_seq"]
Lengths = Int[Tensor, "#batch #seq"]
"""Length, in tokens, of the text that each token belongs to."""
Hidden = Float[Tensor, "batch seq d_model"]
Slots = Shaped[Tensor, "batch seq back"]
"""Something about each of the few tokens before a token."""
Logits = Float[Tensor, "batch seq vocab"]
NextLogits = Float[Tensor, "batch vocab"]
Queries = Float[Tensor, "batch heads seq head_dim"]
NewKeys = Float[Tensor, "batch kv_heads seq head_dim"]
"""Keys of this call's tokens; `Keys` are all that may be attended to, earlier ones included."""
NewValues = Float[Tensor, "batch kv_heads seq value_dim"]
Keys = Float[Tensor, "batch kv_heads kv_seq head_dim"]
Values = Float[Tensor, "batch kv_heads kv_seq value_dim"]
RotaryQueries = Float[Tensor, "batch heads seq rope_dim"]
"""The rotated part of queries, where it is kept apart."""
Latents = Float[Tensor, "batch 1 kv_seq kv_rank"]
"""What keys and values are projected up from: one vector for all heads."""
RotaryKeys = Float[Tensor, "batch 1 kv_seq rope_dim"]
HeadOutputs = Float[Tensor, "batch seq width"]
"""All heads' outputs side by side."""
SideBySide = Float[Tensor, "batch seq _"]
"""The queries, keys or values of all heads, one after the other."""
AttentionOutput = Float[Tensor, "batch heads seq value_dim"]
Mask = Bool[Tensor, "#batch 1 seq kv_seq"]
"""True = attend."""
ScoreBias = Float[Tensor, "#batch heads #seq kv_seq"]
"""Added to the scores."""
Angles = Float[Tensor, "#batch 1 seq rotary_half"]
"""Cosines or sines of a rotation, the same for all heads."""

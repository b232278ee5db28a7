"""Traceable versions of torch modules whose own forward branches on values."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F  # noqa: N812

from evenly._torch.modules import uses_one_projection


def multihead(
    m: nn.MultiheadAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_padding_mask: torch.Tensor | None = None,
    need_weights: bool = True,
    attn_mask: torch.Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the output of multi-head attention; the weights only if `need_weights`."""
    if m.bias_k is not None or m.add_zero_attn:
        raise NotImplementedError("bias_k and add_zero_attn have no rule")
    if query.ndim != 3:
        raise NotImplementedError("attention without a batch dim has no rule")
    if attn_mask is not None and attn_mask.ndim == 3:  # [batch * heads, queries, keys]
        attn_mask = torch.unflatten(attn_mask, 0, (-1, m.num_heads))
    itself = key is query and value is query
    if not m.batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))  # [batch, tokens, channels]
    if uses_one_projection(m) and itself:
        q, k, v = F.linear(query, m.in_proj_weight, m.in_proj_bias).chunk(3, dim=-1)
    else:
        weights = (
            m.in_proj_weight.chunk(3, dim=0)
            if uses_one_projection(m)
            else (m.q_proj_weight, m.k_proj_weight, m.v_proj_weight)
        )
        biases = m.in_proj_bias.chunk(3, dim=0) if m.in_proj_bias is not None else (None, None, None)
        q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
    q, k, v = (torch.unflatten(x, -1, (m.num_heads, m.head_dim)).transpose(1, 2) for x in (q, k, v))  # [b, heads, t, d]
    mask = attention_mask(q.dtype, key_padding_mask, attn_mask)
    dropout = m.dropout if m.training else 0.0
    weights_out: torch.Tensor | None = None
    if need_weights:
        scores = (q * m.head_dim**-0.5) @ k.transpose(-2, -1)
        shares = torch.softmax(scores if mask is None else scores + mask, dim=-1)
        mixed = F.dropout(shares, m.dropout, training=m.training) @ v if m.dropout else shares @ v
        weights_out = shares.mean(dim=1) if average_attn_weights else shares
    else:
        causal = is_causal and mask is None
        mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal)
    out = m.out_proj(mixed.transpose(1, 2).flatten(2))
    return out if m.batch_first else out.transpose(0, 1), weights_out


def attention_mask(kind: torch.dtype, padding: torch.Tensor | None, mask: torch.Tensor | None) -> torch.Tensor | None:
    """Returns both masks as one float mask that broadcasts to [batch, heads, queries, keys]."""
    if mask is None and padding is None:
        return None
    if mask is not None:
        mask = float_mask(mask, kind)
    if padding is None:
        return mask
    wide = float_mask(padding, kind).unsqueeze(1).unsqueeze(1)  # [b, 1, 1, keys]
    return wide if mask is None else wide + mask


@fx.wrap
def float_mask(mask: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Returns a mask to be added: -inf where a boolean mask is true; other masks as they are."""
    if mask.dtype is not torch.bool:
        return mask.to(kind)
    return torch.zeros_like(mask, dtype=kind).masked_fill(mask, float("-inf"))


def encoder_layer(
    m: nn.TransformerEncoderLayer,
    src: torch.Tensor,
    src_mask: torch.Tensor | None = None,
    src_key_padding_mask: torch.Tensor | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    """Returns one encoder layer's output, without torch's fused fast path."""

    def attend(x: torch.Tensor) -> torch.Tensor:
        mixed = m.self_attn(
            x, x, x, key_padding_mask=src_key_padding_mask, need_weights=False, attn_mask=src_mask, is_causal=is_causal
        )[0]
        out: torch.Tensor = m.dropout1(mixed)
        return out

    def feed(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = m.dropout2(m.linear2(m.dropout(m.activation(m.linear1(x)))))
        return out

    if m.norm_first:
        src = src + attend(m.norm1(src))
        return src + feed(m.norm2(src))
    src = m.norm1(src + attend(src))
    done: torch.Tensor = m.norm2(src + feed(src))
    return done


def encoder(
    m: nn.TransformerEncoder,
    src: torch.Tensor,
    mask: torch.Tensor | None = None,
    src_key_padding_mask: torch.Tensor | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    """Returns the output of a stack of encoder layers."""
    for layer in m.layers:
        src = layer(src, src_mask=mask, src_key_padding_mask=src_key_padding_mask, is_causal=bool(is_causal))
    return src if m.norm is None else m.norm(src)


def decoder(
    m: nn.TransformerDecoder,
    tgt: torch.Tensor,
    memory: torch.Tensor,
    tgt_mask: torch.Tensor | None = None,
    memory_mask: torch.Tensor | None = None,
    tgt_key_padding_mask: torch.Tensor | None = None,
    memory_key_padding_mask: torch.Tensor | None = None,
    tgt_is_causal: bool | None = None,
    memory_is_causal: bool = False,
) -> torch.Tensor:
    """Returns the output of a stack of decoder layers."""
    masks = {"tgt_mask": tgt_mask, "memory_mask": memory_mask, "tgt_key_padding_mask": tgt_key_padding_mask}
    for layer in m.layers:
        tgt = layer(
            tgt,
            memory,
            memory_key_padding_mask=memory_key_padding_mask,
            tgt_is_causal=bool(tgt_is_causal),
            memory_is_causal=memory_is_causal,
            **masks,
        )
    return tgt if m.norm is None else m.norm(tgt)


def gated(m: nn.GLU, x: torch.Tensor) -> torch.Tensor:
    """Returns the first half of a dim, scaled by the sigmoid of the second."""
    first, second = x.chunk(2, dim=m.dim)
    return first * torch.sigmoid(second)


States = torch.Tensor | tuple[torch.Tensor, torch.Tensor]  # of an LSTM those of the hidden units and of the cells


def recurrent_module(
    m: nn.RNNBase, input: torch.Tensor, hx: States | None = None
) -> tuple[torch.Tensor, torch.Tensor | tuple[torch.Tensor, ...]]:
    """Returns the outputs and last states of an LSTM, GRU or RNN; with dropout, layer by layer."""
    if input.ndim != 3:
        raise NotImplementedError(f"{type(m).__name__} without a batch dim has no rule")
    first_states: Any = () if hx is None else hx if m.mode == "LSTM" else (hx,)  # a traced value may be a tuple
    directions = 2 if m.bidirectional else 1
    layers_per_call = 1 if m.dropout else m.num_layers  # dropout comes between layers
    x, last_states = input, []
    for number in range(0, m.num_layers, layers_per_call):
        rows = slice(number * directions, (number + layers_per_call) * directions)
        x, *states = recurrent(
            x if number == 0 or not m.dropout else F.dropout(x, m.dropout, training=m.training),
            [state[rows] for state in first_states] if m.dropout else list(first_states),
            [weight for weights in m.all_weights[rows] for weight in weights],
            m.mode,
            layers_per_call,
            m.bias,
            m.training,
            m.bidirectional,
            m.batch_first,
        )
        last_states.append(states)
    joined = tuple(rows[0] if len(rows) == 1 else torch.cat(rows) for rows in zip(*last_states, strict=True))
    return x, joined if m.mode == "LSTM" else joined[0]


@fx.wrap
def recurrent(
    x: torch.Tensor,
    states: Sequence[torch.Tensor],
    weights: list[torch.Tensor],
    mode: str,
    num_layers: int,
    has_biases: bool,
    training: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, ...]:
    """Returns the outputs of recurrent layers without dropout, the last hidden states, and of an LSTM the last cells.

    Args:
        x: [batch, steps, features] or, without `batch_first`, [steps, batch, features].
        states: the first hidden states [layers * directions, batch, units], of an LSTM also the first cells; none of
            them for zeros.
        weights: of all layers and directions, in torch's order.
        mode: LSTM, GRU, RNN_TANH or RNN_RELU.
        num_layers: the number of layers.
        has_biases: whether biases are among the weights.
        training: whether the module is in training.
        bidirectional: whether each layer also runs backwards.
        batch_first: whether the batch is dim 0 of x.
    """
    units = [weights[1].shape[1]]  # less than the cells if an LSTM projects its hidden states
    units += [weights[1].shape[0] // 4] if mode == "LSTM" else []
    rows, samples = num_layers * (2 if bidirectional else 1), x.shape[0 if batch_first else 1]
    shapes = [(rows, samples, size) for size in units]
    if states and [tuple(state.shape) for state in states] != shapes:
        found = [tuple(state.shape) for state in states]
        raise RuntimeError(f"states of shapes {found} were given to a module of mode {mode}, which needs {shapes}")
    states = list(states) or [x.new_zeros(shape) for shape in shapes]
    if x.is_meta:
        return _recurrent_shapes(x, states, weights, mode, num_layers, has_biases, bidirectional, batch_first)
    run: Any = {"LSTM": torch.lstm, "GRU": torch.gru, "RNN_TANH": torch.rnn_tanh, "RNN_RELU": torch.rnn_relu}[mode]
    first = states if mode == "LSTM" else states[0]
    return tuple(run(x, first, weights, has_biases, num_layers, 0.0, training, bidirectional, batch_first))


def _recurrent_shapes(
    x: torch.Tensor,
    states: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    mode: str,
    num_layers: int,
    has_biases: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, ...]:
    """Returns what `recurrent` gives on the meta device, in products over all steps: torch would run each step."""
    directions = 2 if bidirectional else 1
    count = len(weights) // (num_layers * directions)
    for layer in range(num_layers):
        outputs = []
        for row in range(layer * directions, (layer + 1) * directions):
            inward, recurrence, *others = weights[row * count : (row + 1) * count]
            biases, projections = (others[:2], others[2:]) if has_biases else ([], others)
            gates = x @ inward.t() + sum(biases) + sum(state[row].sum() for state in states)  # [., ., gates * units]
            units = gates.shape[-1] // {"LSTM": 4, "GRU": 3}.get(mode, 1)
            before = gates[..., : recurrence.shape[1]]
            y = (gates + before @ recurrence.t())[..., :units]
            outputs.append(y @ projections[0].t() if projections else y)
        x = torch.cat(outputs, -1)
    used = x.sum()
    return x, *(torch.empty_like(state) + used for state in states)


REWRITES: dict[type, Callable[..., object]] = {
    nn.MultiheadAttention: multihead,
    nn.TransformerEncoderLayer: encoder_layer,
    nn.TransformerEncoder: encoder,
    nn.TransformerDecoder: decoder,
    nn.GLU: gated,
    nn.LSTM: recurrent_module,
    nn.GRU: recurrent_module,
    nn.RNN: recurrent_module,
}

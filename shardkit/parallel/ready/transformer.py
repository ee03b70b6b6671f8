"""A plan for transformers: heads and hidden features cut, and the sequence between them."""

from __future__ import annotations

from collections.abc import Sequence

from shardkit.parallel.plans import ColWiseParallel, LayerPlan, RowWiseParallel, SequenceParallel
from shardkit.parallel.ready.guessing import Choice, Found, ReadyPlan
from shardkit.placements import AnyMesh

# Names that Flax, and models ported to it, give the layers of a block.
_COLUMN = frozenset(
    [
        "q",
        "k",
        "v",
        "qkv",
        "query",
        "key",
        "value",
        "q_proj",
        "k_proj",
        "v_proj",
        "qkv_proj",
        "up",
        "up_proj",
        "gate",
        "gate_proj",
        "fc1",
        "wi",
        "wi_0",
        "wi_1",
        "w1",
        "w3",
        "in_proj",
        "linear1",
        "c_fc",
        "c_attn",
    ]
)
_ROW = frozenset(
    ["o", "o_proj", "out", "out_proj", "proj", "down", "down_proj", "fc2", "wo", "w2", "linear2", "c_proj"]
)
_HEAD = frozenset(["head", "lm_head", "logits", "classifier", "decoder_head"])


def transformer(tp: str = "tp", sequence: bool = False, *, dim: int = 1, verbose: bool = True) -> ReadyPlan:
    """Tensor parallelism for a transformer, guessed from its layers when the plan meets the model.

    Attention is cut by heads, embeddings by vocabulary, and in a block the layers that widen by column and those that
    come back by row (by their names, else by their sizes); a head whose classes the axis divides by column, with its
    logits left cut over classes. What doesn't fit is left whole, and the printed table says why. Source: M. Shoeybi et
    al., "Megatron-LM", https://arxiv.org/abs/1909.08053.

    Args:
      tp: the mesh axis.
      sequence: activations between blocks are cut over the sequence too (``sk.SequenceParallel``).
      dim: the sequence's dim.
      verbose: print what was chosen.

    Returns:
      A dictionary: what you set in it stands in for the guess.

    Example:
      >>> import shardkit as sk
      >>> from flax import nnx
      >>> model = nnx.Sequential(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.gelu, nnx.Linear(8, 4, rngs=nnx.Rngs(1)))
      >>> sk.plans.transformer(tp="tp", verbose=False).guess(model)
      {'layers/0': [ColWiseParallel(axis='tp', gather_output=False)], 'layers/2': [RowWiseParallel(axis='tp', is_input_parallel=True)]}
    """  # noqa: E501
    column, row = ColWiseParallel(tp), RowWiseParallel(tp)
    cut = SequenceParallel(tp, dim)

    def guess(layers: Sequence[Found], mesh: AnyMesh | None) -> list[Choice]:
        size = 1 if mesh is None else mesh.shape[tp]
        pairs = _pairs(layers, size)
        attention = [layer.path for layer in layers if layer.kind == "attention"]
        vocabularies = {layer.inputs for layer in layers if layer.kind == "embedding"}
        choices = []
        for layer in layers:
            if any(layer.path.startswith(above + "/") for above in attention):
                continue
            chosen = _choose(layer, size, pairs, vocabularies, column, row)
            if chosen is None and sequence and layer.kind in ("norm", "dropout"):
                choices.append(Choice(layer.path, layer.name, (cut,), "between cut layers"))
            elif chosen is not None:
                plan, why = chosen
                both: tuple[LayerPlan, ...] = () if plan is None else (plan, cut) if sequence else (plan,)
                choices.append(Choice(layer.path, layer.name, both, why))
        return choices

    return ReadyPlan(f"sk.plans.transformer(tp={tp!r}, sequence={sequence})", guess, verbose)


def _choose(
    layer: Found,
    size: int,
    pairs: dict[str, str],
    vocabularies: set[int],
    column: ColWiseParallel,
    row: RowWiseParallel,
) -> tuple[LayerPlan | None, str] | None:
    """The plan of a layer and why, or None for a layer that says nothing of itself."""
    if layer.kind == "attention":
        heads = f"{layer.heads} heads" + (f", {layer.kv_heads} for keys" if layer.kv_heads != layer.heads else "")
        if layer.heads % size or layer.kv_heads % size:
            return None, f"whole: {heads} can't be dealt out to {size} devices"
        return column, heads
    if layer.kind == "embedding":
        if layer.inputs % size:
            return None, f"whole: {size} devices don't divide a vocabulary of {layer.inputs}"
        return row, f"vocabulary of {layer.inputs}"
    if layer.kind != "linear":
        return None
    if layer.path in pairs:
        return (column if pairs[layer.path] == "column" else row), f"{layer.inputs} -> {layer.outputs}"
    if layer.last in _HEAD or (layer.outputs in vocabularies and layer.outputs > layer.inputs):
        if layer.outputs % size:
            return None, f"whole: {size} devices don't divide {layer.outputs} classes"
        return column, f"{layer.outputs} classes, which stay cut"
    return None, f"whole: {layer.inputs} -> {layer.outputs} has no counterpart in {layer.parent or 'the model'!r}"


def _pairs(layers: Sequence[Found], size: int) -> dict[str, str]:
    """Linear layers that are column or row layers, by path: of each parent those with a counterpart that divide."""
    groups: dict[str, list[Found]] = {}
    for layer in layers:
        if layer.kind == "linear" and layer.last not in _HEAD:
            groups.setdefault(layer.parent, []).append(layer)
    found = {}
    for group in groups.values():
        sides = {layer.path: _side(layer) for layer in group}
        columns = [layer for layer in group if sides[layer.path] == "column" and layer.outputs % size == 0]
        rows = [layer for layer in group if sides[layer.path] == "row" and layer.inputs % size == 0]
        if columns and rows:
            found |= {layer.path: sides[layer.path] for layer in (*columns, *rows)}
    return found


def _side(layer: Found) -> str | None:
    name = layer.last.lower()
    if name in _COLUMN:
        return "column"
    if name in _ROW:
        return "row"
    if layer.outputs == layer.inputs:
        return None
    return "column" if layer.outputs > layer.inputs else "row"

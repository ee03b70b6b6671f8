"""Convolutions and pooling on blocks: forward, and as reverse and forward mode write them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardkit as sk
from shardkit.spmd.local import Here
from shardkit.spmd.placed import block_shape, to_layout
from shardkit.spmd.rules import RULES, Op, Type
from shardkit.spmd.trace import trace
from tests.spmd.rule_cases import check, found, placed

TWO = {"dp": 2, "sp": 4}
ALL = {"sp": 8}
WHOLE = placed(None, None, None, None)
LAST = ("NHWC", "HWIO", "NHWC")
FIRST = ("NCHW", "OIHW", "NCHW")


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


# --- helpers ------------------------------------------------------------------------------------------


def ops_of(fun, *args, name):
    """Every operation of this name in a function, as a function by itself, with what it's given."""
    graph, _ = trace(fun, *args)
    nodes = [n for n in graph.nodes if n.op.name == name]
    made = []
    for node in nodes:
        bind = node.op.primitive.bind
        values = [normal(*t.shape, seed=i).astype(t.dtype) for i, t in enumerate(node.op.operands)]
        made.append((lambda *a, bind=bind, params=node.op.params: bind(*a, **params), values))
    return made


def convolutions(x, kernel, strides, padding, numbers=LAST, **more):
    """The convolution, its kernel's gradient and its input's, as reverse mode has them."""

    def loss(x, kernel):
        y = lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=numbers, **more)
        return (y**2).sum()

    forward, *back = ops_of(jax.grad(loss, (0, 1)), x, kernel, name="conv_general_dilated")
    to_kernel = next(b for b in back if b[1][0].shape == x.shape)
    (to_input,) = (b for b in back if b is not to_kernel)
    return forward, to_kernel, to_input


def collectives(way, node, sizes):
    """What one strategy compiles to."""
    mesh = sk.make_mesh(sizes)
    layouts = [to_layout(p, mesh) for p in way.operands]
    outs = [to_layout(p, mesh) for p in way.results]

    def body(*blocks):
        out = Here(sizes).run(node.op, way, blocks)
        return [f.reshape((1,) * len(la.partial_axes) + f.shape) for f, la in zip(out, outs, strict=True)]

    args = []
    for t, p, la in zip(node.op.operands, way.operands, layouts, strict=True):
        block = block_shape(t.shape, p, sizes)
        whole = tuple(b * np.prod([sizes[a] for a in axes], dtype=int) for b, axes in zip(block, p.dims, strict=True))
        args.append(jax.ShapeDtypeStruct(whole, t.dtype, sharding=jax.NamedSharding(mesh, la.stack_spec(la.ndim))))
    specs = tuple(la.stack_spec(la.ndim) for la in layouts)
    fun = jax.shard_map(
        body, mesh=mesh, in_specs=specs, out_specs=[la.stack_spec(la.ndim) for la in outs], check_vma=False
    )
    return sk.collectives(jax.jit(fun), *args)


def check_halo(fun, args, places, sizes, result, permutes=None):
    """Checks every strategy; the one with this result, operands where they are, sends permutes only, as it says."""
    ways = check(fun, args, places, sizes)
    (way,) = (w for w in ways if w.results == (result,) and w.operands == tuple(places))
    _, node, _ = found(fun, args, places, sizes)
    report = collectives(way, node, sizes)
    assert set(report.by_kind()) <= {"collective_permute"}, str(report)
    assert report.bytes() == way.bytes
    count = sum(t.count for t in way.traffic)
    assert len(report) == count
    assert permutes in (None, count)
    return way


def halo_key(way):
    return [(read.halos, read.kind) for read in way.run.reads]


# --- convolutions: letters ----------------------------------------------------------------------------


@pytest.mark.not_smoke
def test_conv_batch_and_features():
    x, k = normal(4, 5, 6, 8), normal(3, 3, 8, 12)
    (conv, args), *_ = convolutions(x, k, (1, 1), "SAME")
    sizes = {"dp": 2, "tp": 4}
    ways = check(conv, args, [placed("dp", None, None, "tp"), placed(None, None, "tp", None)], sizes)
    assert placed("dp", None, None, None, partial=("tp",)) in {w.results[0] for w in ways}
    ways = check(conv, args, [placed("dp", None, None, None), placed(None, None, None, "tp")], sizes)
    assert placed("dp", None, None, "tp") in {w.results[0] for w in ways}
    assert min(w.flops for w in ways) * 8 == max(w.flops for w in ways) == 2 * 4 * 5 * 6 * 12 * 9 * 8


@pytest.mark.not_smoke
def test_conv_uneven_features_and_partial():
    (conv, args), *_ = convolutions(normal(4, 5, 6, 6), normal(3, 3, 6, 3), (1, 1), "SAME")
    sizes = {"dp": 2, "tp": 4}
    check(conv, args, [placed(None, None, None, "tp"), placed(None, None, "tp", "dp")], sizes)
    ways = check(conv, args, [placed("dp", None, None, None, partial=("tp",)), WHOLE], sizes)
    assert placed("dp", None, None, None, partial=("tp",)) in {w.results[0] for w in ways}
    ways = check(conv, args, [WHOLE, placed(None, None, None, None, partial=("tp",))], sizes)
    assert placed(None, None, None, None, partial=("tp",)) in {w.results[0] for w in ways}


@pytest.mark.parametrize(("groups", "inputs", "outputs"), [(8, 8, 16), (4, 8, 8)])
def test_conv_groups_cut(groups, inputs, outputs):
    """Whole groups on each device: depthwise convolutions under channel sharding, and their gradients."""
    x, k = normal(2, 4, 5, inputs), normal(3, 3, inputs // groups, outputs)
    sizes = {"dp": 2, "tp": 4}
    forward, to_kernel, to_input = convolutions(x, k, (1, 1), "SAME", feature_group_count=groups)
    channels = placed(None, None, None, "tp")
    ways = check(*forward, [channels, channels], sizes)
    assert channels in {w.results[0] for w in ways if w.operands == (channels, channels)}
    ways = check(*to_kernel, [channels, channels], sizes)
    assert channels in {w.results[0] for w in ways if w.operands == (channels, channels)}
    swapped = placed(None, None, "tp", None)  # in and out features change places within a group
    ways = check(*to_input, [channels, swapped], sizes)
    assert channels in {w.results[0] for w in ways if w.operands == (channels, swapped)}


def test_conv_groups_that_do_not_divide_stay_whole():
    forward, *_ = convolutions(normal(2, 4, 5, 6), normal(3, 3, 2, 12), (1, 1), "SAME", feature_group_count=3)
    ways = check(*forward, [placed(None, None, None, "tp"), placed(None, None, None, "tp")], {"tp": 2})
    assert {w.results[0] for w in ways} == {WHOLE}


def test_conv_batch_groups():
    (conv, args), *_ = convolutions(normal(8, 4, 5, 3), normal(3, 3, 3, 8), (1, 1), "SAME", batch_group_count=2)
    ways = check(conv, args, [placed("dp", None, "sp", None), WHOLE], TWO)
    assert placed(None, None, "sp", "dp") in {w.results[0] for w in ways}


# --- convolutions: space ------------------------------------------------------------------------------

CONVS = {
    "same": {"kernel": 3, "strides": (1, 1), "padding": "SAME"},
    "stride": {"kernel": 3, "strides": (1, 2), "padding": "SAME"},
    "even kernel": {"kernel": 4, "strides": (1, 2), "padding": "SAME"},
    "wide": {"kernel": 5, "strides": (1, 1), "padding": "SAME", "rhs_dilation": (1, 2)},
    "valid": {"kernel": 3, "strides": (1, 1), "padding": "VALID"},
    "valid stride": {"kernel": 2, "strides": (1, 2), "padding": "VALID"},
    "skip": {"kernel": 1, "strides": (1, 2), "padding": "SAME"},
    "transposed": {"kernel": 3, "strides": (1, 1), "padding": ((1, 1), (2, 1)), "lhs_dilation": (1, 2)},
    "cropped": {"kernel": 3, "strides": (1, 3), "padding": ((0, 0), (-1, 2)), "lhs_dilation": (1, 2)},
    "groups": {"kernel": 3, "strides": (1, 1), "padding": "SAME", "feature_group_count": 2},
}


def check_conv_in_space(width, sizes, kernel, strides, padding, features=(4, 6), feature_group_count=1, **more):
    """A convolution and both of its gradients, batch over "dp" and width over "sp"."""
    dp = "dp" if "dp" in sizes else None
    x = normal(4, 4, width, features[0])
    k = normal(2, kernel, features[0] // feature_group_count, features[1])
    forward, to_kernel, to_input = convolutions(x, k, strides, padding, feature_group_count=feature_group_count, **more)
    cut = placed(dp, None, "sp", None)
    partial = placed(None, None, None, None, partial=(dp, "sp") if dp else ("sp",))
    one = check_halo(*forward, [cut, WHOLE], sizes, cut)
    two = check_halo(*to_kernel, [cut, cut], sizes, partial)
    check_halo(*to_input, [cut, WHOLE], sizes, cut)
    assert halo_key(one) == halo_key(two), "one exchange for both"


# Others have the same: "even kernel" a stride, and of those below patches, uneven space and eight devices.
ALIKE = {"stride", "valid stride", "transposed", "wide"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in ALIKE else n for n in CONVS if n != "valid"]
)
def test_conv_in_space(name):
    check_conv_in_space(24, TWO, **CONVS[name])


@pytest.mark.parametrize(
    ("width", "name"), [pytest.param(13, "same", marks=pytest.mark.slow), (26, "valid"), (13, "transposed")]
)
@pytest.mark.not_smoke
def test_conv_in_uneven_space(width, name):
    check_conv_in_space(width, TWO, **CONVS[name])


@pytest.mark.not_smoke
def test_kernel_gradient_of_an_uneven_batch():
    _, to_kernel, _ = convolutions(normal(3, 2, 13, 2), normal(1, 3, 2, 2), (1, 2), "SAME")
    cut = placed("dp", None, "sp", None)
    ways = check(*to_kernel, [cut, cut], TWO)
    assert placed(None, None, None, None, partial=("dp", "sp")) in {w.results[0] for w in ways}


@pytest.mark.not_smoke
def test_conv_on_eight():
    check_conv_in_space(21, ALL, **CONVS["even kernel"])
    check_conv_in_space(16, ALL, **CONVS["wide"])  # halos wider than a block


@pytest.mark.not_smoke
def test_conv_in_two_dims_channels_first():
    x, k = normal(2, 3, 8, 11), normal(4, 3, 3, 3)
    sizes = {"h": 2, "w": 4}
    forward, to_kernel, to_input = convolutions(x, k, (2, 1), "SAME", FIRST)
    cut = placed(None, None, "h", "w")
    one = check_halo(*forward, [cut, WHOLE], sizes, cut)
    two = check_halo(*to_kernel, [cut, cut], sizes, placed(None, None, None, None, partial=("h", "w")))
    check_halo(*to_input, [cut, WHOLE], sizes, cut)
    assert halo_key(one) == halo_key(two)


def test_conv_one_dim_by_two_axes():
    axes = ("b", "a")
    forward, to_kernel, _ = convolutions(normal(1, 2, 16, 2), normal(1, 3, 2, 2), (1, 1), "SAME")
    sizes = {"a": 2, "b": 4}
    cut = placed(None, None, axes, None)
    check_halo(*forward, [cut, WHOLE], sizes, cut, permutes=2)
    check_halo(*to_kernel, [cut, cut], sizes, placed(None, None, None, None, partial=("a", "b")), permutes=2)


@pytest.mark.not_smoke
def test_conv_in_space_and_features():
    """Features contracted over one axis, space cut by another, uneven ones too; the kernel's out features as well."""
    (conv, args), *_ = convolutions(normal(2, 4, 13, 6), normal(3, 3, 6, 6), (1, 1), "SAME")
    sizes = {"sp": 2, "tp": 4}
    x, k = placed(None, None, "sp", "tp"), placed(None, None, "tp", None)
    ways = check(conv, args, [x, k], sizes)
    assert placed(None, None, "sp", None, partial=("tp",)) in {w.results[0] for w in ways}
    ways = check(conv, args, [placed(None, None, "sp", None), placed(None, None, None, "tp")], sizes)
    assert placed(None, None, "sp", "tp") in {w.results[0] for w in ways}


@pytest.mark.not_smoke
def test_patches_need_no_communication():
    (conv, args), to_kernel, to_input = convolutions(normal(2, 4, 32, 3), normal(4, 4, 3, 5), (4, 4), "VALID")
    cut = placed(None, None, "sp", None)
    check_halo(conv, args, [cut, WHOLE], TWO, cut, permutes=0)
    check_halo(*to_kernel, [cut, cut], TWO, placed(None, None, None, None, partial=("sp",)), permutes=0)
    check_halo(*to_input, [cut, WHOLE], TWO, cut, permutes=0)


def test_conv_that_reads_everything_is_not_offered():
    """A kernel as long as the input: every device would need all of it, which is what gathering is for."""
    (conv, args), *_ = convolutions(normal(2, 2, 16, 3), normal(1, 31, 3, 3), (1, 1), "SAME")
    ways = check(conv, args, [placed(None, None, "sp", None), WHOLE], TWO)
    assert {w.results[0] for w in ways} == {WHOLE}


def test_conv_keeps_types():
    x, k = jnp.ones((2, 2, 16, 2), jnp.bfloat16), jnp.ones((1, 3, 2, 2), jnp.bfloat16)

    def conv(x, k):
        return lax.conv_general_dilated(
            x, k, (1, 1), "SAME", dimension_numbers=LAST, preferred_element_type=jnp.float32, precision="highest"
        )

    cut = placed(None, None, "sp", None)
    (way,) = (w for w in check(conv, (x, k), [cut, WHOLE], TWO) if w.results[0] == cut)
    assert sum(t.bytes * t.count for t in way.traffic) == 2 * (2 * 2 * 2 * 2)


def test_conv_of_nothing():
    conv = lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "VALID", dimension_numbers=LAST)  # noqa: E731
    _, _, ways = found(conv, (normal(2, 2, 2, 2), normal(1, 3, 2, 2)), [placed(None, None, "sp", None), WHOLE], TWO)
    assert {w.results[0] for w in ways} == {WHOLE}


# --- pooling ------------------------------------------------------------------------------------------

POOLS = {
    "aligned": {"window": 2, "stride": 2, "padding": (0, 0)},
    "overlapping": {"window": 3, "stride": 2, "padding": (1, 1)},
    "every": {"window": 3, "stride": 1, "padding": (1, 1)},
    "uneven": {"window": 4, "stride": 3, "padding": (0, 2)},
}


def pool(kind, window, stride, padding, dilation=1, base=1):
    init, fun = {"sum": (0.0, lax.add), "max": (-np.inf, lax.max), "min": (np.inf, lax.min)}[kind]
    along = lambda v: (1, v, v, 1)  # noqa: E731
    pads = ((0, 0), (1, 0), padding, (0, 0))
    return lambda x: lax.reduce_window(
        x, np.asarray(init, x.dtype), fun, along(window), along(stride), pads, along(base), along(dilation)
    )


CUT = placed("dp", None, "sp", None)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("sum", "every"), ("sum", "uneven"), ("max", "aligned"), ("max", "overlapping"), ("min", "every")],
)
@pytest.mark.every(2)
def test_pool_in_space(kind, name):
    way = check_halo(pool(kind, **POOLS[name]), (normal(4, 6, 16, 2),), [CUT], TWO, CUT)
    assert (not way.traffic) == (name == "aligned")


@pytest.mark.parametrize(("width", "kind", "name"), [(13, "max", "overlapping"), (22, "sum", "uneven")])
def test_pool_in_uneven_space(width, kind, name):
    check_halo(pool(kind, **POOLS[name]), (normal(3, 6, width, 2),), [CUT], TWO, CUT)


@pytest.mark.not_smoke
def test_pool_dilated():
    x = normal(2, 6, 16, 2)
    check_halo(pool("max", 3, 2, (2, 1), dilation=2), (x,), [CUT], TWO, CUT)
    check_halo(pool("sum", 3, 1, (1, 1), base=2), (x,), [CUT], TWO, CUT)
    check_halo(pool("min", 2, 3, (1, 1), base=2), (x,), [CUT], TWO, CUT)


@pytest.mark.not_smoke
def test_pool_two_dims_and_features():
    x = normal(1, 9, 16, 4)
    cut = placed(None, "h", "w", "c")
    sizes = {"h": 2, "w": 2, "c": 2}
    check_halo(pool("max", **POOLS["every"]), (x,), [cut], sizes, cut)
    check_halo(pool("sum", **POOLS["overlapping"]), (x,), [cut], sizes, cut)


@pytest.mark.not_smoke
def test_pool_integers():
    x = np.random.default_rng(0).integers(-9, 9, (2, 6, 13, 2))
    for init, fun in ((0, lax.add), (np.iinfo(x.dtype).min, lax.max)):
        fold = lambda x, i=init, f=fun: lax.reduce_window(x, i, f, (1, 1, 3, 1), (1, 1, 2, 1), "SAME")  # noqa: E731
        check_halo(fold, (x,), [CUT], TWO, CUT)


@pytest.mark.not_smoke
def test_pool_partial():
    sums, largest = pool("sum", **POOLS["every"]), pool("max", **POOLS["every"])
    x = normal(2, 4, 8, 2)
    waits = placed("dp", None, None, None, partial=("sp",))
    assert waits in {w.results[0] for w in check(sums, (x,), [waits], TWO)}
    assert waits not in {w.results[0] for w in check(largest, (x,), [waits], TWO)}
    waits = placed("dp", None, None, None, partial=("sp",), reduce="max")
    assert waits in {w.results[0] for w in check(largest, (x,), [waits], TWO)}


@pytest.mark.parametrize(("kind", "fun"), [("sum", lax.add), ("max", lax.max), ("min", lax.min)])
@pytest.mark.every(2)
def test_global_pool(kind, fun):
    """One window that covers a dim reduces it: the result is Partial, nothing travels."""
    init = {"sum": 0.0, "max": -np.inf, "min": np.inf}[kind]
    everything = lambda x: lax.reduce_window(x, init, fun, (1, 4, x.shape[2], 1), (1, 4, 1, 1), "VALID")  # noqa: E731
    for width in (16, 13):
        ways = check(everything, (normal(2, 4, width, 2),), [CUT], TWO)
        assert placed("dp", None, None, None, partial=("sp",), reduce=kind) in {w.results[0] for w in ways}


@pytest.mark.not_smoke
def test_pool_any_computation():
    x = normal(4, 6, 8, 2)
    window = {"window_dimensions": (1, 2, 1, 1), "window_strides": (1, 2, 1, 1), "padding": "VALID"}
    ways = check(lambda x: lax.reduce_window(x, 1.0, lax.mul, **window), (x,), [placed("dp", None, "sp", None)], TWO)
    assert CUT in {w.results[0] for w in ways}
    ways = check(lambda x: lax.reduce_window(x, 1.0, lax.mul, **window), (x,), [placed(None, "dp", "sp", None)], TWO)
    assert {w.results[0] for w in ways} == {placed(None, None, "sp", None), WHOLE}

    def both(x, y):
        return lax.reduce_window((x, y), (1.0, 0.0), lambda a, b: (a[0] * b[0], a[1] + b[1]), **window)

    ways = check(both, (x, x + 1), [CUT, CUT], TWO)
    assert (CUT, CUT) in {w.results for w in ways}


def test_select_and_scatter_by_letters():
    """Nothing public traces to it; its letters are checked as they are."""
    params = {"window_dimensions": (1, 2), "window_strides": (1, 2), "padding": ((0, 0), (0, 0))}
    x, source, scalar = (Type(s, np.dtype(float)) for s in ((4, 8), (4, 4), ()))
    rule = RULES["select_and_scatter"](Op("select_and_scatter", params, (x, source, scalar), (x,)))
    assert rule.operands == ((("a",), ("b8",)), (("a",), ("b4",)), ())
    assert rule.results == ((("a",), ("b8",)),)
    assert rule.whole == {"b8", "b4"}


# --- derivatives of max pooling -----------------------------------------------------------------------


def backward(pooling):
    """The gradient of a pooling, with nothing else around it."""
    return lambda g, x: jax.vjp(pooling, x)[1](g)[0]


def tied(*shape, seed=0):
    """Small integers, so that most windows have several largest elements."""
    return np.random.default_rng(seed).integers(0, 3, shape).astype(float)


@pytest.mark.parametrize(("kind", "name"), [("max", "aligned"), ("max", "overlapping"), ("min", "every")])
@pytest.mark.every(2)
def test_pool_gradient_in_space(kind, name):
    pooling = pool(kind, **POOLS[name])
    x = tied(2, 6, 24, 2)
    g = normal(*pooling(x).shape)
    way = check_halo(backward(pooling), (g, x), [CUT, CUT], TWO, CUT)
    assert (not way.traffic) == (name == "aligned")
    _, _, ways = found(pooling, (x,), [CUT], TWO)
    if way.traffic:
        forward = next(w for w in ways if w.operands == (CUT,))
        assert halo_key(way) == halo_key(forward), "one exchange for both"


@pytest.mark.parametrize(("width", "name"), [(13, "overlapping"), (22, "uneven")])
@pytest.mark.not_smoke
def test_pool_gradient_in_uneven_space(width, name):
    pooling = pool("max", **POOLS[name])
    x = tied(3, 6, width, 2)
    check_halo(backward(pooling), (normal(*pooling(x).shape), x), [CUT, CUT], TWO, CUT)


@pytest.mark.not_smoke
def test_pool_gradient_two_dims_on_eight():
    pooling = pool("max", **POOLS["overlapping"])
    x = tied(1, 8, 16, 1)
    g = normal(*pooling(x).shape)
    cut = placed(None, "h", "w", None)
    check_halo(backward(pooling), (g, x), [cut, cut], {"h": 2, "w": 4}, cut)
    cut = placed(None, None, "sp", None)
    check_halo(backward(pooling), (g, x), [cut, cut], ALL, cut)


@pytest.mark.not_smoke
def test_pool_gradient_partial():
    pooling = pool("max", **POOLS["overlapping"])
    x = tied(2, 4, 16, 1)
    waits = placed("dp", None, None, None, partial=("sp",))
    ways = check(backward(pooling), (normal(*pooling(x).shape), x), [waits, placed("dp", None, None, None)], TWO)
    assert waits in {w.results[0] for w in ways}


@pytest.mark.parametrize("name", ["overlapping", "uneven"])
@pytest.mark.every(2)
@pytest.mark.not_smoke
def test_pool_tangent_in_space(name):
    """Forward mode over max pooling (as in Hessian-vector products)."""
    for width, dilation in ((16, 1), (22, 2)):
        x = tied(2, 6, width, 1)
        pooling = pool("max", **POOLS[name], dilation=dilation)
        tangent = lambda t, x, f=pooling: jax.jvp(f, (x,), (t,))[1]  # noqa: E731
        check_halo(tangent, (normal(*x.shape), x), [CUT, CUT], TWO, CUT)


# --- sweeps -------------------------------------------------------------------------------------------


def drawn_conv(rng):
    while True:
        case = {
            "kernel": int(rng.integers(1, 6)),
            "strides": (1, int(rng.integers(1, 4))),
            "padding": ((0, 1), tuple(int(p) for p in rng.integers(-2, 5, 2))),
            "lhs_dilation": (1, int(rng.integers(1, 4))),
            "rhs_dilation": (1, int(rng.integers(1, 3))),
            "feature_group_count": int(rng.choice([1, 1, 2, 4])),
            "features": (4, 8),
        }
        width = int(rng.integers(9, 40))
        (lo, hi), dilated = case["padding"][1], (width - 1) * case["lhs_dilation"][1] + 1
        reach = (case["kernel"] - 1) * case["rhs_dilation"][1] + 1
        if lo + hi + dilated - reach >= 3 * case["strides"][1]:
            return width, case


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_sweep_conv(seed):
    rng = np.random.default_rng(seed)
    width, case = drawn_conv(rng)
    sizes = [{"dp": 2, "sp": 2}, TWO, ALL][seed % 3]
    groups, (inputs, outputs) = case.pop("feature_group_count"), case.pop("features")
    x, k = normal(2, 2, width, inputs), normal(1, case.pop("kernel"), inputs // groups, outputs)
    cut = placed("dp" if "dp" in sizes else None, None, "sp", None)
    ops = convolutions(x, k, numbers=LAST, feature_group_count=groups, **case)
    for (conv, args), places in zip(ops, [[cut, WHOLE], [cut, cut], [cut, WHOLE]], strict=True):
        check(conv, args, places, sizes)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_sweep_pool(seed):
    rng = np.random.default_rng(seed)
    window, stride, width = (int(rng.integers(lo, hi)) for lo, hi in ((1, 6), (1, 5), (9, 40)))
    padding = tuple(int(p) for p in rng.integers(0, window + 1, 2))
    x, sizes = tied(2, 6, width, 1, seed=seed), [{"dp": 2, "sp": 2}, TWO, ALL][seed % 3]
    cut = placed("dp" if "dp" in sizes else None, None, "sp", None)
    for kind in ("sum", "max", "min"):
        pooling = pool(kind, window, stride, padding)
        check(pooling, (x,), [cut], sizes)
        if kind != "sum":
            check(backward(pooling), (normal(*pooling(x).shape), x), [cut, cut], sizes)


@pytest.mark.slow
@pytest.mark.parametrize("dilations", list(itertools.product((1, 2, 3), (1, 2))))
def test_sweep_dilated_pool(dilations):
    base, dilation = dilations
    x = tied(2, 6, 17, 1)
    for kind, stride in itertools.product(("sum", "max"), (1, 2, 3)):
        pooling = pool(kind, 3, stride, (2, 1), dilation=dilation, base=base)
        check(pooling, (x,), [CUT], TWO)
        if kind == "max":
            check(lambda t, x, f=pooling: jax.jvp(f, (x,), (t,))[1], (normal(*x.shape), x), [CUT, CUT], TWO)

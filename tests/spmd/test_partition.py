"""`sk.partition` as a user meets it: arguments, results, meshes, marks, errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.extend import core as jex_core
from jax.interpreters import mlir

import shardkit as sk

R, S, P = sk.Replicate(), sk.Shard, sk.Partial
rng = np.random.default_rng(1)
X = rng.normal(size=(8, 16))
W = rng.normal(size=(16, 12))


odd_p = jex_core.Primitive("odd")  # which no rule knows
odd_p.def_impl(lambda x: x[::-1])
odd_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(odd_p, mlir.lower_fun(lambda x: x[::-1], multiple_results=False))


def same(got, want, **kwargs):
    """Values of both, PartialArrays reduced, Padded cropped."""
    leaves = [jax.tree.leaves(t, is_leaf=lambda x: isinstance(x, sk.PartialArray | sk.Padded)) for t in (got, want)]
    for a, b in zip(*leaves, strict=True):
        whole = sk.unshard(a) if isinstance(a, sk.PartialArray | sk.Padded) else a
        np.testing.assert_allclose(np.asarray(whole), np.asarray(b), rtol=1e-9, atol=1e-9, **kwargs)


def bytes_of(report):
    return sum(c.bytes * (c.trip_count or 1) for c in report)


@pytest.fixture
def mesh(mesh_for):
    return mesh_for({"dp": 2, "tp": 4})


class TestArguments:
    def test_once_for_all_and_by_argument(self, mesh):
        fun = lambda x, y: (x + y, x * 2)  # noqa: E731
        same(sk.partition(fun, {"dp": S(0)}, mesh=mesh)(X, X), fun(X, X))
        out = sk.partition(fun, ({"dp": S(0)}, [R, S(1)]), mesh=mesh)(X, X)
        same(out, fun(X, X))

    def test_as_the_arrays_are(self, mesh):
        x = sk.shard_tensor(X, {"tp": S(1)}, mesh)
        out = sk.partition(lambda x: x + 1, None)(x)
        assert sk.placements(out) == (R, S(1))

    def test_trees_and_prefixes(self, mesh):
        params = {"a": {"w": W, "b": W[0]}, "c": W[:, 0]}
        fun = lambda p, x: jax.nn.relu(x @ p["a"]["w"] + p["a"]["b"])  # noqa: E731
        places = {"a": {"w": {"tp": S(1)}, "b": {"tp": S(0)}}, "c": None}
        partitioned = sk.partition(fun, (places, {"dp": S(0)}), mesh=mesh)
        out = partitioned(params, X)
        same(out, fun(params, X))
        assert sk.placements(out) == (S(0), S(1))
        assert partitioned.program(params, X).bytes_per_device == 0

    def test_keywords_static_and_numbers(self, mesh):
        def fun(x, scale, *, mode, shift=0.0):
            return x * scale + shift if mode == "add" else x

        partitioned = sk.partition(fun, {"dp": S(0)}, mesh=mesh, static_argnums=())
        same(sk.partition(fun, ({"dp": S(0)}, None), mesh=mesh)(X, 2.0, mode="add", shift=1.0), X * 2 + 1)
        same(sk.partition(fun, ({"dp": S(0)},), mesh=mesh)(x=X, scale=3.0, mode="other"), X)
        with pytest.raises(ValueError, match="scale"):  # a number has no dim to cut
            partitioned(X, 2.0, mode="add")

    def test_traced_once_a_kind(self, mesh):
        traced = []

        def fun(x):
            traced.append(1)
            return x + 1

        partitioned = sk.partition(fun, {"dp": S(0)}, mesh=mesh)
        partitioned(X)
        partitioned(X + 1)
        partitioned.program(X)
        assert len(traced) == 1
        partitioned(X[:, :8])
        assert len(traced) == 2

    def test_static_argnums(self, mesh):
        partitioned = sk.partition(lambda x, n: x**n, ({"dp": S(0)}, None), mesh=mesh, static_argnums=1)
        same(partitioned(X, 3), X**3)
        assert "integer_pow" in str(partitioned.program(X, 3))

    def test_donation(self, mesh):
        x = sk.shard_tensor(jnp.asarray(X), {"dp": S(0)}, mesh)
        sk.partition(lambda x: x + 1, {"dp": S(0)}, mesh=mesh, donate_argnums=0)(x)
        assert x.is_deleted()

    def test_captured_arrays(self, mesh):
        w = sk.shard_tensor(W, {"tp": S(1)}, mesh)
        partitioned = sk.partition(lambda x: x @ w + W[0], {"dp": S(0)}, mesh=mesh)
        same(partitioned(X), X @ W + W[0])
        assert partitioned.program(X).bytes_per_device == 0

    def test_padded(self, mesh):
        x = sk.shard_tensor(X[:7], {"tp": S(0)}, mesh, uneven="pad")
        fun = lambda x: (jnp.tanh(x), (x @ W).sum(0), x.mean(), x.max(1))  # noqa: E731
        partitioned = sk.partition(fun, {"tp": S(0)}, mesh=mesh)
        out = partitioned(x)
        same(out, fun(X[:7]))
        assert isinstance(out[0], sk.Padded) and out[0].shape == (7, 16)

    def test_partial_arguments(self, mesh):
        x = sk.reshard(sk.shard_tensor(X, {}, mesh), {"dp": P(), "tp": S(1)})
        partitioned = sk.partition(lambda x: (2 * x, jnp.tanh(x)), None, "inferred")
        out = partitioned(x)
        same(out, (2 * X, np.tanh(X)))
        assert out[0].layout.placements == (P(), S(1)) and sk.placements(out[1]) == (R, S(1))

    def test_no_arrays(self, mesh):
        same(sk.partition(lambda: jnp.arange(8.0) * 2, None, {"dp": S(0)}, mesh=mesh)(), np.arange(8.0) * 2)

    def test_nnx_state(self, mesh):
        graphdef, state = nnx.split(nnx.Linear(16, 12, rngs=nnx.Rngs(0)))
        fun = lambda state, x: nnx.merge(graphdef, state)(x)  # noqa: E731
        # Placements in the state's own structure.
        places = jax.tree.map(lambda leaf: {"tp": S(leaf.ndim - 1)}, state)
        x = X.astype("float32")
        for given in (None, places):
            out = sk.partition(fun, (given, {"dp": S(0)}), mesh=mesh)(state, x)
            np.testing.assert_allclose(out, fun(state, x), rtol=1e-5, atol=1e-6)
        assert sk.placements(out) == (S(0), S(1))


class TestResults:
    def test_where_asked(self, mesh):
        partitioned = sk.partition(lambda x: x + 1, {"dp": S(0)}, {"dp": S(1), "tp": S(0)}, mesh=mesh)
        out = partitioned(X)
        same(out, X + 1)
        assert sk.placements(out) == (S(1), S(0))

    def test_partial_when_asked(self, mesh):
        places = ({"dp": S(0), "tp": S(1)}, {"tp": S(0)})
        for asked in ("inferred", {"dp": S(0), "tp": P()}):
            partitioned = sk.partition(jnp.matmul, places, asked, mesh=mesh)
            out = partitioned(X, W)
            assert isinstance(out, sk.PartialArray) and out.layout.placements == (S(0), P())
            same(out, X @ W)
            assert partitioned.program(X, W).bytes_per_device == 0
        assert sk.placements(sk.partition(jnp.matmul, places, mesh=mesh)(X, W)) == (S(0), R)

    def test_scattered_where_the_caller_wants_it_cut(self, mesh_for):
        mesh = mesh_for({"tp": 4})
        places = ({"tp": S(1)}, {"tp": S(0)})
        partitioned = sk.partition(lambda x, w: x @ w * 2, places, {"tp": S(0)}, mesh=mesh)
        same(partitioned(X, W), X @ W * 2)
        assert [r.collectives for r in partitioned.program(X, W).reshards] == [("reduce_scatter",)]

    def test_mixed_trees(self, mesh):
        fun = lambda x: {"a": x.sum(0), "b": (x + 1, x * 2)}  # noqa: E731
        out = sk.partition(fun, {"dp": S(0)}, {"a": "inferred", "b": ({"tp": S(1)}, None)}, mesh=mesh)(X)
        same(out, fun(X))
        assert isinstance(out["a"], sk.PartialArray)
        assert sk.placements(out["b"][0]) == (R, S(1)) and sk.placements(out["b"][1])[0] == S(0)

    def test_an_output_that_is_an_input(self, mesh):
        out = sk.partition(lambda x: (x, x, 1.5), {"dp": S(0)}, mesh=mesh)(X)
        same(out, (X, X, 1.5))

    def test_uneven_results(self, mesh_for):
        mesh = mesh_for({"sp": 4})
        image = rng.normal(size=(1, 18, 3))
        kernel = rng.normal(size=(3, 3, 2))
        fun = lambda x: lax.conv_general_dilated(  # noqa: E731
            x, kernel, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC")
        )
        x = sk.shard_tensor(image, {"sp": S(1)}, mesh, uneven="pad")
        out = sk.partition(fun, {"sp": S(1)}, mesh=mesh)(x)
        assert out.shape == (1, 16, 2) and sk.placements(out) == (S(1),)
        same(out, fun(image))


class TestWhere:
    @pytest.mark.parametrize("axis_types", ["auto", "explicit"])
    @pytest.mark.parametrize("sizes", [{"tp": 1}, {"tp": 2}, {"dp": 2, "tp": 2}, {"dp": 2, "sp": 2, "tp": 2}])
    @pytest.mark.every(2)
    def test_meshes(self, mesh_for, ambient, axis_types, sizes):
        mesh = mesh_for(sizes, axis_types)
        fun = lambda x, w: jax.nn.softmax(x @ w, -1).sum(0)  # noqa: E731
        places = ({"dp": S(0)} if "dp" in sizes else {"tp": R}, {"tp": S(1)})
        partitioned = sk.partition(fun, places, mesh=mesh)
        with ambient(mesh):
            same(partitioned(X, W), fun(X, W))
            same(jax.jit(partitioned)(X, W), fun(X, W))
            # The maximum and the sum over a cut dim travel, never the logits.
            kinds = {k for r in partitioned.program(X, W).reshards for k in r.collectives}
        assert kinds <= {"all_reduce"}

    def test_ambient_mesh(self, mesh):
        with jax.set_mesh(mesh):
            same(sk.partition(lambda x: x + 1, {"dp": S(0)})(X), X + 1)

    def test_under_jit(self, mesh):
        inner = sk.partition(lambda x: x.sum(0), {"dp": S(0)}, mesh=mesh)
        same(jax.jit(lambda x: inner(x) * 2)(X), X.sum(0) * 2)

    def test_differentiated_from_outside(self, mesh):
        partitioned = sk.partition(lambda w, x: jnp.tanh(x @ w).sum(), ({"tp": S(1)}, {"dp": S(0)}), mesh=mesh)
        want = jax.grad(lambda w: jnp.tanh(X @ w).sum())(W)
        same(jax.grad(partitioned)(jnp.asarray(W), jnp.asarray(X)), want)


class TestMarks:
    def test_constrain(self, mesh):
        fun = lambda x: sk.constrain(x * 2, {"dp": S(0), "tp": S(1)}) + 1  # noqa: E731
        partitioned = sk.partition(fun, [R, R], mesh=mesh)
        out = partitioned(X)
        same(out, X * 2 + 1)
        assert sk.placements(out) == (S(0), S(1))
        assert partitioned.program(X).bytes_per_device == 0

    def test_constrain_to_partial_keeps_it_so(self, mesh):
        def fun(x, w):
            return sk.constrain(x @ w, {"tp": P()}) * 3

        places = ({"tp": S(1)}, {"tp": S(0)})
        out = sk.partition(fun, places, "inferred", mesh=mesh)(X, W)
        assert isinstance(out, sk.PartialArray)
        same(out, X @ W * 3)

    def test_chains_are_folded(self, mesh):
        fun = lambda x: sk.constrain(sk.constrain(x, {"tp": S(0)}), {"tp": S(1)}) + 1  # noqa: E731
        program = sk.partition(fun, {"tp": S(1)}, mesh=mesh).program(X)
        assert program.reshards == ()

    def test_with_sharding_constraint(self, mesh):
        def fun(x):
            y = lax.with_sharding_constraint(x + 1, jax.sharding.PartitionSpec("dp", "tp"))
            return y * 2

        out = sk.partition(fun, [R, R], mesh=mesh)(X)
        same(out, (X + 1) * 2)
        assert sk.placements(out) == (S(0), S(1))

    def test_gradients_pass(self, mesh):
        def loss(x):
            return (sk.constrain(x, {"tp": S(1)}) ** 2).sum()

        same(sk.partition(jax.grad(loss), [R, R], mesh=mesh)(X), 2 * X)

    def test_two_uses_share_one_reshard(self, mesh):
        def fun(x):
            y = jnp.sort(x, 0)  # needs its dim whole
            return y + 1, jnp.sort(x, 0, descending=True) * 2

        program = sk.partition(fun, {"dp": S(0)}, mesh=mesh).program(X)
        assert len([r for r in program.reshards if r.collectives]) == 1

    def test_outside(self, mesh):
        with pytest.raises(ValueError, match=r"sk\.partition"):
            sk.constrain(jnp.ones(8), [S(0)])
        with jax.set_mesh(mesh):
            assert sk.placements(jax.jit(lambda x: sk.constrain(x, {"dp": S(0)}))(jnp.ones(8)))[0] == S(0)


class TestRandomness:
    def test_the_numbers_of_one_device(self, mesh):
        def fun(key, x):
            a, b = jax.random.split(key)
            kept = jax.random.bernoulli(a, 0.5, x.shape)
            return jnp.where(kept, x, 0) + jax.random.normal(b, x.shape), jax.random.permutation(a, 8)

        key = jax.random.key(3)
        partitioned = sk.partition(fun, (None, {"dp": S(0), "tp": S(1)}), mesh=mesh)
        same(partitioned(key, X), fun(key, X))
        assert partitioned.program(key, X).bytes_per_device == 0


class TestRegionsWithin:
    def test_shard_map_of_the_users(self, mesh):
        def inner(x):
            return x - lax.pmean(x, "dp")

        def fun(x):
            centred = jax.shard_map(
                inner, mesh=mesh, in_specs=jax.sharding.PartitionSpec("dp"), out_specs=jax.sharding.PartitionSpec("dp")
            )(x)
            return centred * 2

        same(sk.partition(fun, {"tp": S(1)}, mesh=mesh)(X), jax.jit(fun)(X))

    def test_ring_convolution(self, mesh_for):
        mesh = mesh_for({"sp": 4})
        image, kernel = rng.normal(size=(2, 16, 16, 3)), rng.normal(size=(3, 3, 3, 4))
        conv = functools.partial(
            lax.conv_general_dilated,
            window_strides=(1, 1),
            padding="SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        partitioned = sk.partition(lambda x, k: conv(x, k), ({"sp": S(2)}, None), mesh=mesh)
        same(partitioned(image, kernel), conv(image, kernel))
        report = sk.collectives(partitioned, image, kernel)
        assert {c.kind for c in report} == {"collective_permute"} and len(report) == 2
        assert bytes_of(report) == partitioned.program(image, kernel).bytes_per_device


class TestErrors:
    @pytest.mark.parametrize(
        "fun",
        [
            lambda x: x if x.sum() > 0 else -x,
            lambda x: x * float(x.sum()),
            lambda x: x * np.asarray(x),
            lambda x: x[x > 0],
            lambda x: [x for _ in range(x[0, 0].astype(int))],
        ],
    )
    def test_a_function_that_looks_at_values(self, mesh, fun):
        line = fun.__code__.co_firstlineno
        text = rf"<lambda> looks at the values of its arguments, at \w+\.py:{line}, so that .* jax\.lax\.cond"
        with pytest.raises(TypeError, match=text) as raised:
            sk.partition(fun, {}, mesh=mesh)(X)
        assert "shardkit" not in str(raised.value)

    def test_arguments_without_an_entry_are_as_they_are(self, mesh):
        program = sk.partition(jnp.matmul, ({"dp": S(0)},), mesh=mesh).program(X, X.T)
        assert [p[0] for p in program.in_placements] == [S(0), sk.Replicate()]

    def test_placements_that_dont_match(self, mesh):
        with pytest.raises(ValueError, match="in_placements of argument 0 doesn't match"):
            sk.partition(lambda p: p["a"], ({"b": {"dp": S(0)}},), mesh=mesh)({"a": X})
        with pytest.raises(
            ValueError, match=r"given are \{'b': \*\}, wanted \{'a': \*\} \(\* for each array\); give"
        ) as raised:
            sk.partition(lambda p: p, {}, {"b": {"dp": S(0)}}, mesh=mesh)({"a": X})
        assert "PyTreeDef" not in str(raised.value)
        with pytest.raises(ValueError, match="3 entries for 1 positional"):
            sk.partition(jnp.sin, (None, None, None), mesh=mesh)(X)
        with pytest.raises(TypeError, match="where placements belong"):
            sk.partition(jnp.sin, (3,), mesh=mesh)(X)
        with pytest.raises(ValueError, match="out_placements"):
            sk.partition(jnp.sin, {"dp": S(0)}, ({"dp": S(0)}, None, None), mesh=mesh)(X)

    def test_axes_and_dims(self, mesh):
        with pytest.raises(ValueError, match=r"x of shape .*'sp'"):
            sk.partition(lambda x: x, {"sp": S(0)}, mesh=mesh)(X)
        with pytest.raises(ValueError, match=r"Shard\(2\)"):
            sk.partition(lambda x: x, {"dp": S(2)}, mesh=mesh)(X)
        with pytest.raises(ValueError, match=r"uneven=\"pad\""):
            sk.partition(lambda x: x, {"dp": S(0)}, mesh=mesh)(X[:7])

    def test_lives_elsewhere(self, mesh):
        x = sk.shard_tensor(X, {"dp": S(1)}, mesh)
        with pytest.raises(ValueError, match=r"partition moves nothing: x of shape .* sk\.reshard it first"):
            sk.partition(lambda x: x, {"dp": S(0)}, mesh=mesh)(x)
        with pytest.raises(ValueError, match=r"under jax\.jit, on Auto mesh axes"):
            jax.jit(sk.partition(lambda x: x, None, mesh=mesh))(X)

    def test_unknown_options(self, mesh):
        with pytest.raises(ValueError, match='use "replicate" or "error"'):
            sk.partition(jnp.sin, None, unknown="skip")
        with pytest.raises(ValueError, match='None or "inferred"'):
            sk.partition(jnp.sin, None, "guess")
        with pytest.raises(ValueError, match="found no mesh"):
            sk.partition(jnp.sin, [S(0)])(X)

    def test_a_constraint_on_unknown_axes(self, mesh):
        def fun(x):
            return sk.constrain(x, {"pp": S(0)})

        with pytest.raises(ValueError, match=r"sk_constrain at test_partition\.py:\d+.*'pp'.*\('dp', 'tp'\)"):
            sk.partition(fun, {"dp": S(0)}, mesh=mesh)(X)

        other = sk.make_mesh({"pp": 8})

        def native(x):
            return lax.with_sharding_constraint(x, jax.sharding.NamedSharding(other, jax.sharding.PartitionSpec("pp")))

        with pytest.raises(ValueError, match="pp"):
            sk.partition(native, {"dp": S(0)}, mesh=mesh)(X)

    @pytest.mark.parametrize("name", ["debug", "pure", "io"])
    def test_callbacks(self, mesh, name):
        def fun(x):
            if name == "debug":
                jax.debug.print("{}", x.sum())
            elif name == "pure":
                x = jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
            else:
                x = jax.experimental.io_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
            return x

        with pytest.raises(NotImplementedError, match=r"(callback|print) at test_partition\.py:\d+"):
            sk.partition(fun, {"dp": S(0)}, mesh=mesh)(X)

    def test_callbacks_in_loops(self, mesh):
        def body(carry, row):
            jax.debug.print("{}", row.sum())
            return carry, row

        with pytest.raises(NotImplementedError, match=r"at test_partition\.py:\d+"):
            sk.partition(lambda x: lax.scan(body, 0.0, x), {"tp": S(1)}, mesh=mesh)(X)

    def test_operations_without_a_rule(self, mesh):
        fun = lambda x: odd_p.bind(x + 1) * 2  # noqa: E731
        with pytest.raises(NotImplementedError, match=r"operation odd at test_partition\.py:\d+ has no rule"):
            sk.partition(fun, {"dp": S(0)}, mesh=mesh, unknown="error")(X)
        partitioned = sk.partition(fun, {"dp": S(0)}, mesh=mesh)
        same(partitioned(X), (X[::-1] + 1) * 2)
        program = partitioned.program(X)
        assert [s.op for s in program.replicated] == ["odd"]
        assert "whole on every device, for want of a rule:\n  odd" in str(program)
        assert f"{program.bytes_per_device:,} bytes gathered" in str(program)

    def test_manual_axes(self, mesh):
        inner = sk.partition(lambda x: x, {"dp": S(0)}, mesh=mesh)
        spec = jax.sharding.PartitionSpec("dp")
        with pytest.raises(ValueError, match=r"manual here"):
            jax.shard_map(inner, mesh=mesh, in_specs=spec, out_specs=spec)(X)

    def test_static_arguments_must_hash(self, mesh):
        class Odd:
            __hash__ = None

        with pytest.raises(TypeError, match="don't hash"):
            sk.partition(lambda x, o: x, ({"dp": S(0)}, None), mesh=mesh)(X, Odd())

    def test_partial_given_as_a_whole_value(self, mesh):
        with pytest.raises(TypeError, match="whole value"):
            sk.partition(jnp.sin, {"dp": P()}, mesh=mesh)(X)

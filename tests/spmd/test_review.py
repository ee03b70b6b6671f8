"""What a second reading found: one test for each kind."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk

R, S = sk.Replicate(), sk.Shard
rng = np.random.default_rng(5)
X = rng.normal(size=(8, 6))


@pytest.fixture
def x2(mesh_for):
    return mesh_for({"x": 2})


class TestDifferentiatedFromOutside:
    """Functions with derivatives of their own keep them."""

    def test_custom_jvp(self, x2):
        relu = sk.partition(lambda x: jax.nn.relu(x).sum(), [S(0)], mesh=x2)
        np.testing.assert_array_equal(jax.grad(relu)(jnp.zeros(4)), np.zeros(4))
        np.testing.assert_array_equal(jax.jit(jax.grad(relu))(jnp.zeros(4)), np.zeros(4))
        np.testing.assert_array_equal(jax.grad(jax.jit(relu))(jnp.zeros(4)), np.zeros(4))

    def test_custom_vjp(self, x2):
        @jax.custom_vjp
        def straight(x):
            return jnp.round(x)

        straight.defvjp(lambda x: (straight(x), None), lambda _, g: (g,))
        fun = lambda x, n: {"a": (straight(x) * n).sum(), "b": n}  # noqa: E731
        rounded = sk.partition(fun, [S(0)], mesh=x2)
        n = jnp.arange(8)[:, None]  # an integer argument and result have no gradient
        got = jax.grad(lambda x: rounded(x, n)["a"])(X)
        np.testing.assert_allclose(got, jax.grad(lambda x: fun(x, n)["a"])(X))

    def test_refused_where_it_would_be_lost(self, x2):
        summed = sk.partition(lambda x: jax.nn.relu(x).sum(0), [S(0)], "inferred", mesh=x2)
        with pytest.raises(NotImplementedError, match="take the gradient in the function itself"):
            jax.grad(lambda x: summed(x).stack.sum())(X)


class TestRegions:
    def test_one_in_another(self, mesh_for):
        mesh = mesh_for({"dp": 4, "tp": 2})

        def fun(x):
            inner = lambda b: b * (1.0 + lax.axis_index("tp"))  # noqa: E731
            spec = P(None, "tp")
            outer = lambda b: jax.shard_map(inner, in_specs=spec, out_specs=spec, axis_names={"tp"})(b)  # noqa: E731
            return jax.shard_map(outer, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"), axis_names={"dp"})(x)

        np.testing.assert_allclose(sk.partition(fun, {"dp": S(0)}, mesh=mesh)(X), jax.jit(fun)(X))

    def test_their_collectives_count(self, x2):
        fun = lambda x: jax.shard_map(lambda b: b - lax.psum(b, "x"), mesh=x2, in_specs=P("x"), out_specs=P("x"))(x)  # noqa: E731
        partitioned = sk.partition(fun, [S(0)], mesh=x2)
        report = sk.collectives(partitioned, X)
        assert sum(c.bytes for c in report) == partitioned.program(X).bytes_per_device > 0

    def test_a_matrix_that_differs_between_devices(self, x2):
        body = lambda b: b @ (jnp.eye(6) * (1.0 + lax.axis_index("x")))  # noqa: E731
        fun = lambda x: jax.shard_map(body, mesh=x2, in_specs=P("x"), out_specs=P("x"))(x)  # noqa: E731
        np.testing.assert_allclose(sk.partition(fun, [S(0)], mesh=x2)(X), jax.jit(fun)(X))


class TestMarks:
    @pytest.mark.parametrize("form", ["sharding", "spec", "layout", "mapping", "list"])
    def test_every_form_under_grad_and_vmap(self, x2, form):
        given = {
            "sharding": NamedSharding(x2, P("x")),
            "spec": P("x"),
            "layout": sk.Layout(x2, [S(0)]),
            "mapping": {"x": S(0)},
            "list": [S(0)],
        }[form]
        fun = jax.grad(lambda x: (sk.constrain(x, given) ** 2).sum())
        np.testing.assert_allclose(sk.partition(fun, [R], mesh=x2)(X), 2 * X)
        rows = jax.vmap(lambda row: sk.constrain(row, given) * 2)
        np.testing.assert_allclose(sk.partition(rows, [R], mesh=x2)(X), 2 * X)

    def test_a_spec_of_fewer_dims(self, x2):
        # JAX takes it that nothing is said of the others: they stay as they are.
        fun = lambda x: lax.with_sharding_constraint(x + 1, P("x")) * 2  # noqa: E731
        out = sk.partition(fun, [R], mesh=x2)(X)
        np.testing.assert_allclose(out, (X + 1) * 2)
        assert sk.placements(out) == (S(0),)

    def test_a_kind_that_the_dtype_has_not(self, x2):
        fun = lambda x: sk.constrain(x.astype(int), {"x": sk.Partial("mean")}) * 2  # noqa: E731
        with pytest.raises(TypeError, match=r"sk_constrain at test_review\.py:\d+.*integer mean"):
            sk.partition(fun, [R], mesh=x2)(X)


class TestStages:
    def test_a_cotangent_that_stays(self, x2):
        fun = jax.grad(lambda x: (sk.on_mesh(x * 2, x2, [S(0)]) ** 2).sum())
        np.testing.assert_allclose(sk.partition(fun, [R], mesh=x2)(X), 8 * X)

    def test_a_cotangent_that_needs_no_values(self, x2):
        other = sk.make_mesh({"y": 2}, devices=jax.devices()[2:4])
        fun = jax.grad(lambda x: sk.on_mesh(x * 2, other, [S(0)]).sum())
        np.testing.assert_allclose(sk.partition(fun, [S(0)], mesh=x2)(X), np.full((8, 6), 2.0))

    def test_outputs_on_other_devices_of_a_mesh_of_one_shape(self, x2):
        other = sk.make_mesh({"x": 2}, devices=jax.devices()[2:4])
        with pytest.raises(ValueError, match=r"take it there with sk\.on_mesh"):
            sk.partition(lambda x: x * 2, [S(0)], NamedSharding(other, P("x")), mesh=x2)(X)


class TestCalls:
    def test_options_of_jax_make_another_program(self, x2):
        partitioned = sk.partition(jnp.matmul, [R], mesh=x2)
        a = X.T.astype("float32")
        assert "HIGHEST" not in partitioned.lower(a, a.T).as_text()
        with jax.default_matmul_precision("highest"):
            assert "HIGHEST" in partitioned.lower(a, a.T).as_text()

    def test_without_arrays_the_ambient_mesh_counts(self, mesh_for):
        fun = sk.partition(lambda: jnp.arange(8.0), None)
        for size in (2, 4):
            with jax.set_mesh(mesh_for({"x": size})):
                assert fun().sharding.mesh.size == size

    def test_another_ambient_mesh(self, x2, mesh_for):
        with jax.set_mesh(mesh_for({"x": 8})), pytest.raises(ValueError, match="is ambient"):
            sk.partition(lambda x: x, [S(0)], mesh=x2)(X)

    def test_positions_count_from_the_back_too(self, x2):
        np.testing.assert_allclose(sk.partition(lambda x, n: x**n, [S(0)], mesh=x2, static_argnums=-1)(X, 2), X**2)
        with pytest.raises(ValueError, match="static_argnums has"):
            sk.partition(lambda x: x, [S(0)], mesh=x2, static_argnums=7)(X)

    def test_once_for_all_is_for_keywords_too(self, x2):
        fun = sk.partition(lambda x, *, y: x + y, [S(0)], mesh=x2)
        assert fun.program(X, y=X).in_placements == ((S(0),), (S(0),))

    def test_a_result_that_cannot_be_there(self, x2):
        with pytest.raises(ValueError, match=r"out_placements of a result of shape \(\)"):
            sk.partition(jnp.sum, [S(0)], [S(0)], mesh=x2)(X)

    def test_an_axis_of_one_device_keeps_its_label(self, mesh_for):
        one = mesh_for({"x": 1})
        out = sk.partition(lambda x: x.sum(0), [S(0)], [sk.Partial()], mesh=one)(X)
        assert isinstance(out, sk.PartialArray)
        np.testing.assert_allclose(out.reduce(), X.sum(0))


def test_counting_in_a_short_float(x2):
    fun = lambda x: jnp.arange(602, dtype=jnp.bfloat16) * x  # noqa: E731
    x = jnp.ones(602, jnp.bfloat16)
    got = sk.partition(fun, [S(0)], mesh=x2)(x)
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(fun(x), np.float32))


def test_a_loop_that_never_runs(x2):
    fun = lambda x, w: lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=0)[0]  # noqa: E731
    partitioned = sk.partition(fun, ([S(1)], [S(0)]), mesh=x2)
    np.testing.assert_allclose(partitioned(X, X[:6]), X)

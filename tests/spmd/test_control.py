"""Loops, branches and remat: one layout for a carry, sums that stay apart in the loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardkit as sk

R, S, P = sk.Replicate(), sk.Shard, sk.Partial()
rng = np.random.default_rng(2)
X = rng.normal(size=(8, 16))
W = rng.normal(size=(16, 16)) / 4


def check(fun, places, mesh, *args, out=None):
    """Values of one device, and the compiled bytes as planned."""
    partitioned = sk.partition(fun, places, out, mesh=mesh)
    got, want = partitioned(*args), fun(*args)
    is_leaf = lambda x: isinstance(x, sk.PartialArray | sk.Padded)  # noqa: E731
    for a, b in zip(jax.tree.leaves(got, is_leaf=is_leaf), jax.tree.leaves(want), strict=True):
        a = sk.unshard(a) if is_leaf(a) else a
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-9, atol=1e-9)
    report = sk.collectives(partitioned, *args)
    program = partitioned.program(*args)
    if all(c.trip_count is not None for c in report):
        assert sum(c.bytes * c.trip_count for c in report) == program.bytes_per_device
    return program, report


@pytest.fixture
def dp(mesh_for):
    return mesh_for({"dp": 4})


def accumulated(w, batches):
    """The gradient of several microbatches, summed in a loop."""

    def loss(w, x):
        return jnp.tanh(x @ w).sum()

    def body(total, x):
        return total + jax.grad(loss)(w, x), loss(w, x)

    total, losses = lax.scan(body, jnp.zeros_like(w), batches)
    return w - 0.1 * total, losses.sum()


class TestScan:
    @pytest.mark.not_smoke
    def test_gradients_stay_apart_in_the_loop(self, dp):
        program, report = check(accumulated, (None, {"dp": S(1)}), dp, W, rng.normal(size=(6, 8, 16)))
        assert report.count(in_loop=True) == 0
        assert report.count("all_reduce") == len(report)
        # One reduction of the sum of all, and one of the losses.
        assert program.bytes_per_device == (16 * 16 + 1) * 8 * 3 // 2

    def test_the_carry_is_where_the_body_leaves_it(self, dp):
        def fun(x, w):
            return lax.scan(lambda h, _: (jnp.tanh(h @ w + x), h.sum(1)), jnp.zeros((8, 16)), None, length=5)

        program, report = check(fun, ({"dp": S(0)}, None), dp, X, W)
        assert len(report) == 0
        assert program.out_placements == ((S(0),), (S(1),))

    def test_what_the_loop_needs_moved_is_moved_once(self, dp):
        # A weight that is cut where the body needs it whole is put together before the loop.
        fun = lambda x, w: lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=5)[0]  # noqa: E731
        _, report = check(fun, ({"dp": S(0)}, {"dp": S(0)}), dp, X, W)
        assert report.count(in_loop=True) == 0

    def test_over_a_cut_dim(self, dp):
        check(lambda x: lax.scan(lambda c, row: (c + row, c * row), jnp.zeros(16), x), {"dp": S(0)}, dp, X)
        check(lambda x: lax.scan(lambda c, row: (c + row, c), jnp.zeros(16), x, reverse=True), {"dp": S(1)}, dp, X)

    def test_differentiated(self, dp):
        def loss(w, x):
            return (lax.scan(lambda h, _: (jnp.tanh(h @ w), h), x, None, length=4)[0] ** 2).sum()

        program, report = check(jax.value_and_grad(loss), (None, {"dp": S(0)}), dp, W, X)
        assert report.count(in_loop=True) == 0  # the weight's gradient is summed over time first
        assert program.bytes_per_device == (16 * 16 + 1) * 8 * 3 // 2

    def test_within_a_scan(self, dp):
        def fun(x, w):
            def outer(h, _):
                return lax.scan(lambda g, _: (jnp.sin(g @ w), None), h, None, length=2)[0], h.max()

            return lax.scan(outer, x, None, length=3)

        check(fun, ({"dp": S(0)}, None), dp, X, W)

    def test_tensor_parallel(self, mesh_for):
        def fun(x, a, b):
            return lax.scan(lambda h, _: (h + jax.nn.relu(h @ a) @ b, None), x, None, length=3)[0]

        program, report = check(fun, ([R], [S(1)], [S(0)]), mesh_for({"tp": 4}), X, W, W)
        assert report.count("all_reduce", in_loop=True) == 1 and len(report) == 1
        (reshard,) = program.reshards
        assert reshard.times == 3


class TestWhile:
    def test_until_small(self, dp):
        def fun(x):
            return lax.while_loop(lambda c: jnp.abs(c[0]).sum() > 1.0, lambda c: (c[0] * 0.5, c[1] + 1), (x, 0))

        program, _ = check(fun, {"dp": S(0)}, dp, X)
        assert program.out_placements == ((S(0),), (R,))

    def test_fori(self, dp):
        fun = lambda x, w: lax.fori_loop(0, 4, lambda i, h: jnp.tanh(h @ w) + i, x)  # noqa: E731
        program, report = check(fun, ({"dp": S(0)}, None), dp, X, W)
        assert len(report) == 0 and program.out_placements == ((S(0),),)


class TestCond:
    def test_branches_leave_at_one_place(self, dp):
        def fun(flag, x, w):
            return lax.cond(flag, lambda x: x @ w, lambda x: x * 2, x)

        for flag in (True, False):
            program, _ = check(fun, (None, {"dp": S(0)}, None), dp, flag, X, W)
            assert program.out_placements == ((S(0),),)

    def test_a_branch_left_partial(self, dp):
        fun = lambda i, x: lax.switch(i, [lambda x: x.sum(0), lambda x: x[0] * 0, lambda x: x.max(0)], x)  # noqa: E731
        for i in range(3):
            check(fun, (None, {"dp": S(0)}), dp, i, X)

    def test_the_condition_is_whole(self, dp):
        check(lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x), {"dp": S(0)}, dp, X)


class TestRemat:
    def test_values_and_barriers(self, dp):
        def loss(w, x):
            return jax.checkpoint(lambda x: jnp.sin(jnp.sin(x @ w)).sum())(x)

        fun = jax.value_and_grad(loss)
        check(fun, (None, {"dp": S(0)}), dp, W, X)
        partitioned = sk.partition(fun, (None, {"dp": S(0)}), mesh=dp)
        assert "optimization_barrier" in partitioned.lower(W, X).as_text()

    def test_collectives_are_run_again_only_if_they_are_within(self, mesh_for):
        def block(x, a, b):
            return jnp.tanh(x @ a) @ b

        def loss(x, a, b):
            return (jax.checkpoint(block)(x, a, b) ** 2).sum()

        mesh = mesh_for({"tp": 4})
        _, report = check(jax.grad(loss, (0, 1, 2)), ([R], [S(1)], [S(0)]), mesh, X, W, W)
        assert report.count("all_reduce") == 2  # what the block returns, and its input's gradient
